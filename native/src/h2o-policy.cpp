#include "h2o-policy.h"

#include <algorithm>

uint64_t llama_h2o_n_budget(const llama_h2o_params & params) {
    return uint64_t(params.pinned) + params.heavy + params.recent;
}

uint64_t llama_h2o_n_capacity(const llama_h2o_params & params) {
    return llama_h2o_n_budget(params) + params.slack;
}

void llama_h2o_select_rows(const float * score,
        const int32_t * pos,
        uint32_t n_rows,
        const llama_h2o_params & params,
        uint8_t * keep,
        std::vector<uint32_t> & order) {
    const int64_t newest = n_rows > 0 ? *std::max_element(pos, pos + n_rows) : -1;

    uint64_t n_free = std::min<uint64_t>(n_rows, llama_h2o_n_budget(params));

    order.clear();
    for (uint32_t i = 0; i < n_rows; ++i) {
        const bool must_stay = pos[i] < int64_t(params.pinned) || pos[i] > newest - int64_t(params.recent);

        keep[i] = must_stay ? 1 : 0;
        if (must_stay) {
            --n_free;
        } else {
            order.push_back(i);
        }
    }

    const auto better = [&](uint32_t a, uint32_t b) {
        return score[a] != score[b] ? score[a] > score[b] : pos[a] > pos[b];
    };

    if (n_free < order.size()) {
        std::nth_element(order.begin(), order.begin() + n_free, order.end(), better);
        order.resize(n_free);
    }

    for (const uint32_t i : order) {
        keep[i] = 1;
    }
}
