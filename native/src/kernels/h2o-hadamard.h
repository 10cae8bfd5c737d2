// The Hadamard transform of rows, its own inverse, for vectors of any width.

#pragma once

#include "kernels/h2o-simd.h"

namespace {

// A butterfly: replaces the lower of elements i and i ^ LEN by their sum, the higher by their difference.
template <int LEN>
inline vec v_butterfly(vec a) {
    alignas(64) static constexpr auto signs = [] {
        struct {
            float v[vec::n];
        } res = {};
        for (int i = 0; i < vec::n; ++i) {
            res.v[i] = i & LEN ? -1.0f : 1.0f;
        }
        return res;
    }();

    return v_fma(a, v_load(signs.v), v_swap<LEN>(a));
}

// transforms a vector
inline vec v_hadamard(vec a) {
    a = v_butterfly<2>(v_butterfly<1>(a));
    if constexpr (vec::n >= 8) {
        a = v_butterfly<4>(a);
    }
    if constexpr (vec::n >= 16) {
        a = v_butterfly<8>(a);
    }

    return a;
}

// Transforms blocks of NV vectors, in registers.
template <int NV>
inline void hadamard_blocks(float * row, uint32_t n_embd, float scale) {
    for (uint32_t first = 0; first < n_embd; first += NV * vec::n) {
        vec x[NV];
        for (int i = 0; i < NV; ++i) {
            x[i] = v_hadamard(v_mul(v_load(row + first + i * vec::n), v_set(scale)));
        }
        for (int len = 1; len < NV; len *= 2) {
            for (int i = 0; i < NV; ++i) {
                if (!(i & len)) {
                    const vec a = x[i];
                    x[i]        = v_add(a, x[i + len]);
                    x[i + len]  = v_sub(a, x[i + len]);
                }
            }
        }
        for (int i = 0; i < NV; ++i) {
            v_store(row + first + i * vec::n, x[i]);
        }
    }
}

// Transforms a row in blocks of n_mix elements, a power of two that divides n_embd.
inline void hadamard(float * row, uint32_t n_embd, uint32_t n_mix) {
    const float scale = 1.0f / std::sqrt(float(n_mix));

    uint32_t len = 8 * vec::n;
    if (n_mix >= 8 * vec::n) {
        hadamard_blocks<8>(row, n_embd, scale);
    } else if (n_mix == 4 * vec::n) {
        hadamard_blocks<4>(row, n_embd, scale);
    } else if (n_mix == 2 * vec::n) {
        hadamard_blocks<2>(row, n_embd, scale);
    } else if (n_mix == vec::n) {
        hadamard_blocks<1>(row, n_embd, scale);
    } else {
        len = 1;
        for (uint32_t i = 0; i < n_embd; ++i) {
            row[i] *= scale;
        }
    }

    for (; len < n_mix; len *= 2) {
        for (uint32_t first = 0; first < n_embd; first += 2 * len) {
            float * lo = row + first;
            float * hi = lo + len;
            for (uint32_t i = 0; i < len; ++i) {
                const float a = lo[i];
                const float b = hi[i];
                lo[i]         = a + b;
                hi[i]         = a - b;
            }
        }
    }
}

} // namespace
