#include "policies/h2o-policy-list.h"

namespace {

// StreamingLLM: sinks and a window.
struct streaming : llama_h2o_policy {
    explicit streaming(uint32_t n_sinks) : n_sinks(n_sinks) {}

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = uint32_t(rows.pos[i]) < n_sinks ? LLAMA_H2O_SAFE_SCORE : double(rows.pos[i]);
        }
    }

    const uint32_t n_sinks;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_streaming(llama_h2o_policy_text & text, uint32_t) {
    return std::make_unique<streaming>(text.count("sinks", 0));
}
