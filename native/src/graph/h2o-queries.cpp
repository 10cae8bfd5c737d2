#include "graph/h2o-queries.h"

#include "cache/h2o-cache.h"

#include "llama-graph.h"

#include <algorithm>

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

// Stores the last queries of a layer in one of its rings.
//   slots   of the ring; made by the first layer of a graph, as layers come in order
static void build_ring(
        const llm_graph_context & graph, ggml_tensor * q, ggml_tensor * ring, ggml_tensor *& slots, bool is_first) {
    ggml_context * ctx = graph.ctx0;

    const int64_t n_queries = ring->ne[1];
    const int64_t n_tokens  = q->ne[1];
    const int64_t n_last    = std::min(n_tokens, n_queries);
    const int64_t n_stream  = q->ne[3];

    if (is_first) {
        slots = new_slots(graph, n_queries, n_last, n_stream);
    }

    ggml_tensor * last = ggml_view_4d(
            ctx, q, q->ne[0], n_last, q->ne[2], n_stream, q->nb[1], q->nb[2], q->nb[3], q->nb[1] * (n_tokens - n_last));

    ring = ggml_view_4d(ctx, ring, ring->ne[0], n_queries, ring->ne[2], n_stream, ring->nb[1], ring->nb[2], ring->nb[3],
            ring->nb[3] * llama_h2o::first_stream(graph.mctx));

    ggml_build_forward_expand(graph.gf, ggml_set_rows(ctx, ring, last, slots));
}

void llama_h2o_build_queries(const llm_graph_context & graph, ggml_tensor * q, int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);

    const auto & layer  = *h2o->find_layer(il);
    const bool is_first = h2o->parts.is_first(il);

    if (layer.tensors.queries) {
        build_ring(graph, q, layer.tensors.queries, h2o->query_slots, is_first);
    }
}
