#include "policies/h2o-policy.h"

namespace {

// The floor: each row keeps the number it has drawn.
struct random : llama_h2o_policy {
    explicit random(uint64_t seed) : seed(seed) {}

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = llama_h2o_draw(seed, rows.il, rows.head, rows.pos[i]);
        }
    }

    const uint64_t seed;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_random(uint64_t seed) {
    return std::make_unique<random>(seed);
}
