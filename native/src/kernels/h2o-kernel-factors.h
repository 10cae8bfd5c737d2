// The factors of products in the kernel for many queries: floats, or pairs of bf16 numbers if compiled for processors that
// multiply these, which is twice as fast. Sums, exponentials and scores are always floats.

#pragma once

#include "kernels/h2o-kernel-product.h"

namespace {

#if !defined(H2O_PORTABLE) && defined(__AVX512BF16__)

using factor = bf16_pair;

// numbers per factor
constexpr uint32_t N_FACTOR = 2;

// A query as one of BLOCK columns: [n/2][BLOCK].
inline void store_query(const float * q, float scale, uint32_t n, factor * res) {
    factor pairs[W / 2];
    for (uint32_t i = 0; i < n; i += W) {
        v_store_pairs(pairs, v_mul(v_load(q + i), v_set(scale)));
        for (uint32_t k = 0; k < W / 2; ++k) {
            res[(i / 2 + k) * BLOCK] = pairs[k];
        }
    }
}

// A tile of K: [TILE][n/2].
template <typename T>
void read_keys(const char * rows, size_t nb_row, uint32_t n, factor * res) {
    for (uint32_t j = 0; j < TILE; ++j, rows += nb_row, res += n / 2) {
        for (uint32_t i = 0; i < n; i += W) {
            v_store_pairs(res + i / 2, T::load(rows, i));
        }
    }
}

// A tile of V, two cells per pair: [TILE/2][n].
template <typename T>
void read_values(const char * rows, size_t nb_row, uint32_t n, factor * res) {
    for (uint32_t j = 0; j < TILE; j += 2, rows += 2 * nb_row, res += n) {
        for (uint32_t i = 0; i < n; i += W) {
            v_store(res + i, v_pair(T::load(rows, i), T::load(rows + nb_row, i)));
        }
    }
}

// The weights of a tile's cells, [TILE][BLOCK], as factors [TILE/2][BLOCK] in the space.
inline const factor * as_factors(const float * x, uint32_t n_lanes, factor * space) {
    for (uint32_t j = 0; j < TILE; j += 2) {
        for (uint32_t r = 0; r < n_lanes; r += W) {
            const float * two = x + j * BLOCK + r;
            v_store(space + j / 2 * BLOCK + r, v_pair(v_load(two), v_load(two + BLOCK)));
        }
    }

    return space;
}

#else

using factor = float;

constexpr uint32_t N_FACTOR = 1;

// A query as one of BLOCK columns: [n][BLOCK].
inline void store_query(const float * q, float scale, uint32_t n, factor * res) {
    for (uint32_t i = 0; i < n; ++i) {
        res[i * BLOCK] = q[i] * scale;
    }
}

// A tile of K or V: [TILE][n].
template <typename T>
void read_keys(const char * rows, size_t nb_row, uint32_t n, factor * res) {
    read_rows<T>(rows, nb_row, TILE, n, res);
}

template <typename T>
void read_values(const char * rows, size_t nb_row, uint32_t n, factor * res) {
    read_rows<T>(rows, nb_row, TILE, n, res);
}

// The weights of a tile's cells: [TILE][BLOCK].
inline const factor * as_factors(const float * x, uint32_t, factor *) {
    return x;
}

#endif

} // namespace
