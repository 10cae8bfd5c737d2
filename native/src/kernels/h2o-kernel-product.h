// Products of rows with a block of columns, such as keys with queries, one query per lane. Factors are floats, or pairs of bf16
// numbers whose products are added.

#pragma once

#include "kernels/h2o-kernel-rows.h"

namespace {

// vectors of columns per step of four rows, limited by the registers
constexpr int COLUMN_VECTORS = W == 8 ? 3 : 4;

// c[k][r] (+)= sum over i of a[k*step_k + i*step_i] * b[i][r], for NK rows and NR vectors of r; b and c have
// BLOCK columns.
template <int NK, int NR, bool ADD, typename T>
inline void outer(const T * a, size_t step_k, size_t step_i, const T * b, uint32_t n, float * c) {
    vec acc[NK][NR];
    for (int k = 0; k < NK; ++k) {
        for (int r = 0; r < NR; ++r) {
            acc[k][r] = ADD ? v_load(c + k * BLOCK + r * W) : v_set(0.0f);
        }
    }

    for (uint32_t i = 0; i < n; ++i) {
        decltype(v_load(b)) x[NR];
        for (int r = 0; r < NR; ++r) {
            x[r] = v_load(b + i * BLOCK + r * W);
        }
        for (int k = 0; k < NK; ++k) {
            const auto y = v_set(a[k * step_k + i * step_i]);
            for (int r = 0; r < NR; ++r) {
                acc[k][r] = v_fma(y, x[r], acc[k][r]);
            }
        }
    }

    for (int k = 0; k < NK; ++k) {
        for (int r = 0; r < NR; ++r) {
            v_store(c + k * BLOCK + r * W, acc[k][r]);
        }
    }
}

// The same for n_k rows, a multiple of four, and n_r columns, a multiple of W: NR vectors of columns at a time, fewer at the end.
template <bool ADD, int NR = COLUMN_VECTORS, typename T>
void product(
        const T * a, size_t step_k, size_t step_i, const T * b, uint32_t n, float * c, uint32_t n_k, uint32_t n_r) {
    uint32_t r = 0;
    for (; r + NR * W <= n_r; r += NR * W) {
        for (uint32_t k = 0; k < n_k; k += 4) {
            outer<4, NR, ADD, T>(a + k * step_k, step_k, step_i, b + r, n, c + k * BLOCK + r);
        }
    }
    if constexpr (NR > 1) {
        if (r < n_r) {
            product<ADD, NR - 1, T>(a, step_k, step_i, b + r, n, c + r, n_k, n_r - r);
        }
    }
}

// Rows as floats, [n_rows][n].
template <typename T>
void read_rows(const char * rows, size_t nb_row, uint32_t n_rows, uint32_t n, float * res) {
    // block size of the quantised types
    constexpr uint32_t STEP = 32;

    for (uint32_t j = 0; j < n_rows; ++j, rows += nb_row, res += n) {
        uint32_t i = 0;
        for (; i + STEP <= n; i += STEP) {
            for (uint32_t k = 0; k < STEP; k += W) {
                v_store(res + i + k, T::load(rows, i + k));
            }
        }
        for (; i < n; i += W) {
            v_store(res + i, T::load(rows, i));
        }
    }
}

} // namespace
