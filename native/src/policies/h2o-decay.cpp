#include "h2o-policy.h"

#include <cmath>

namespace {

// The attention collected, of which half is forgotten every half_life tokens.
struct h2o_decay : llama_h2o_policy {
    explicit h2o_decay(double half_life) : half_life(half_life) { attention = true; }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i];
        }
    }

    double remaining(int64_t n_tokens) const override { return std::exp2(-double(n_tokens) / half_life); }

    const double half_life; // tokens
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_decay(double half_life) {
    return std::make_unique<h2o_decay>(half_life);
}
