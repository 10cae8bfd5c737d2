#include "policies/h2o-policy-list.h"

namespace {

// H2O as its authors drop rows for real (h2o_hf/utils_real_drop): the attention a row has collected.
struct h2o_sum : llama_h2o_policy {
    h2o_sum() { attention = true; }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i];
        }
    }
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_sum(llama_h2o_policy_text &, uint32_t) {
    return std::make_unique<h2o_sum>();
}

// One choice for all heads of a layer.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_layer(llama_h2o_policy_text &, uint32_t) {
    auto policy   = std::make_unique<h2o_sum>();
    policy->scope = llama_h2o_scope::layer;

    return policy;
}

// One choice for everything: what freeing whole cells can do.
std::unique_ptr<llama_h2o_policy> llama_h2o_new_cells(llama_h2o_policy_text &, uint32_t) {
    auto policy   = std::make_unique<h2o_sum>();
    policy->scope = llama_h2o_scope::cache;

    return policy;
}
