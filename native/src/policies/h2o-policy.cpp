#include "policies/h2o-policy.h"

#include <algorithm>
#include <cmath>
#include <limits>

double llama_h2o_policy::remaining(int64_t n_tokens) const {
    return half_life > 0.0 ? std::exp2(-double(n_tokens) / half_life) : 1.0;
}

static bool is_share(double x) {
    return x >= 0.0 && x <= 1.0;
}

int32_t llama_h2o_check_policy(const llama_h2o_policy_params & params) {
    bool fits = true;

    switch (params.type) {
        case LLAMA_H2O_POLICY_H2O:
        case LLAMA_H2O_POLICY_H2O_MEAN:
        case LLAMA_H2O_POLICY_H2O_LAYER:
        case LLAMA_H2O_POLICY_H2O_CELLS:
        case LLAMA_H2O_POLICY_TOVA:
        case LLAMA_H2O_POLICY_KEYDIFF:
        case LLAMA_H2O_POLICY_STREAMING:
        case LLAMA_H2O_POLICY_RANDOM:
            break;
        case LLAMA_H2O_POLICY_H2O_DECAY:
            fits = std::isfinite(params.half_life) && params.half_life > 0.0;
            break;
        case LLAMA_H2O_POLICY_H2O_FAR:
            fits = params.n_near > 0 && std::isfinite(params.half_life) && params.half_life > 0.0;
            break;
        case LLAMA_H2O_POLICY_ROCO:
            fits = is_share(params.guard);
            break;
        case LLAMA_H2O_POLICY_SNAP:
            fits = params.n_queries > 0 && params.n_pool % 2 == 1;
            break;
        case LLAMA_H2O_POLICY_NACL:
            fits = params.n_queries > 0 && is_share(params.random);
            break;
        case LLAMA_H2O_POLICY_EXPECTED:
            fits = params.n_queries > 0 && params.n_horizon > 0 && std::isfinite(params.epsilon) &&
                   params.epsilon >= 0.0 && params.covariance <= 1;
            break;
        default:
            fits = false;
            break;
    }

    return fits ? LLAMA_H2O_OK : LLAMA_H2O_ERR_POLICY;
}

llama_h2o_policy_params llama_h2o_own_params(const llama_h2o_policy_params & params) {
    llama_h2o_policy_params res = {};
    res.type                    = params.type;

    switch (params.type) {
        case LLAMA_H2O_POLICY_H2O_DECAY:
            res.half_life = params.half_life;
            break;
        case LLAMA_H2O_POLICY_H2O_FAR:
            res.half_life = params.half_life;
            res.n_near    = params.n_near;
            break;
        case LLAMA_H2O_POLICY_ROCO:
            res.guard = params.guard;
            break;
        case LLAMA_H2O_POLICY_SNAP:
            res.n_queries = params.n_queries;
            res.n_pool    = params.n_pool;
            break;
        case LLAMA_H2O_POLICY_NACL:
            res.n_queries = params.n_queries;
            res.random    = params.random;
            res.seed      = params.seed;
            break;
        case LLAMA_H2O_POLICY_EXPECTED:
            res.n_queries  = params.n_queries;
            res.n_horizon  = params.n_horizon;
            res.epsilon    = params.epsilon;
            res.covariance = params.covariance;
            break;
        case LLAMA_H2O_POLICY_STREAMING:
            res.n_sinks = params.n_sinks;
            break;
        case LLAMA_H2O_POLICY_RANDOM:
            res.seed = params.seed;
            break;
        default:
            break;
    }

    return res;
}

std::unique_ptr<llama_h2o_policy> llama_h2o_new_policy(const llama_h2o_params & params) {
    const llama_h2o_policy_params & policy = params.policy;

    // a query can only be asked about rows before it, and all heads have the same rows only of recent positions
    const uint32_t n_queries = std::min(policy.n_queries, params.recent);

    switch (policy.type) {
        case LLAMA_H2O_POLICY_H2O:
            return llama_h2o_new_sum();
        case LLAMA_H2O_POLICY_H2O_MEAN:
            return llama_h2o_new_mean();
        case LLAMA_H2O_POLICY_H2O_DECAY:
            return llama_h2o_new_decay(policy.half_life);
        case LLAMA_H2O_POLICY_H2O_FAR:
            return llama_h2o_new_far(std::min(policy.n_near, params.recent), policy.half_life);
        case LLAMA_H2O_POLICY_H2O_LAYER:
            return llama_h2o_new_layer();
        case LLAMA_H2O_POLICY_H2O_CELLS:
            return llama_h2o_new_cells();
        case LLAMA_H2O_POLICY_ROCO:
            return llama_h2o_new_roco(policy.guard);
        case LLAMA_H2O_POLICY_TOVA:
            return llama_h2o_new_tova();
        case LLAMA_H2O_POLICY_SNAP:
            return llama_h2o_new_snap(n_queries, policy.n_pool);
        case LLAMA_H2O_POLICY_NACL:
            return llama_h2o_new_nacl(n_queries, policy.random, policy.seed);
        case LLAMA_H2O_POLICY_KEYDIFF:
            return llama_h2o_new_keydiff();
        case LLAMA_H2O_POLICY_EXPECTED:
            return llama_h2o_new_expected(n_queries, policy.epsilon);
        case LLAMA_H2O_POLICY_STREAMING:
            return llama_h2o_new_streaming(policy.n_sinks);
        case LLAMA_H2O_POLICY_RANDOM:
            return llama_h2o_new_random(policy.seed);
    }

    return nullptr;
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
        score[order[i]] = std::numeric_limits<double>::infinity();
    }
}
