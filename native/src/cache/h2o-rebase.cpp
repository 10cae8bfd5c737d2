// Re-bases: when the text outgrows the positions that the model was trained on, the kept rows go back to earlier ones.

#include "cache/h2o-cache.h"

#include "cache/h2o-device-rows.h"

#include "llama-context.h"

#include <algorithm>
#include <limits>

bool llama_h2o::can_rebase() const {
    // learned position embeddings and temperatures by position are part of what the rows were computed from
    if (kv.hparams.rope_type == LLAMA_ROPE_TYPE_NONE || kv.hparams.f_attn_temp_scale != 0.0f) {
        return false;
    }

    return std::all_of(layers.begin(), layers.end(), [](const layer & l) { return l.rope && l.rope->known; });
}

llama_pos llama_h2o::pos_limit() const {
    return can_rebase() ? std::numeric_limits<llama_pos>::max() : llama_pos(params.n_pos);
}

// New positions for the rows of a head, in place: `back` less, but never two at the same or below zero.
//   order   cells in the order of the text
static std::vector<llama_h2o_turn> turn_back(
        const std::vector<uint32_t> & order, llama_pos back, llama_pos * rope_pos) {
    std::vector<llama_h2o_turn> turns;
    for (size_t i = 0; i < order.size(); ++i) {
        const llama_pos old_pos = rope_pos[order[i]];
        const llama_pos new_pos = std::max(llama_pos(i), old_pos - back);
        if (new_pos != old_pos) {
            turns.push_back({ order[i], new_pos - old_pos });
            rope_pos[order[i]] = new_pos;
        }
    }

    return turns;
}

// Rotates all rows back, by as much as the token at p_next has to go back. Distances stay, but for rows
// that would get a position below zero: those are packed at the start, in the order of the text. Each
// row goes from the position it has to the new one in a single step.
void llama_h2o::rebase(uint32_t s, llama_pos p_next) {
    ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    auto & st = streams[s];

    std::vector<uint32_t> order = used_cells(s);

    list_rows(s, order);
    st.marks.clear();

    // dense: no room but for the rows. otherwise distances are kept as far as a re-base stays rare
    const llama_pos n_rows = llama_pos(order.size());
    const llama_pos next =
            params.positions == LLAMA_H2O_POSITIONS_DENSE ? n_rows : std::max(n_rows, llama_pos(params.n_pos / 2));
    const llama_pos back = p_next - st.shift - next;

    llama_h2o_cache_graph graph(layers.size());

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        ggml_tensor * k = kv.layers[ikv].k;

        std::vector<std::vector<llama_h2o_turn>> turns;
        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            const llama_pos * pos = st.pos[ikv].data() + size_t(head) * kv.get_size();
            llama_pos * rope_pos  = st.rope_pos[ikv].data() + size_t(head) * kv.get_size();

            std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return pos[a] < pos[b]; });

            turns.push_back(turn_back(order, back, rope_pos));
        }

        if (layer.on_host) {
            llama_h2o_host_rows rows(k, s);
            llama_h2o_rotation rotation(*layer.rope, layer.k);
            for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
                rotation.apply(rows.data(), head, turns[head]);
            }
        } else {
            llama_h2o_build_turns(graph, { k, layer.k, s * k->nb[2] }, *layer.rope, turns.data());
        }
    }

    turn_queries(s, back, graph);

    run_in_place(graph);

    st.shift += back;

    st.count.n_rebases    += 1;
    st.count.t_rebases_us += ggml_time_us() - t_start_us;
}

// As many turns on devices as a re-base can make.
llama_h2o_cache_graph llama_h2o::build_most_turns() const {
    llama_h2o_cache_graph graph(layers.size());

    for (size_t ikv = 0; ikv < layers.size() && can_rebase(); ++ikv) {
        const auto & layer = layers[ikv];
        if (!layer.on_host) {
            const std::vector<std::vector<llama_h2o_turn>> turns(layer.n_head_kv);
            llama_h2o_build_turns(graph, { kv.layers[ikv].k, layer.k, 0 }, *layer.rope, turns.data());
        }
    }

    return graph;
}
