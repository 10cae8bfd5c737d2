#include "policies/h2o-policy-list.h"

#include <algorithm>

namespace {

// SnapKV while decoding: the attention that the last queries pay, as a mean over neighbours in the text.
struct snap : llama_h2o_policy {
    snap(uint32_t n_queries, uint32_t n_pool) : n_pool(n_pool) {
        this->n_queries = n_queries;
        probe           = llama_h2o_probe_type::attention;
    }

    void score(const llama_h2o_head_rows & rows, double * score) const override {
        const std::vector<uint32_t> order = llama_h2o_in_text_order(rows);

        const size_t n_side = n_pool / 2;
        for (size_t i = 0; i < order.size(); ++i) {
            const size_t first = i - std::min(i, n_side);
            const size_t last  = std::min(i + n_side + 1, order.size());

            double sum = 0.0;
            for (size_t j = first; j < last; ++j) {
                sum += rows.probe[order[j]];
            }
            score[order[i]] = sum / double(last - first);
        }
    }

    const uint32_t n_pool;
};

} // namespace

std::unique_ptr<llama_h2o_policy> llama_h2o_new_snap(llama_h2o_policy_text & text, uint32_t n_recent) {
    const uint32_t n_queries = std::min(text.count("queries", 1), n_recent);
    const uint32_t n_pool    = text.count("pool", 1);
    text.require(n_pool % 2 == 1, "pool");

    return std::make_unique<snap>(n_queries, n_pool);
}
