#include "policies/h2o-policy-list.h"

namespace {

// KeyDiff: keys that point elsewhere than most.
struct keydiff : llama_h2o_policy {
    keydiff() { probe = llama_h2o_probe_type::keys; }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = -rows.probe[i];
        }
    }
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_keydiff(llama_h2o_policy_text &, uint32_t) {
    return std::make_unique<keydiff>();
}
