#include "cache/h2o-archiving.h"

#include "cache/h2o-device-archiving.h"
#include "cache/h2o-parallel.h"
#include "cache/h2o-rebase.h"
#include "cuda/h2o-cuda.h"
#include "kernels/h2o-kernel.h"
#include "kernels/h2o-row-types.h"

#include "llama-context.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <map>
#include <optional>
#include <string>

static constexpr uint32_t NO_CELL = std::numeric_limits<uint32_t>::max();
static constexpr uint32_t DROPPED = NO_CELL - 1; // no cell, but deliberately

ggml_type llama_h2o_type_of(llama_h2o_archive_type type) {
    static constexpr ggml_type TYPES[] = { GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, GGML_TYPE_F32 };

    return TYPES[type];
}

void llama_h2o_make_archive(llama_h2o_parts & parts, uint32_t s) {
    if (parts.params.recall == 0) {
        return;
    }

    std::vector<llama_h2o_archive_layer> layers;
    for (const auto & layer : parts.layers) {
        layers.push_back(
                { layer.shape.n_head_kv, layer.shape.k.n_embd_head, layer.tensors.v ? layer.shape.v.n_embd_head : 0 });
    }

    const ggml_type type = llama_h2o_type_of(llama_h2o_archive_type(parts.params.archive_type));

    auto & st  = parts.streams[s];
    st.archive = std::make_shared<llama_h2o_archive>(layers, type, parts.params.archive_size);
    st.index   = std::make_shared<llama_h2o_index>(layers, parts.params.recall);
}

// Allocates pinned host memory, which a device reads directly. If pinning is disabled, ggml returns another type of buffer and
// this function null.
static llama_h2o_archive::new_memory_fn shared_memory(ggml_backend_buffer_type_t buft, int64_t max_bytes) {
    return [buft, left = std::make_shared<std::atomic<int64_t>>(max_bytes)](
                   size_t size) -> llama_h2o_archive::page_memory {
        ggml_backend_buffer_t buffer = *left >= int64_t(size) ? ggml_backend_buft_alloc_buffer(buft, size) : nullptr;
        if (!buffer || ggml_backend_buffer_get_type(buffer) != buft) {
            ggml_backend_buffer_free(buffer);
            return nullptr;
        }
        *left -= size;

        return { static_cast<char *>(ggml_backend_buffer_get_base(buffer)), [buffer, left, size](char *) {
                    ggml_backend_buffer_free(buffer);
                    *left += size;
                } };
    };
}

// Whether the kernels of a device support the heads of a layer.
static bool can_search(const llama_h2o_parts & parts, const llama_h2o_layer & layer) {
    return llama_h2o_cuda_fits(layer.shape.k.n_embd_head) && llama_h2o_cuda_fits(layer.shape.v.n_embd_head) &&
           llama_h2o_has_row_type(parts.streams.front().archive->type()) &&
           layer.shape.n_group() <= llama_h2o_attention::BLOCK;
}

// Maximum groups of queries of a KV head that search together.
static uint32_t max_groups(const llama_h2o_parts & parts, const std::vector<uint32_t> & layers) {
    uint32_t res = 1;
    for (const uint32_t ikv : layers) {
        llama_h2o_attention attn = {};

        attn.n_head_kv = 1;
        attn.n_head    = parts.layers[ikv].shape.n_group();
        res            = std::max(res, (parts.ctx.get_cparams().n_ubatch + attn.n_together() - 1) / attn.n_together());
    }

    return res;
}

uint32_t llama_h2o_notes(const llama_h2o_parts & parts, uint32_t s) {
    const auto & st     = parts.streams[s];
    const auto any_text = [&](auto fn) {
        return std::any_of(parts.streams.begin(), parts.streams.end(), fn);
    };

    uint32_t res = st.archive && st.archive->has_overflowed() ? LLAMA_H2O_NOTE_FULL : 0;
    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        const auto & layer = parts.layers[ikv];
        if (!layer.attention.on_cuda) {
            continue;
        }
        if (parts.policy->divisor(1.0) != 0.0 && (!layer.tensors.choice.bits || !st.claims.starts.empty())) {
            res |= LLAMA_H2O_NOTE_CHOICE;
        }
        if (!st.archive) {
            continue;
        }
        if (!can_search(parts, layer)) {
            res |= LLAMA_H2O_NOTE_HEADS;
        } else if (any_text([](const auto & text) { return !text.archive->is_shared(); })) {
            res |= LLAMA_H2O_NOTE_PINNED;
        } else {
            res |= any_text([](const auto & text) { return !text.index->has_room(); }) ? LLAMA_H2O_NOTE_CODES : 0;
            res |= llama_h2o_archives_on_device(parts, ikv) ? 0 : LLAMA_H2O_NOTE_ARCHIVING;
        }
    }

    return res;
}

void llama_h2o_share_archives(llama_h2o_parts & parts) {
    if (parts.params.recall == 0) {
        return;
    }

    std::map<ggml_backend_buffer_type_t, std::vector<uint32_t>> layers_of_buft;
    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        if (parts.layers[ikv].attention.on_cuda && can_search(parts, parts.layers[ikv])) {
            layers_of_buft[ggml_backend_buffer_get_type(parts.layers[ikv].tensors.k->buffer)].push_back(ikv);
        }
    }
    for (const auto & [buft, layers] : layers_of_buft) {
        ggml_backend_buffer_type_t on_host = ggml_backend_dev_host_buffer_type(ggml_backend_buft_get_device(buft));
        if (!on_host) {
            continue;
        }

        const auto new_memory =
                shared_memory(on_host, parts.params.pinned_size > 0 ? int64_t(parts.params.pinned_size) : INT64_MAX);
        const auto & texts = *parts.device_texts.emplace_back(
                std::make_unique<llama_h2o_device_texts>(buft, layers, parts.streams.size()));
        for (uint32_t s = 0; s < parts.streams.size(); ++s) {
            auto & st = parts.streams[s];
            st.archive->share(new_memory);
            st.index->add_device(std::make_unique<llama_h2o_device_index>(
                    texts, s, max_groups(parts, layers), parts.graphs.backend_of(buft)));
        }
    }
}

int32_t llama_h2o_next_to_archive(const llama_h2o_stream & st) {
    return std::max(st.archive->next(), st.pos_removable - 1);
}

void llama_h2o_note_token(llama_h2o_parts & parts, uint32_t s, int32_t pos, int32_t token) {
    auto & st = parts.streams[s];
    if (!st.archive || pos < llama_h2o_next_to_archive(st) || !st.archive->error().empty()) {
        return;
    }

    const size_t i = size_t(pos - llama_h2o_next_to_archive(st));
    if (i >= st.tokens.size()) {
        st.tokens.resize(i + 1, -1);
    }
    st.tokens[i] = token;
}

void llama_h2o_drop_tokens(llama_h2o_parts & parts, uint32_t s, int32_t p0, int32_t p1) {
    auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    const int32_t next = llama_h2o_next_to_archive(st);
    const size_t begin = std::min<size_t>(st.tokens.size(), std::max(0, p0 - next));
    const size_t end   = std::min<size_t>(st.tokens.size(), std::max(0, p1 - next));

    std::fill(st.tokens.begin() + begin, st.tokens.begin() + std::max(begin, end), -1);
    if (end == st.tokens.size()) {
        st.tokens.resize(begin);
    }
}

// The cells of the positions from `first` to the last one that is not recent; NO_CELL or DROPPED if there is none.
static std::vector<uint32_t> find_cells(const llama_h2o_parts & parts, uint32_t s, int32_t first) {
    const int64_t n = int64_t(parts.cells.newest(s)) - parts.params.recent + 1 - first;

    std::vector<uint32_t> res(std::max<int64_t>(0, n), NO_CELL);
    for (const uint32_t cell : parts.cells.used(s)) {
        const int64_t i = int64_t(parts.cells[s].pos_get(cell)) - first;
        if (i >= 0 && i < n) {
            res[i] = cell;
        }
    }
    for (size_t i = 0; i < res.size(); ++i) {
        if (parts.streams[s].claims.is_dropped(first + int32_t(i))) {
            res[i] = DROPPED;
        }
    }

    return res;
}

// Archives the rows of a layer, from position `first` on.
static void archive_layer(
        llama_h2o_parts & parts, uint32_t s, uint32_t ikv, int32_t first, const std::vector<uint32_t> & cells) {
    const auto & layer   = parts.layers[ikv];
    const auto & rows    = parts.streams[s].rows;
    const auto & k_shape = layer.shape.k;
    const auto & v_shape = layer.shape.v;

    auto & archive = *parts.streams[s].archive;

    llama_h2o_cell_rows k(parts.graphs, layer.tensors.k, k_shape, s, cells);
    std::optional<llama_h2o_cell_rows> v;
    if (layer.tensors.v) {
        v.emplace(parts.graphs, layer.tensors.v, v_shape, s, cells);
    }
    llama_h2o_rotations rotations(*layer.rope);

    const auto form   = layer.rope->form(k_shape.type);
    const auto rotate = llama_h2o_best_kernel(0, 0)->rotate;

    const llama_h2o_key_form to = { archive.type(), 0 };

    std::vector<float> space(std::max(k_shape.n_embd_head, v_shape.n_embd_head));
    std::vector<float> v_row(v_shape.n_embd_head);

    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        const int32_t * rope_list = rows.rope_list(layer.shape.first_head + head);

        for (size_t i = 0; i < cells.size(); ++i) {
            const int32_t pos = first + int32_t(i);
            if (pos < archive.first()) {
                continue; // beyond the size limit
            }

            const int32_t by = rows.in_page(pos, llama_h2o_archive::N_PAGE) - rope_list[cells[i]];
            rotate(rotations.rotation(), rotations.get(by), k_shape.n_embd_head, form, k.at(head, cells[i]), to,
                    archive.k_to_set(ikv, head, pos), space.data());
            if (v && v_shape.transposed) {
                v->read(head, cells[i], v_row.data());
                rotate({}, nullptr, v_shape.n_embd_head, { GGML_TYPE_F32, 0 }, v_row.data(), to,
                        archive.v_to_set(ikv, head, pos), space.data());
            } else if (v) {
                rotate({}, nullptr, v_shape.n_embd_head, { v_shape.type, 0 }, v->at(head, cells[i]), to,
                        archive.v_to_set(ikv, head, pos), space.data());
            }
        }
    }
}

// Archives the rows in these cells, from the archive's next position on; dropped tokens get no rows. It works in chunks, so that
// little of a long prompt is in memory before it is written to a file.
static void archive_cells(llama_h2o_parts & parts, uint32_t s, const std::vector<uint32_t> & cells) {
    static constexpr size_t PIECE = 16 * llama_h2o_archive::N_PAGE;

    auto & st = parts.streams[s];

    for (auto begin = cells.begin(); begin != cells.end() && st.archive->error().empty();) {
        const int32_t first = st.archive->next();
        const bool has_rows = *begin != DROPPED;
        const auto end      = std::find_if(begin, begin + std::min<std::ptrdiff_t>(PIECE, cells.end() - begin),
                [&](uint32_t cell) { return (cell != DROPPED) != has_rows; });

        const std::vector<uint32_t> piece(begin, end);

        st.archive->extend(piece.size(), st.tokens.data(), has_rows);
        try {
            const bool on_devices = st.archive->is_shared() && !parts.device_texts.empty();
            if (on_devices && has_rows) {
                llama_h2o_archive_on_devices(parts, s, first, piece);
            }
            llama_h2o_parallel(parts.layers.size(), piece.size() * parts.n_heads(), parts.ctx.get_cparams().n_threads,
                    [&](size_t ikv) {
                        if (has_rows && (!on_devices || !llama_h2o_archives_on_device(parts, uint32_t(ikv)))) {
                            archive_layer(parts, s, uint32_t(ikv), first, piece);
                        }
                    });
        } catch (...) {
            st.archive->take_back(first); // some rows are incomplete
            throw;
        }
        st.archive->end_extend();
        st.tokens.erase(st.tokens.begin(), st.tokens.begin() + piece.size());
        st.pos_removable = std::max(st.pos_removable, st.archive->next() + 1); // even if the compaction fails
        begin            = end;
    }
}

void llama_h2o_archive_rows(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }
    if (!st.archive->error().empty()) {
        st.tokens.clear();
        return;
    }

    st.index->suspend();

    int32_t first = llama_h2o_next_to_archive(st);

    std::vector<uint32_t> cells = find_cells(parts, s, first);

    // if positions are missing, a new archive starts after them
    const auto missing  = std::find(cells.rbegin(), cells.rend(), NO_CELL);
    const size_t n_drop = cells.rend() - missing;
    if (n_drop > 0) {
        first += int32_t(n_drop);
        cells.erase(cells.begin(), cells.begin() + n_drop);
        st.tokens.erase(st.tokens.begin(), st.tokens.begin() + std::min(n_drop, st.tokens.size()));
    }
    if (first > st.archive->next()) {
        st.archive->begin_at(first);
    }
    if (cells.empty()) {
        return;
    }

    st.tokens.resize(std::max(st.tokens.size(), cells.size()), -1);
    archive_cells(parts, s, cells);
    if (!st.archive->error().empty()) {
        st.tokens.clear();
        st.archive_error = "nothing is archived any more: " + st.archive->error();
    }
}

//
// the index
//

// The positions of the rows that a head holds.
static std::vector<int32_t> held_by(
        const llama_h2o_parts & parts, uint32_t s, uint32_t head, const std::vector<uint32_t> & used) {
    const auto & rows = parts.streams[s].rows;

    std::vector<int32_t> res;
    res.reserve(used.size());
    for (const uint32_t cell : used) {
        res.push_back(rows.pos(head, cell, parts.cells[s].pos_get(cell)));
    }

    return res;
}

static void update_index(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];

    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        const auto & rope = parts.layers[ikv].rope;
        if (rope) {
            st.index->set_rotation(ikv, rope->angles, rope->rotation());
        }
    }
    for (const auto & span : st.claims.dropped) {
        st.archive->drop_rows(span.p0, span.p1);
    }
    std::vector<int32_t> places;
    for (uint32_t page = st.archive->page_begin(); page < st.archive->page_end(); ++page) {
        places.push_back(std::max(st.rows.rope_pos(int32_t(page * llama_h2o_archive::N_PAGE)), 0));
    }
    const bool has_changed = st.index->follow(*st.archive, places);
    for (const auto & span : st.claims.dropped) {
        st.index->exclude(span.p0, span.p1);
    }

    const std::vector<uint32_t> used = parts.cells.used(s);

    // encoding a key costs as much as reading 100 rows of a list
    const size_t n_work = size_t(parts.n_heads()) * (used.size() + 100 * llama_h2o_archive::N_PAGE);
    llama_h2o_parallel(parts.layers.size(), n_work, parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
        const auto & shape = parts.layers[ikv].shape;
        if (has_changed) {
            st.index->encode(*st.archive, ikv);
        }
        for (uint32_t head = 0; head < shape.n_head_kv; ++head) {
            st.index->hide(ikv, head, held_by(parts, s, shape.first_head + head, used));
        }
    });
    st.index->update_devices(*st.archive);
}

void llama_h2o_update_index(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];
    if (!st.archive) {
        return;
    }

    try {
        update_index(parts, s);
    } catch (...) {
        st.index->clear(); // its content is undefined
        throw;
    }
}

//
// restoring evicted rows of pinned positions at a compaction
//

std::vector<int32_t> llama_h2o_restorable(const llama_h2o_stream & st) {
    std::vector<int32_t> res;
    if (!st.archive) {
        return res;
    }

    const auto add = [&](int64_t p0, int64_t p1) {
        for (int64_t p = std::max<int64_t>(p0, st.archive->first()); p < std::min<int64_t>(p1, st.archive->next());
                ++p) {
            res.push_back(int32_t(p));
        }
    };

    add(0, st.claims.n_pinned);
    for (const auto & span : st.claims.spans) {
        add(std::max<int64_t>(span.p0, st.claims.n_pinned), span.p1);
    }

    return res;
}

std::vector<int32_t> llama_h2o_missing(const std::vector<int32_t> & restorable, const std::vector<int32_t> & held) {
    std::vector<uint8_t> is_held(restorable.size(), 0);
    for (size_t i = 0; !restorable.empty() && i < held.size(); ++i) {
        if (held[i] > restorable.back()) {
            continue; // true for most rows
        }
        const auto it = std::lower_bound(restorable.begin(), restorable.end(), held[i]);
        if (*it == held[i]) {
            is_held[it - restorable.begin()] = 1;
        }
    }

    std::vector<int32_t> res;
    for (size_t i = 0; i < restorable.size(); ++i) {
        if (!is_held[i]) {
            res.push_back(restorable[i]);
        }
    }

    return res;
}

bool llama_h2o_has_missing(const llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    const std::vector<int32_t> restorable = llama_h2o_restorable(st);
    if (restorable.empty()) {
        return false;
    }

    const std::vector<uint32_t> used = parts.cells.used(s);
    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        if (!llama_h2o_missing(restorable, held_by(parts, s, h, used)).empty()) {
            return true;
        }
    }

    return false;
}

static void restore_values(
        const llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<llama_h2o_restored> * restored) {
    const auto & layer   = parts.layers[ikv];
    const auto & archive = *parts.streams[s].archive;
    if (!layer.tensors.v) {
        return; // V is a part of K
    }

    std::vector<uint32_t> cells;
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        for (const auto & one : restored[head]) {
            cells.push_back(one.cell);
        }
    }

    llama_h2o_cell_rows rows(parts.graphs, layer.tensors.v, layer.shape.v, s, cells);
    std::vector<float> row(layer.shape.v.n_embd_head);
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        for (const auto & one : restored[head]) {
            const char * values = archive.v(archive.page_of(one.pos), ikv, head);
            const size_t offset = one.pos % llama_h2o_archive::N_PAGE * archive.row_size(ikv);
            llama_h2o_to_floats(archive.type(), values + offset, row.data(), int64_t(row.size()));
            rows.write(head, one.cell, row.data());
        }
    }
    rows.commit();
}

void llama_h2o_restore(
        llama_h2o_parts & parts, uint32_t s, const std::vector<std::vector<llama_h2o_restored>> & restored) {
    const auto is_empty = [](const std::vector<llama_h2o_restored> & list) {
        return list.empty();
    };
    if (std::all_of(restored.begin(), restored.end(), is_empty)) {
        return;
    }

    auto & st = parts.streams[s];
    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        const auto & layer = parts.layers[ikv];
        const auto * lists = restored.data() + layer.shape.first_head;

        restore_values(parts, s, ikv, lists);
        for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
            for (const auto & one : lists[head]) {
                st.rows.replace(layer.shape.first_head + head, one.cell, one.pos);
            }
        }
    }

    llama_h2o_rotate_rows(parts, s, 0, st.rows.rope_pos(parts.cells.newest(s) + 1), restored);
}
