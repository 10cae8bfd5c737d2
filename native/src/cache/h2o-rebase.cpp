#include "cache/h2o-rebase.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parallel.h"
#include "cache/h2o-window.h"
#include "kernels/h2o-kernel.h"

#include "llama-context.h"
#include "llama-model.h"

#include "ggml-backend.h"

#include <algorithm>
#include <functional>

bool llama_h2o_can_rebase(const llama_h2o_parts & parts) {
    const llama_model & model = parts.ctx.get_model();

    // learned position embeddings and temperatures by position are part of what the rows were computed from
    if (model.pos_embd || model.hparams.f_attn_temp_scale != 0.0f) {
        return false;
    }

    if (parts.window && !parts.window->can_turn()) {
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
// the rows
//

// Last queries of a layer, of every head.
static void turn_queries(const llama_h2o_layer & layer, uint32_t s, const std::vector<uint32_t> & slots, llama_pos by) {
    ggml_tensor * ring = layer.tensors.queries;
    if (slots.empty() || layer.rope->angles.empty()) {
        return;
    }

    const auto form = layer.rope->form(GGML_TYPE_F32);
    const auto turn = llama_h2o_best_kernel(0, 0)->turn;
    llama_h2o_turns turns(*layer.rope);

    std::vector<float> space(ring->ne[0]);
    std::vector<char> rows(ring->nb[3]);
    ggml_backend_tensor_get(ring, rows.data(), ring->nb[3] * s, rows.size());
    for (int64_t head = 0; head < ring->ne[2]; ++head) {
        for (const uint32_t slot : slots) {
            char * row = rows.data() + ring->nb[2] * head + ring->nb[1] * slot;
            turn(turns.turning(), turns.get(by), uint32_t(ring->ne[0]), form, row, form, row, space.data());
        }
    }
    ggml_backend_tensor_set(ring, rows.data(), ring->nb[3] * s, rows.size());
}

// Rows of a head lie apart, so the processor cannot guess which one is next.
static void fetch(const uint8_t * row, size_t size) {
    for (size_t i = 0; i < size; i += 64) {
        __builtin_prefetch(row + i, 1);
    }
}

namespace {

// A key on its way to another position of its rotary embedding.
struct key_turn {
    uint32_t cell;
    int32_t by;
    const char * archived; // read there; null: where it lies
};

} // namespace

// What a re-base does to the keys of a head. Those of a quantised cache that are in the archive are turned on from there:
// however often a key is turned, it is rounded once more and not each time.
//   cells   in use, all listed
static std::vector<key_turn> turn_head(
        llama_h2o_parts & parts, uint32_t s, size_t ikv, uint32_t head, std::vector<uint32_t> & cells, llama_pos back) {
    static constexpr int32_t N_PAGE = llama_h2o_archive::N_PAGE;

    auto & st           = parts.streams[s];
    const auto & shape  = parts.layers[ikv].shape;
    const auto * source = st.archive.get();

    const bool from_archive =
            source && ggml_is_quantized(shape.k.type) &&
            ggml_row_size(source->type(), shape.k.n_embd_head) >= ggml_row_size(shape.k.type, shape.k.n_embd_head);

    std::vector<key_turn> res;
    for (const auto & turn : st.rows.turn_back(shape.first_head + head, cells, back)) {
        const int32_t pos = st.rows.text_list(shape.first_head + head)[turn.cell];
        if (!from_archive || pos < source->first() || pos >= source->next()) {
            res.push_back({ turn.cell, turn.by, nullptr });
            continue;
        }
        const int32_t in_page = pos % N_PAGE;
        const char * row      = source->k(source->page_of(pos), ikv, head) + in_page * source->row_size(ikv);
        res.push_back({ turn.cell, st.rows.rope_list(shape.first_head + head)[turn.cell] - in_page, row });
    }

    return res;
}

// Rows of a head lie apart, so the processor cannot guess which one is next.
static void fetch(const void * row, size_t size) {
    for (size_t i = 0; i < size; i += 64) {
        __builtin_prefetch(static_cast<const char *>(row) + i, 1);
    }
}

// The keys of a layer.
//   turns_of   of a KV head
static void turn_keys(const llama_h2o_layer & layer,
        uint32_t s,
        ggml_type archive_type,
        const std::function<std::vector<key_turn>(uint32_t head)> & turns_of) {
    static constexpr size_t N_AHEAD = 6; // rows

    const auto & layout = layer.shape.k;
    const auto form     = layer.rope->form(layout.type);
    const auto turn     = llama_h2o_best_kernel(0, 0)->turn;

    const size_t size_row  = ggml_row_size(layout.type, layout.n_embd_head);
    const size_t size_cell = ggml_row_size(layout.type, layout.n_embd);

    llama_h2o_host_rows rows(layer.tensors.k, s);
    llama_h2o_turns turns(*layer.rope);
    std::vector<float> space(layout.n_embd_head);

    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        uint8_t * first = rows.data() + head * size_row;

        const std::vector<key_turn> list = turns_of(head);
        for (size_t i = 0; i < list.size(); ++i) {
            const key_turn & ahead = list[std::min(i + N_AHEAD, list.size() - 1)];
            fetch(first + ahead.cell * size_cell, size_row);
            fetch(ahead.archived, ahead.archived ? size_row : 0);

            uint8_t * row = first + list[i].cell * size_cell;
            turn(turns.turning(), turns.get(list[i].by), layout.n_embd_head,
                    list[i].archived ? llama_h2o_key_form { archive_type, 0 } : form,
                    list[i].archived ? static_cast<const void *>(list[i].archived) : row, form, row, space.data());
        }
    }
    rows.commit();
}

// All rows of a stream, and what comes behind them.
//   used   the cells in use, all listed
static void turn_rows(llama_h2o_parts & parts, uint32_t s, const std::vector<uint32_t> & used, llama_pos back) {
    auto & st = parts.streams[s];

    const size_t n_threads = parts.ctx.get_cparams().n_threads;

    const ggml_type archive_type = st.archive ? st.archive->type() : GGML_TYPE_F32;

    // a row takes as long as some of those that are only looked at
    llama_h2o_parallel(parts.layers.size(), 8 * used.size() * parts.n_heads(), n_threads, [&](size_t ikv) {
        std::vector<uint32_t> cells = used;
        turn_keys(parts.layers[ikv], s, archive_type,
                [&](uint32_t head) { return turn_head(parts, s, ikv, head, cells, back); });
    });

    const std::vector<uint32_t> slots = st.queries.turn_back(back);
    for (const auto & layer : parts.layers) {
        turn_queries(layer, s, slots, -back);
    }

    if (parts.window) {
        std::vector<key_turn> turns;
        for (const uint32_t cell : parts.window->used(s)) {
            turns.push_back({ cell, -back, nullptr });
        }
        for (const auto & layer : parts.window->layers) {
            turn_keys(layer, s, archive_type, [&](uint32_t) { return turns; });
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

    // dense: no room but for the rows. otherwise distances are kept as far as a re-base stays rare, and the new tokens
    // have positions: a large slack takes more of them at once than half
    const llama_pos n_rows = llama_pos(used.size());
    const llama_pos n_pos  = llama_pos(parts.params.n_pos);
    const llama_pos next   = parts.params.positions == LLAMA_H2O_POSITIONS_DENSE
                                     ? n_rows
                                     : std::max(n_rows, std::min(n_pos / 2, n_pos - n_new));
    const llama_pos back   = st.rows.rope_pos(p_next) - next;

    parts.change_rows(s, [&] { turn_rows(parts, s, used, back); });
    st.count.n_rebases += 1;

    llama_h2o_update_index(parts, s);

    st.count.t_rebases_us += ggml_time_us() - t_start_us;
}
