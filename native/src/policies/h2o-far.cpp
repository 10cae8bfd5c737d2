#include "policies/h2o-policy-list.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

// The attention collected from afar, per query that could pay it, where queries of long ago count for less.
struct h2o_far : llama_h2o_policy {
    h2o_far(uint32_t n_near, double half_life) : rate(std::log(2.0) / half_life), norm(std::expm1(-rate)) {
        attention       = true;
        this->n_near    = n_near;
        this->half_life = half_life;

        for (size_t n = 0; n < N_KNOWN; ++n) {
            known[n] = weigh(double(n));
        }
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            // half of all rows are recent, and the division takes a third of a compaction
            const bool competes = rows.standing[i] == llama_h2o_standing::competing;

            score[i] = competes ? rows.attention[i] / n_weighted(rows.n_seen(i) - n_near) : 0.0;
        }
    }

    // so many queries, each by its weight; at least one, for rows that nobody has seen from afar
    double n_weighted(double n) const {
        n = std::max(n, 1.0);

        return n < N_KNOWN ? known[size_t(n)] : weigh(n);
    }

    double weigh(double n) const { return std::expm1(-n * rate) / norm; }

    const double rate; // of the fading, per token
    const double norm; // so that the latest query counts as one

    // most rows are no older, and there are a thousand heads to be asked for
    static constexpr size_t N_KNOWN = 16384;
    std::vector<double> known       = std::vector<double>(N_KNOWN);
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_far(llama_h2o_policy_text & text, uint32_t n_recent) {
    const uint32_t n_near  = std::min(text.count("near", 1), n_recent);
    const double half_life = text.number("half_life", 0.0);
    text.require(half_life > 0.0, "half_life");

    return std::make_unique<h2o_far>(n_near, half_life);
}
