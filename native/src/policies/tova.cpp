#include "policies/h2o-policy-list.h"

namespace {

// TOVA: the attention that the last query pays, and no memory.
struct tova : llama_h2o_policy {
    tova() {
        n_queries = 1;
        probe     = llama_h2o_probe_type::attention;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.probe[i];
        }
    }
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_tova(llama_h2o_policy_text &, uint32_t) {
    return std::make_unique<tova>();
}
