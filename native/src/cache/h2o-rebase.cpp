#include "cache/h2o-rebase.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-device-rows.h"
#include "cache/h2o-window.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>

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

// Turns last queries of a layer back with its keys.
static void turn_queries(const llama_h2o_layer & layer,
        ggml_tensor * ring,
        uint32_t s,
        const std::vector<llama_h2o_turn> & turns,
        llama_h2o_cache_graph & graph) {
    if (turns.empty() || layer.rope->angles.empty()) {
        return;
    }

    // the ring of a head lies like the rows of a tensor with one head
    const uint32_t n_embd = ring->ne[0];
    const uint32_t n_ring = ring->ne[1];
    const uint32_t n_head = layer.shape.n_head;
    const size_t offset   = ring->nb[3] * s;

    if (!layer.shape.on_host) {
        const llama_h2o_row_layout layout { GGML_TYPE_F32, n_embd, n_embd, n_ring * n_head, false };

        std::vector<llama_h2o_turn> all;
        for (uint32_t head = 0; head < n_head; ++head) {
            for (const auto & turn : turns) {
                all.push_back({ head * n_ring + turn.cell, turn.by });
            }
        }
        llama_h2o_build_turns(graph, { ring, layout, offset }, *layer.rope, &all);
        return;
    }

    const llama_h2o_row_layout layout { GGML_TYPE_F32, n_embd, n_embd, n_ring, false };

    llama_h2o_rotation rotation(*layer.rope, layout);
    for (uint32_t head = 0; head < n_head; ++head) {
        rotation.apply(static_cast<uint8_t *>(ring->data) + offset + ring->nb[2] * head, 0, turns);
    }
}

// Of one KV head after the other.
static void turn_keys(const llama_h2o_layer & layer,
        uint32_t s,
        const std::vector<std::vector<llama_h2o_turn>> & turns,
        llama_h2o_cache_graph & graph) {
    ggml_tensor * k = layer.tensors.k;

    if (!layer.shape.on_host) {
        llama_h2o_build_turns(graph, { k, layer.shape.k, s * k->nb[2] }, *layer.rope, turns.data());
        return;
    }

    llama_h2o_host_rows rows(k, s);
    llama_h2o_rotation rotation(*layer.rope, layer.shape.k);
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        rotation.apply(rows.data(), head, turns[head]);
    }
}

static std::vector<llama_h2o_turn> turn_back(llama_h2o_query_ring & ring, llama_pos back) {
    std::vector<llama_h2o_turn> turns;
    for (const uint32_t slot : ring.turn_back(back)) {
        turns.push_back({ slot, -back });
    }

    return turns;
}

// All rows of a stream, and what comes behind them.
//   used   the cells in use, all listed
static void turn_rows(llama_h2o_parts & parts, uint32_t s, std::vector<uint32_t> & used, llama_pos back) {
    auto & st = parts.streams[s];

    const auto query_turns = turn_back(st.queries, back);

    llama_h2o_cache_graph graph(parts.n_layers());

    for (const auto & layer : parts.layers) {
        std::vector<std::vector<llama_h2o_turn>> turns;
        for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
            turns.push_back(st.rows.turn_back(layer.shape.first_head + head, used, back));
        }
        turn_keys(layer, s, turns, graph);
    }
    for (const auto & layer : parts.layers) {
        turn_queries(layer, layer.tensors.queries, s, query_turns, graph);
    }

    if (parts.window) {
        const auto turns = parts.window->turns(s, -back);
        for (const auto & layer : parts.window->layers) {
            turn_keys(layer, s, std::vector<std::vector<llama_h2o_turn>>(layer.shape.n_head_kv, turns), graph);
        }
    }

    parts.graphs.run(graph);

    st.rows.shift_back(back);
}

void llama_h2o_rebase(llama_h2o_parts & parts, uint32_t s, llama_pos p_next, llama_pos n_new) {
    parts.ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    auto & st = parts.streams[s];

    std::vector<uint32_t> used = parts.cells.used(s);

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

llama_h2o_cache_graph llama_h2o_build_most_turns(const llama_h2o_parts & parts) {
    llama_h2o_cache_graph graph(parts.n_layers());

    const auto add = [&](const std::vector<llama_h2o_layer> & layers) {
        for (const auto & layer : layers) {
            if (!layer.shape.on_host) {
                const std::vector<std::vector<llama_h2o_turn>> turns(layer.shape.n_head_kv);
                llama_h2o_build_turns(graph, { layer.tensors.k, layer.shape.k, 0 }, *layer.rope, turns.data());
            }
        }
    };

    if (llama_h2o_can_rebase(parts)) {
        add(parts.layers);
        if (parts.window) {
            add(parts.window->layers);
        }
    }

    return graph;
}
