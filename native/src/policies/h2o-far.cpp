#include "h2o-policy.h"

#include <algorithm>
#include <cmath>

namespace {

// The attention collected from afar, per query that could pay it, where queries of long ago count for less.
struct h2o_far : llama_h2o_policy {
    h2o_far(uint32_t n_near, double half_life) : rate(std::log(2.0) / half_life), norm(std::expm1(-rate)) {
        attention       = true;
        this->n_near    = n_near;
        this->half_life = half_life;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = rows.attention[i] / n_weighted(rows.n_seen(i) - n_near);
        }
    }

    // so many queries, each by its weight; at least one, for rows that nobody has seen from afar
    double n_weighted(double n) const { return std::expm1(-std::max(n, 1.0) * rate) / norm; }

    const double rate; // of the fading, per token
    const double norm; // so that the latest query counts as one
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_far(uint32_t n_near, double half_life) {
    return std::make_unique<h2o_far>(n_near, half_life);
}
