#include "policies/h2o-policy-list.h"

#include <algorithm>
#include <cmath>

namespace {

// RoCo (EasyKV): the smallest means go, but not those of the rows whose attention varies most.
struct roco : llama_h2o_policy {
    explicit roco(double guard) : guard(guard) {
        attention = true;
        squares   = true;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        std::vector<double> deviation(rows.n_rows);
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i]     = rows.attention[i] / rows.n_seen(i);
            deviation[i] = std::sqrt(std::max(0.0, rows.squares[i] / rows.n_seen(i) - score[i] * score[i]));
        }

        llama_h2o_make_safe(rows, deviation.data(), size_t(guard * double(rows.n_places)), score);
    }

    const double guard; // share of the places
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_roco(llama_h2o_policy_text & text, uint32_t) {
    return std::make_unique<roco>(text.share("guard"));
}
