#include "policies/h2o-policy-list.h"

namespace {

// The floor: each row keeps the number it has drawn.
struct random_rows : llama_h2o_policy {
    explicit random_rows(uint64_t seed) : seed(seed) {}

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = llama_h2o_draw(seed, rows.il, rows.head, rows.pos[i]);
        }
    }

    const uint64_t seed;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_random(llama_h2o_policy_text & text, uint32_t) {
    return std::make_unique<random_rows>(text.seed("seed"));
}
