#include "graph/h2o-queries.h"

#include "cache/h2o-cache.h"
#include "cache/h2o-device-rows.h"

#include "llama-graph.h"

#include <algorithm>

//
// in the graph
//

namespace {

// The slots for the last queries of a ubatch, shared by all layers.
class input_query_slots : public llm_graph_input_i {
public:
    input_query_slots(const llama_ubatch & ubatch, uint32_t n_queries) :
        n_tokens(ubatch.n_tokens), n_seqs(ubatch.n_seqs_unq), n_queries(n_queries) {}

    void set_input(const llama_ubatch * ubatch) override {
        const int64_t n_last   = slots->ne[0];
        const int64_t n_stream = slots->ne[2];
        const int64_t n_each   = ubatch->n_tokens / n_stream;

        std::vector<int32_t> data;
        for (int64_t s = 0; s < n_stream; ++s) {
            for (int64_t i = n_each - n_last; i < n_each; ++i) {
                data.push_back(ubatch->pos[s * n_each + i] % int32_t(n_queries));
            }
        }

        ggml_backend_tensor_set(slots, data.data(), 0, data.size() * sizeof(int32_t));
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.ubatch.n_tokens == n_tokens && params.ubatch.n_seqs_unq == n_seqs;
    }

    ggml_tensor * slots = nullptr; // I32 [n_last, 1, n_stream]

private:
    const uint32_t n_tokens;
    const uint32_t n_seqs;
    const uint32_t n_queries;
};

} // namespace

static ggml_tensor * new_slots(const llm_graph_context & graph, uint32_t n_queries, int64_t n_last, int64_t n_stream) {
    auto input = std::make_unique<input_query_slots>(graph.ubatch, n_queries);

    input->slots = ggml_new_tensor_3d(graph.ctx0, GGML_TYPE_I32, n_last, 1, n_stream);
    ggml_set_input(input->slots);

    ggml_tensor * slots = input->slots;
    graph.res->add_input(std::move(input));

    return slots;
}

void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);

    const auto & layer = *h2o->find_layer(il);
    if (!layer.queries) {
        return;
    }

    ggml_context * ctx = graph.ctx0;

    ggml_tensor * ring = layer.queries;

    const int64_t n_queries = ring->ne[1];
    const int64_t n_tokens  = q->ne[1];
    const int64_t n_last    = std::min(n_tokens, n_queries);
    const int64_t n_stream  = q->ne[3];

    // layers come in order, so the first one begins a graph
    if (h2o->is_first(layer)) {
        h2o->query_slots = new_slots(graph, n_queries, n_last, n_stream);
    }

    ggml_tensor * last = ggml_view_4d(
            ctx, q, q->ne[0], n_last, q->ne[2], n_stream, q->nb[1], q->nb[2], q->nb[3], q->nb[1] * (n_tokens - n_last));

    ring = ggml_view_4d(ctx, ring, ring->ne[0], n_queries, ring->ne[2], n_stream, ring->nb[1], ring->nb[2], ring->nb[3],
            ring->nb[3] * llama_h2o::first_stream(graph.mctx));

    ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, ring, last, h2o->query_slots));
}

//
// in the cache
//

void llama_h2o::note_queries(stream & st, llama_pos p_first, llama_pos p_last) {
    const llama_pos n_slots = llama_pos(st.queries.size());

    for (llama_pos p = std::max(p_first, p_last - n_slots + 1); n_slots > 0 && p <= p_last; ++p) {
        st.queries[p % n_slots] = { p, p - st.shift };
    }
}

void llama_h2o::forget_queries(stream & st, llama_pos p0) {
    for (auto & slot : st.queries) {
        if (slot.pos >= p0) {
            slot.pos = -1;
        }
    }
}

// Turns the queries of a stream back with the keys, but packs none of them: a query has no place among the rows.
void llama_h2o::turn_queries(uint32_t s, llama_pos back, llama_h2o_cache_graph & graph) {
    auto & st = streams[s];

    std::vector<llama_h2o_turn> turns;
    for (uint32_t i = 0; i < st.queries.size(); ++i) {
        if (st.queries[i].pos >= 0) {
            st.queries[i].rope_pos -= back;
            turns.push_back({ i, -back });
        }
    }
    if (turns.empty()) {
        return;
    }

    for (const auto & layer : layers) {
        if (layer.rope->angles.empty()) {
            continue;
        }

        // the ring of a head lies like the rows of a tensor with one head
        const uint32_t n_embd = layer.queries->ne[0];
        const uint32_t n_ring = st.queries.size();
        const size_t size     = layer.queries->nb[2];
        const size_t offset   = layer.queries->nb[3] * s;

        if (!layer.on_host) {
            const llama_h2o_row_layout layout { GGML_TYPE_F32, n_embd, n_embd, n_ring * layer.n_head, false };

            std::vector<llama_h2o_turn> all;
            for (uint32_t head = 0; head < layer.n_head; ++head) {
                for (const auto & turn : turns) {
                    all.push_back({ head * n_ring + turn.cell, turn.by });
                }
            }
            llama_h2o_build_turns(graph, { layer.queries, layout, offset }, *layer.rope, &all);
            continue;
        }

        const llama_h2o_row_layout layout { GGML_TYPE_F32, n_embd, n_embd, n_ring, false };

        llama_h2o_rotation rotation(*layer.rope, layout);
        for (uint32_t head = 0; head < layer.n_head; ++head) {
            rotation.apply(static_cast<uint8_t *>(layer.queries->data) + offset + size * head, 0, turns);
        }
    }
}
