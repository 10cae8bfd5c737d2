#include "graph/h2o-credit.h"

#include "cache/h2o-cache.h"

#include "llama-context.h"
#include "llama-graph.h"

#include <algorithm>
#include <cmath>

namespace {

class input_credit : public llm_graph_input_i {
public:
    explicit input_credit(const llama_h2o * h2o) : h2o(h2o) {}

    void set_input(const llama_ubatch * ubatch) override {
        const size_t n_kv = credit->ne[0];

        // tokens of one sequence follow each other, as the streams do
        std::vector<float> data(n_kv * ubatch->n_tokens);
        for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
            h2o->fill_credit(ubatch->seq_id[i][0], ubatch->pos[i], data.data() + n_kv * i, n_kv);
        }

        ggml_backend_tensor_set(credit, data.data(), 0, data.size() * sizeof(float));
    }

    bool can_reuse(const llm_graph_params & params) override {
        const auto * mctx = static_cast<const llama_kv_cache_context *>(params.mctx);

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
    if (!h2o->weighs_queries()) {
        return nullptr;
    }

    // layers come in order, so the first one begins a graph
    if (h2o->is_first(*h2o->find_layer(il))) {
        auto input = std::make_unique<input_credit>(h2o);

        input->credit = ggml_new_tensor_4d(graph.ctx0, GGML_TYPE_F32, n_kv, n_tokens, 1, n_stream);
        ggml_set_input(input->credit);

        h2o->credit = input->credit;
        graph.res->add_input(std::move(input));
    }

    return h2o->credit;
}

void llama_h2o::fill_credit(llama_seq_id seq_id, llama_pos p, float * data, size_t n_kv) const {
    const uint32_t s   = kv.seq_to_stream[seq_id];
    const auto & st    = streams[s];
    const auto & cells = kv.v_cells[s];

    std::fill_n(data, n_kv, float(1.0 / policy->remaining(int64_t(p) - st.pos_forgotten)));

    // rows that were not recent any more at the last compaction may lie in any cell
    const int64_t first = std::max<int64_t>(int64_t(p) - policy->n_near + 1, int64_t(st.pos_removable) - 1);
    for (size_t i = 0; i < n_kv; ++i) {
        if (!cells.is_empty(i) && cells.pos_get(i) >= first) {
            data[i] = 0.0f;
        }
    }
}

// The weights of queries grow from one compaction to the next. Long before they leave the range of a float, what was
// collected is made smaller instead: as much as it will be behind these positions, however many they are, so that no
// weight of theirs is above one.
void llama_h2o::keep_credit_small(uint32_t s, llama_pos p_last) {
    constexpr double MOST_HALF_LIVES = 40;

    const int64_t n_tokens = int64_t(p_last) - streams[s].pos_forgotten;
    if (!policy->weighs() || double(n_tokens) <= MOST_HALF_LIVES * policy->half_life) {
        return;
    }

    ctx.synchronize();

    collected rows = rows_of(s);
    forget(s, rows, p_last);
    for (auto & scores : rows.scores) {
        scores.commit();
    }
}
