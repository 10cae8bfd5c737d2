#include "policies/h2o-policy.h"

#include <algorithm>
#include <cmath>

double llama_h2o_policy::remaining(int64_t n_tokens) const {
    return half_life > 0.0 ? std::exp2(-double(n_tokens) / half_life) : 1.0;
}

//
// for policies
//

// Sebastiano Vigna's splitmix64, as a hash
static uint64_t mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15;
    z  = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z  = (z ^ (z >> 27)) * 0x94d049bb133111eb;

    return z ^ (z >> 31);
}

double llama_h2o_draw(uint64_t seed, uint32_t il, uint32_t head, int32_t pos) {
    const uint64_t x = mix(mix(mix(seed + il) + head) + uint64_t(pos));

    return (double(x >> 11) + 0.5) * 0x1p-53;
}

std::vector<uint32_t> llama_h2o_in_text_order(const llama_h2o_head_rows & rows) {
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < rows.n_rows; ++i) {
        if (rows.standing[i] == llama_h2o_standing::competing) {
            order.push_back(i);
        }
    }
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return rows.pos[a] < rows.pos[b]; });

    return order;
}

void llama_h2o_make_safe(const llama_h2o_head_rows & rows, const double * rank, size_t n, double * score) {
    std::vector<uint32_t> order = llama_h2o_in_text_order(rows);

    n = std::min(n, order.size());
    std::nth_element(order.begin(), order.begin() + n, order.end(),
            [&](uint32_t a, uint32_t b) { return rank[a] != rank[b] ? rank[a] > rank[b] : rows.pos[a] > rows.pos[b]; });
    for (size_t i = 0; i < n; ++i) {
        score[order[i]] = LLAMA_H2O_SAFE_SCORE;
    }
}
