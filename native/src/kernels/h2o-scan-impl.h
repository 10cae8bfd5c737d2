// The scan, written once for vectors of any width: see h2o-scan.h. A block of keys becomes floats, and is multiplied with
// queries that lie side by side, one in each lane, so that nothing is summed across lanes.

#pragma once

#include "kernels/h2o-kernel-product.h"
#include "kernels/h2o-scan.h"

#include <cfloat>

namespace {

constexpr uint32_t SCAN_BLOCK = LLAMA_H2O_SCAN_BLOCK;

struct scan_work {
    float * turned; // [query blocks][n_embd][BLOCK] queries
    float * mixed;  // likewise
    float * keys;   // [SCAN_BLOCK][n_embd]
    float * logits; // [SCAN_BLOCK][BLOCK]

    explicit scan_work(const llama_h2o_scan & s) {
        turned = s.work;
        mixed  = turned + llama_h2o_arranged_size(s.n_rows, s.n_embd);
        keys   = mixed + llama_h2o_arranged_size(s.n_rows, s.n_embd);
        logits = keys + SCAN_BLOCK * s.n_embd;
    }
};

// A block of queries, side by side.
struct scan_queries {
    const float * data; // [n_embd][BLOCK]
    uint32_t first;     // row
    uint32_t n;         // rows, at most BLOCK

    uint32_t n_lanes() const { return (n + W - 1) / W * W; }
};

inline scan_queries scan_block(const llama_h2o_scan & s, const float * queries, uint32_t first) {
    return { queries + size_t(first) * s.n_embd, first, min_u32(BLOCK, s.n_rows - first) };
}

// The queries turned back by what the keys would be turned on, which gives the same logits.
void scan_turn(const llama_h2o_scan & s, float * res) {
    const uint32_t n_pairs = s.n_turn_dims / 2;

    for (uint32_t first = 0; first < s.n_rows; first += BLOCK) {
        const scan_queries q = scan_block(s, s.queries, first);
        float * turned       = res + size_t(first) * s.n_embd;

        for (uint32_t pair = 0; pair < n_pairs; ++pair) {
            const size_t re = BLOCK * (s.first_turn + (s.turn_neox ? pair : 2 * pair));
            const size_t im = re + BLOCK * (s.turn_neox ? n_pairs : 1);
            const vec cos   = v_set(s.turn[2 * pair]);
            const vec sin   = v_set(s.turn[2 * pair + 1]);

            for (uint32_t r = 0; r < q.n_lanes(); r += W) {
                const vec x = v_load(q.data + re + r);
                const vec y = v_load(q.data + im + r);
                v_store(turned + re + r, v_fma(y, sin, v_mul(x, cos)));
                v_store(turned + im + r, v_sub(v_mul(y, cos), v_mul(x, sin)));
            }
        }
        for (size_t i = 0; i < s.first_turn * BLOCK; i += W) {
            v_store(turned + i, v_load(q.data + i));
        }
        for (size_t i = (s.first_turn + s.n_turn_dims) * BLOCK; i < s.n_embd * BLOCK; i += W) {
            v_store(turned + i, v_load(q.data + i));
        }
    }
}

void scan_mix(const llama_h2o_scan & s, const float * queries, float * res) {
    for (uint32_t first = 0; first < s.n_rows; first += BLOCK) {
        const scan_queries q = scan_block(s, queries, first);
        float * mixed        = res + size_t(first) * s.n_embd;

        for (uint32_t i = 0; i < s.n_embd; i += s.n_mix) {
            const float * block = q.data + i * BLOCK;
            product<false>(s.mix, s.n_mix, 1, block, s.n_mix, mixed + i * BLOCK, s.n_mix, q.n_lanes());
        }
    }
}

// cap * tanh(logits / cap)
void scan_cap(float * logits, uint32_t n_lanes, float cap) {
    for (uint32_t j = 0; j < SCAN_BLOCK; ++j) {
        for (uint32_t r = 0; r < n_lanes; r += W) {
            float * x = logits + j * BLOCK + r;
            v_store(x, v_mul(v_tanh(v_mul(v_load(x), v_set(1.0f / cap))), v_set(cap)));
        }
    }
}

// The keys from one on as floats; where a block has fewer, its first one fills it.
void scan_keys(const llama_h2o_scan & s, uint32_t key, float * res) {
    const uint32_t n  = min_u32(SCAN_BLOCK, s.n_keys - key);
    const char * rows = s.keys + key * s.nb_row;
    row_types::with(s.type, [&](auto type) { read_rows<decltype(type)>(rows, s.nb_row, n, s.n_embd, res); });

    for (uint32_t j = n; j < SCAN_BLOCK; ++j) {
        std::memcpy(res + j * s.n_embd, res, s.n_embd * sizeof(float));
    }
}

// Makes the logits minus infinity where a key does not count.
void scan_mask(const llama_h2o_scan & s, uint32_t key, const scan_queries & q, float * logits) {
    for (uint32_t j = 0; j < SCAN_BLOCK; ++j) {
        uint32_t first_row = 0;
        if (key + j >= s.n_keys) {
            first_row = s.n_rows;
        } else if (s.first_row) {
            first_row = s.first_row[key + j];
        }

        for (uint32_t r = q.first; r < min_u32(first_row, q.first + q.n); ++r) {
            logits[j * BLOCK + r - q.first] = MINUS_INF;
        }
    }
}

// The largest logit of every query and the sum of exponentials below it.
void scan_sums(const float * logits, uint32_t n_lanes, float * max, float * sum) {
    for (uint32_t r = 0; r < n_lanes; r += W) {
        vec top = v_set(MINUS_INF);
        for (uint32_t j = 0; j < SCAN_BLOCK; ++j) {
            top = v_max(top, v_load(logits + j * BLOCK + r));
        }
        v_store(max + r, top);

        // where no key counts, it is minus infinity, and so are all logits
        top = v_max(top, v_set(-FLT_MAX));

        vec total = v_set(0.0f);
        for (uint32_t j = 0; j < SCAN_BLOCK; ++j) {
            total = v_add(total, v_exp(v_sub(v_load(logits + j * BLOCK + r), top)));
        }
        v_store(sum + r, total);
    }
}

// Whether any key of a block counts.
bool scan_counts(const llama_h2o_scan & s, uint32_t key) {
    for (uint32_t k = key; s.first_row && k < min_u32(key + SCAN_BLOCK, s.n_keys); ++k) {
        if (s.first_row[k] < s.n_rows) {
            return true;
        }
    }

    return !s.first_row;
}

void scan(const llama_h2o_scan & s) {
    const scan_work w(s);

    const float * queries = s.queries;
    if (s.turn) {
        scan_turn(s, w.turned);
        queries = w.turned;
    }
    if (s.mix) {
        scan_mix(s, queries, w.mixed);
        queries = w.mixed;
    }

    for (uint32_t key = 0; key < s.n_keys; key += SCAN_BLOCK) {
        float * block_max = s.max + size_t(key / SCAN_BLOCK) * s.n_rows;
        float * block_sum = s.sum + size_t(key / SCAN_BLOCK) * s.n_rows;

        if (!scan_counts(s, key)) {
            for (uint32_t r = 0; r < s.n_rows; ++r) {
                block_max[r] = MINUS_INF;
                block_sum[r] = 0.0f;
            }
            continue;
        }

        scan_keys(s, key, w.keys);
        for (uint32_t first = 0; first < s.n_rows; first += BLOCK) {
            const scan_queries q = scan_block(s, queries, first);
            product<false>(w.keys, s.n_embd, 1, q.data, s.n_embd, w.logits, SCAN_BLOCK, q.n_lanes());
            if (s.cap > 0.0f) {
                scan_cap(w.logits, q.n_lanes(), s.cap);
            }
            scan_mask(s, key, q, w.logits);

            float max[BLOCK];
            float sum[BLOCK];
            scan_sums(w.logits, q.n_lanes(), max, sum);
            std::memcpy(block_max + first, max, q.n * sizeof(float));
            std::memcpy(block_sum + first, sum, q.n * sizeof(float));
        }
    }
}

} // namespace
