#include "policies/h2o-policy-list.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

// Expected Attention: the probability that the queries to come are expected to give to the row, times the length of V.
struct expected : llama_h2o_policy {
    expected(uint32_t n_queries, uint32_t n_horizon, double epsilon, bool covariance) : epsilon(epsilon) {
        this->n_queries  = n_queries;
        this->n_horizon  = n_horizon;
        this->covariance = covariance;
        probe            = llama_h2o_probe_type::expected;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        const float * length = rows.probe + size_t(rows.n_group) * rows.n_rows;

        std::fill_n(score, rows.n_rows, epsilon);
        for (uint32_t g = 0; g < rows.n_group; ++g) {
            add_probabilities(rows, rows.probe + size_t(g) * rows.n_rows, score);
        }
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] *= length[i];
        }
    }

    // pinned rows stay anyway, and would take most of it
    static void add_probabilities(const llama_h2o_head_rows & rows, const float * logits, double * score) {
        double top = -std::numeric_limits<double>::infinity();
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            top = counts(rows, i) ? std::max(top, double(logits[i])) : top;
        }

        double sum = 0.0;
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            sum += counts(rows, i) ? std::exp(logits[i] - top) : 0.0;
        }
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] += counts(rows, i) ? std::exp(logits[i] - top) / sum / rows.n_group : 0.0;
        }
    }

    static bool counts(const llama_h2o_head_rows & rows, uint32_t i) {
        return rows.standing[i] != llama_h2o_standing::pinned;
    }

    const double epsilon;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_expected(llama_h2o_policy_text & text, uint32_t n_recent) {
    const uint32_t n_queries = std::min(text.count("queries", 1), n_recent);
    const uint32_t n_horizon = text.count("horizon", 1);
    const double epsilon     = text.share("epsilon");
    const bool covariance    = text.flag("covariance");

    return std::make_unique<expected>(n_queries, n_horizon, epsilon, covariance);
}
