// Selects the best of many rows while they are scored.

#pragma once

#include "kernels/h2o-kernel-rows.h"
#include "kernels/h2o-search.h"

#include <algorithm>
#include <utility>

namespace {

constexpr uint32_t ALL_LANES = (1u << (W - 1) << 1) - 1;

// Maps floats to integers with the same order.
inline int32_t as_ordered(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));

    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

inline float from_ordered(int32_t bits) {
    bits = bits < 0 ? bits ^ 0x7fffffff : bits;

    float x;
    std::memcpy(&x, &bits, sizeof(x));

    return x;
}

// Candidate rows, by index over all pages, ascending, and their scores.
struct candidates {
    float * scores; // [room(n_find)]
    uint32_t * rows;
    uint32_t n_find;
    uint32_t n_asking;

    uint32_t n  = 0;
    float least = MINUS_INF; // scores of further candidates must be above this

    // padded to vectors of any width
    static constexpr size_t padded(size_t n) { return (n + 15) / 16 * 16; }
    static constexpr size_t room(size_t n_find) { return padded(2 * n_find + 2 * LLAMA_H2O_PAGE + 16); }

    uint32_t count_above(float limit) const {
        uint32_t res = 0;
        uint32_t i   = 0;
        for (; i + W <= n; i += W) {
            res += uint32_t(__builtin_popcount(v_above(v_load(scores + i), limit)));
        }
        for (; i < n; ++i) {
            res += scores[i] > limit;
        }

        return res;
    }

    // Keeps the n_find best, the first ones of equal scores. Bisects for the worst score: no branch depends on a score.
    void keep_best() {
        if (n <= n_find) {
            return;
        }

        int64_t low     = as_ordered(least);    // more than n_find scores are above
        int64_t high    = as_ordered(INFINITY); // at most n_find scores are above
        uint32_t n_high = 0;                    // number of scores above high
        while (high - low > 1 && n_high < n_find) {
            const int64_t mid      = low + (high - low) / 2;
            const uint32_t n_above = count_above(from_ordered(int32_t(mid)));
            if (n_above > n_find) {
                low = mid;
            } else {
                high   = mid;
                n_high = n_above;
            }
        }

        least            = from_ordered(int32_t(high));
        uint32_t n_equal = n_find - n_high; // rows with the worst score to keep
        uint32_t n_all   = std::exchange(n, 0);
        for (uint32_t i = 0; i < n_all; i += W) {
            const vec x          = v_load(scores + i);
            const uint32_t lanes = n_all - i < W ? (1u << (n_all - i)) - 1 : ALL_LANES;

            uint32_t above = v_above(x, least) & lanes;
            uint32_t equal = ~(v_above(x, least) | v_above(v_sub(v_set(0.0f), x), -least)) & lanes;
            for (; equal != 0 && n_equal > 0; equal &= equal - 1, --n_equal) {
                above |= equal & -equal;
            }
            add(x, rows + i, above);
        }
    }

    // makes room for the rows of a page
    void make_room() {
        if (n + LLAMA_H2O_PAGE + W > room(n_find)) {
            keep_best();
        }
    }

    // adds the elements of a vector whose bit is set
    void add(vec x, const uint32_t * of, uint32_t bits) {
        v_store_some(scores + n, x, bits);
        v_store_some(reinterpret_cast<float *>(rows + n), v_load(reinterpret_cast<const float *>(of)), bits);
        n += uint32_t(__builtin_popcount(bits));
    }
};

} // namespace
