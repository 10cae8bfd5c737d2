#include "policies/h2o-policy-list.h"

namespace {

// The attention collected, of which half is forgotten every half_life tokens.
struct h2o_decay : llama_h2o_policy {
    explicit h2o_decay(double half_life) {
        attention       = true;
        this->half_life = half_life;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i];
        }
    }
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_decay(llama_h2o_policy_text & text, uint32_t) {
    const double half_life = text.number("half_life", 0.0);
    text.require(half_life > 0.0, "half_life");

    return std::make_unique<h2o_decay>(half_life);
}
