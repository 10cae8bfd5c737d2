#include "graph/h2o-credit.h"

#include "cache/h2o-cache.h"
#include "cache/h2o-caches.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>

namespace {

// What the attention that a query at p of a stream pays to each cell counts.
void fill(const llama_h2o_parts & parts, uint32_t s, llama_pos p, float * data, size_t n_kv) {
    const auto & policy = *parts.policy;
    const auto & st     = parts.streams[s];
    const auto & cells  = parts.cells[s];

    std::fill_n(data, n_kv, float(1.0 / policy.remaining(int64_t(p) - st.pos_forgotten)));

    // rows that were not recent any more at the last compaction may lie in any cell
    const int64_t first = std::max<int64_t>(int64_t(p) - policy.n_near + 1, int64_t(st.pos_removable) - 1);
    for (size_t i = 0; i < n_kv; ++i) {
        if (!cells.is_empty(i) && cells.pos_get(i) >= first) {
            data[i] = 0.0f;
        }
    }
}

class input_credit : public llm_graph_input_i {
public:
    explicit input_credit(const llama_h2o * h2o) : h2o(h2o) {}

    void set_input(const llama_ubatch * ubatch) override {
        const size_t n_kv = credit->ne[0];

        // tokens of one sequence follow each other, as the streams do
        std::vector<float> data(n_kv * ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            const uint32_t s = h2o->stream_of(ubatch->seq_id[i][0]);
            fill(h2o->parts, s, ubatch->pos[i], data.data() + n_kv * i, n_kv);
        }

        ggml_backend_tensor_set(credit, data.data(), 0, data.size() * sizeof(float));
    }

    bool can_reuse(const llm_graph_params & params) override {
        const auto * mctx = llama_h2o_caches::growing_of(params.mctx);

        return params.ubatch.n_tokens == credit->ne[1] * credit->ne[3] && mctx->get_n_kv() == credit->ne[0];
    }

    ggml_tensor * credit = nullptr; // F32 [n_kv, n_tokens, 1, n_stream]

private:
    const llama_h2o * h2o; // lives as long as the context, and so longer than its graphs
};

} // namespace

ggml_tensor * llama_h2o_build_credit(
        const llm_graph_context & graph, int64_t n_kv, int64_t n_tokens, int64_t n_stream, int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);
    if (!h2o->parts.policy->weighs()) {
        return nullptr;
    }

    // layers come in order, so the first one begins a graph
    if (h2o->parts.is_first(il)) {
        auto input = std::make_unique<input_credit>(h2o);

        input->credit = ggml_new_tensor_4d(graph.ctx0, GGML_TYPE_F32, n_kv, n_tokens, 1, n_stream);
        ggml_set_input(input->credit);

        h2o->credit = input->credit;
        graph.res->add_input(std::move(input));
    }

    return h2o->credit;
}
