#include "policies/h2o-policy-list.h"

namespace {

// The attention collected per query that could see the row, so that age alone is worth nothing.
struct h2o_mean : llama_h2o_policy {
    h2o_mean() { attention = true; }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i] / rows.n_seen(i);
        }
    }
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_mean(llama_h2o_policy_text &, uint32_t) {
    return std::make_unique<h2o_mean>();
}
