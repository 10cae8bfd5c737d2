#include "cache/h2o-rebase.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parallel.h"
#include "cache/h2o-window.h"
#include "cuda/h2o-cuda.h"
#include "graph/h2o-fused.h"
#include "kernels/h2o-kernel.h"
#include "kernels/h2o-row-types.h"

#include "llama-context.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>

bool llama_h2o_can_rebase(const llama_h2o_parts & parts) {
    const llama_model & model = parts.ctx.get_model();

    // rows also depend on learned position embeddings and on temperatures by position, which cannot be undone
    if (model.pos_embd || model.hparams.f_attn_temp_scale != 0.0f) {
        return false;
    }

    if (parts.window && !parts.window->can_rotate()) {
        return false;
    }

    return std::all_of(parts.layers.begin(), parts.layers.end(),
            [](const llama_h2o_layer & layer) { return layer.rope && layer.rope->known; });
}

llama_pos llama_h2o_pos_limit(const llama_h2o_parts & parts) {
    static constexpr llama_pos MOST = LLAMA_H2O_MOST_POSITIONS;

    return llama_h2o_can_rebase(parts) ? MOST : std::min(llama_pos(parts.params.n_pos), MOST);
}

//
// rotating rows
//

// Rotates the last queries of a layer, for all heads.
static void rotate_queries(
        const llama_h2o_layer & layer, uint32_t s, const std::vector<uint32_t> & slots, llama_pos by) {
    ggml_tensor * ring = layer.tensors.queries;
    if (slots.empty() || layer.rope->angles.empty()) {
        return;
    }

    const auto form   = layer.rope->form(GGML_TYPE_F32);
    const auto rotate = llama_h2o_best_kernel(0, 0)->rotate;
    llama_h2o_rotations rotations(*layer.rope);

    std::vector<float> space(ring->ne[0]);
    std::vector<char> rows(ring->nb[3]);
    ggml_backend_tensor_get(ring, rows.data(), ring->nb[3] * s, rows.size());
    for (int64_t head = 0; head < ring->ne[2]; ++head) {
        for (const uint32_t slot : slots) {
            char * row = rows.data() + ring->nb[2] * head + ring->nb[1] * slot;
            rotate(rotations.rotation(), rotations.get(by), uint32_t(ring->ne[0]), form, row, form, row, space.data());
        }
    }
    ggml_backend_tensor_set(ring, rows.data(), ring->nb[3] * s, rows.size());
}

namespace {

// Rotates a key to another RoPE position.
struct key_rotation {
    uint32_t cell;
    int32_t by;
    const char * archived; // address of the archived key; null: rotate the key in the cache
};

} // namespace

// The rotations of a head's keys. In a quantised cache, keys that are in the archive are rotated from there, so that repeated
// rotations do not accumulate rounding errors.
//   rotated    keys with new positions
//   restored   keys to restore from the archive
static std::vector<key_rotation> sources_of(const llama_h2o_parts & parts,
        uint32_t s,
        uint32_t ikv,
        uint32_t head,
        const std::vector<llama_h2o_row_rotation> & rotated,
        const std::vector<llama_h2o_restored> & restored) {
    const auto & st     = parts.streams[s];
    const auto & shape  = parts.layers[ikv].shape;
    const auto * source = st.archive.get();

    const int32_t * text = st.rows.text_list(shape.first_head + head);
    const int32_t * rope = st.rows.rope_list(shape.first_head + head);

    const auto from_archive = [&](uint32_t cell) -> key_rotation {
        const int32_t n_page = llama_h2o_archive::N_PAGE;
        const char * rows    = source->k(source->page_of(text[cell]), ikv, head);

        return { cell, rope[cell] - st.rows.in_page(text[cell], n_page),
            rows + text[cell] % n_page * source->row_size(ikv) };
    };

    const bool prefers_archive =
            source && ggml_is_quantized(shape.k.type) &&
            ggml_row_size(source->type(), shape.k.n_embd_head) >= ggml_row_size(shape.k.type, shape.k.n_embd_head);

    std::vector<key_rotation> res;
    for (const auto & one : rotated) {
        // a head may still hold dropped rows that the archive does not
        const bool is_archived = prefers_archive && text[one.cell] >= source->first() &&
                                 text[one.cell] < source->next() &&
                                 source->has_rows(llama_h2o_archive::page_of(text[one.cell]));
        res.push_back(is_archived ? from_archive(one.cell) : key_rotation { one.cell, one.by, nullptr });
    }
    // after the others, which may have rotated the meaningless previous content of the cell
    for (const auto & one : restored) {
        res.push_back(from_archive(one.cell));
    }

    return res;
}

// Prefetches a row: rows of a head are scattered, so the processor cannot predict the next one.
static void fetch(const void * row, size_t size) {
    for (size_t i = 0; i < size; i += 64) {
        __builtin_prefetch(static_cast<const char *>(row) + i, 1);
    }
}

// Rotates the keys of a layer.
//   lists   [n_head_kv]
static void rotate_keys(const llama_h2o_parts & parts,
        const llama_h2o_layer & layer,
        uint32_t s,
        const std::vector<std::vector<key_rotation>> & lists) {
    static constexpr size_t N_AHEAD = 6; // rows

    const auto & layout = layer.shape.k;
    const auto form     = layer.rope->form(layout.type);
    const auto rotate   = llama_h2o_best_kernel(0, 0)->rotate;

    const auto & archive  = parts.streams[s].archive;
    const size_t size_row = ggml_row_size(layout.type, layout.n_embd_head);

    std::vector<uint32_t> cells;
    for (const auto & list : lists) {
        for (const auto & one : list) {
            cells.push_back(one.cell);
        }
    }

    llama_h2o_cell_rows rows(parts.graphs, layer.tensors.k, layout, s, cells);
    llama_h2o_rotations rotations(*layer.rope);
    std::vector<float> space(layout.n_embd_head);

    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        const std::vector<key_rotation> & list = lists[head];
        for (size_t i = 0; i < list.size(); ++i) {
            const key_rotation & ahead = list[std::min(i + N_AHEAD, list.size() - 1)];
            fetch(rows.at(head, ahead.cell), size_row);
            fetch(ahead.archived, ahead.archived ? size_row : 0);

            uint8_t * row = rows.at(head, list[i].cell);
            rotate(rotations.rotation(), rotations.get(list[i].by), layout.n_embd_head,
                    list[i].archived ? llama_h2o_key_form { archive->type(), 0 } : form,
                    list[i].archived ? static_cast<const void *>(list[i].archived) : row, form, row, space.data());
        }
    }
    rows.commit();
}

// Whether the device of a layer can rotate its keys: it has a kernel, and no key is read from the archive.
static bool has_rotations(const llama_h2o_layer & layer, const std::vector<std::vector<key_rotation>> & lists) {
    const auto is_there = [](const std::vector<key_rotation> & list) {
        return std::none_of(list.begin(), list.end(), [](const key_rotation & one) { return one.archived; });
    };

    return layer.attention.on_cuda && llama_h2o_has_row_type(layer.shape.k.type) &&
           llama_h2o_cuda_fits(layer.shape.k.n_embd_head) && std::all_of(lists.begin(), lists.end(), is_there);
}

// Like rotate_keys(), by a node of a graph: only cells and factors are copied to the device.
static void rotate_on_device(const llama_h2o_parts & parts,
        llama_h2o_layer & layer,
        uint32_t s,
        const std::vector<std::vector<key_rotation>> & lists) {
    llama_h2o_rotation_table rotations(*layer.rope);

    std::vector<int32_t> rows;
    std::vector<int32_t> places;
    for (uint32_t head = 0; head < lists.size(); ++head) {
        for (const auto & one : lists[head]) {
            const int32_t place = rotations.place(one.by);
            if (place >= 0) {
                rows.push_back(int32_t(one.cell * lists.size() + head));
                places.push_back(place);
            }
        }
    }
    if (rows.empty()) {
        return;
    }

    llama_h2o_cache_graph graph(1);
    ggml_tensor * list = ggml_new_tensor_2d(graph.get_ctx(), GGML_TYPE_I32, int64_t(rows.size()), 2);
    ggml_set_input(list);
    rows.insert(rows.end(), places.begin(), places.end());
    graph.lists[list] = std::move(rows);

    graph.add(llama_h2o_build_rotations(graph.get_ctx(), layer, s, list, rotations.add_to(graph)));
    parts.graphs.run(graph);
}

void llama_h2o_rotate_rows(llama_h2o_parts & parts,
        uint32_t s,
        llama_pos back,
        llama_pos next,
        const std::vector<std::vector<llama_h2o_restored>> & restored) {
    auto & rows = parts.streams[s].rows;

    const std::vector<uint32_t> used = parts.cells.used(s);

    // rotating a row costs as much as reading several
    llama_h2o_parallel(
            parts.layers.size(), 8 * used.size() * parts.n_heads(), parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
                auto & layer = parts.layers[ikv];

                std::vector<uint32_t> cells = used;
                std::vector<std::vector<key_rotation>> lists;
                for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
                    const uint32_t h = layer.shape.first_head + head;
                    lists.push_back(sources_of(parts, s, uint32_t(ikv), head, rows.rotate_back(h, cells, back, next),
                            restored.empty() ? std::vector<llama_h2o_restored>() : restored[h]));
                }
                if (has_rotations(layer, lists)) {
                    rotate_on_device(parts, layer, s, lists);
                } else {
                    rotate_keys(parts, layer, s, lists);
                }
            });
}

// Rotates the last queries and the windowed layers of a stream.
static void rotate_others(llama_h2o_parts & parts, uint32_t s, llama_pos back) {
    auto & st = parts.streams[s];

    const std::vector<uint32_t> slots = st.queries.rotate_back(back);
    for (const auto & layer : parts.layers) {
        rotate_queries(layer, s, slots, -back);
    }

    if (parts.window) {
        std::vector<key_rotation> rotations;
        for (const uint32_t cell : parts.window->cells.used(s)) {
            rotations.push_back({ cell, -back, nullptr });
        }
        for (const auto & layer : parts.window->layers) {
            rotate_keys(parts, layer, s, { layer.shape.n_head_kv, rotations });
        }
    }

    st.rows.shift_back(back);
}

void llama_h2o_rebase(llama_h2o_parts & parts, uint32_t s, llama_pos p_next, llama_pos n_new) {
    parts.ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    auto & st = parts.streams[s];

    const std::vector<uint32_t> used = parts.cells.used(s);

    st.rows.list(used, parts.cells.positions(s, used));
    st.marks.clear();

    // keep half of the positions, so that distances survive and re-bases are rare; fewer if the new tokens need more than half
    // of the positions (large slack)
    const llama_pos n_rows = llama_pos(used.size());
    const llama_pos n_pos  = llama_pos(parts.params.n_pos);
    const llama_pos wanted = std::max(n_rows, std::min(n_pos / 2, n_pos - n_new));
    const llama_pos next   = std::min(wanted, st.rows.rope_pos(p_next)); // an image has more rows than positions
    const llama_pos back   = st.rows.rope_pos(p_next) - next;

    parts.change_rows(s, [&] {
        llama_h2o_rotate_rows(parts, s, back, next, {});
        rotate_others(parts, s, back);
    });
    st.count.n_rebases += 1;

    llama_h2o_update_index(parts, s);

    st.count.t_rebases_us += ggml_time_us() - t_start_us;
}
