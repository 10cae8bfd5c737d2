#include "policies/h2o-policy-list.h"

#include <algorithm>
#include <cmath>

namespace {

// NACL: most places go by the attention that the last queries pay, the others are drawn, with a mild tilt towards it.
struct nacl : llama_h2o_policy {
    nacl(uint32_t n_queries, double random, uint64_t seed) : random(random), seed(seed) {
        this->n_queries = n_queries;
        probe           = llama_h2o_probe_type::attention;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        std::vector<double> attention(rows.probe, rows.probe + rows.n_rows);

        // the best of log p plus Gumbel noise are a draw without replacement, with probabilities p
        for (uint32_t i = 0; i < rows.n_rows; ++i) {
            score[i] = attention[i] - std::log(-std::log(llama_h2o_draw(seed, rows.il, rows.head, rows.pos[i])));
        }

        const size_t n_random = size_t(random * double(rows.n_places));
        llama_h2o_make_safe(rows, attention.data(), rows.n_places - n_random, score);
    }

    const double random; // share of the places
    const uint64_t seed;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_nacl(llama_h2o_policy_text & text, uint32_t n_recent) {
    const uint32_t n_queries = std::min(text.count("queries", 1), n_recent);
    const double random      = text.share("random");
    const uint64_t seed      = text.seed("seed");

    return std::make_unique<nacl>(n_queries, random, seed);
}
