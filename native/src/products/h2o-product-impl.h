// The kernel, written once for both vector sizes. Included by one source file per instruction set. Nothing here has external
// linkage, because the same names have different code in other files.

#pragma once

#include "kernels/h2o-processor.h"
#include "kernels/h2o-simd.h"
#include "products/h2o-product.h"

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace {

constexpr uint32_t W = vec::n;

#if defined(__AVX512VNNI__)

constexpr uint32_t N_TOKENS = 8; // per pass, limited by the registers

using ints = __m512i;

inline ints i_load(const uint8_t * p) {
    return _mm512_loadu_si512(p);
}
inline void i_store(uint8_t * p, ints a) {
    _mm512_storeu_si512(p, a);
}
inline ints i_low(ints a) {
    return _mm512_and_si512(a, _mm512_set1_epi8(15));
}
inline ints i_high(ints a) {
    return i_low(_mm512_srli_epi16(a, 4));
}
inline ints i_low_32(ints a, ints b) {
    return _mm512_unpacklo_epi32(a, b);
}
inline ints i_high_32(ints a, ints b) {
    return _mm512_unpackhi_epi32(a, b);
}
inline ints i_low_64(ints a, ints b) {
    return _mm512_unpacklo_epi64(a, b);
}
inline ints i_high_64(ints a, ints b) {
    return _mm512_unpackhi_epi64(a, b);
}

// 16 bytes of every fourth row
inline ints i_rows(const char * p, size_t nb_row) {
    const auto at = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + i * nb_row));
    };

    ints res = _mm512_castsi128_si512(at(0));
    res      = _mm512_inserti32x4(res, at(4), 1);
    res      = _mm512_inserti32x4(res, at(8), 2);
    return _mm512_inserti32x4(res, at(12), 3);
}

// floats from the F16 numbers in the low and high halves
inline vec f_of_low(ints a) {
    return { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)) };
}
inline vec f_of_high(ints a) {
    return f_of_low(_mm512_srli_epi32(a, 16));
}

// sums of bytes of 0 to 15 times signed bytes
using sums = __m512i;

inline sums s_zero() {
    return _mm512_setzero_si512();
}
inline sums s_add(sums s, ints weights, int32_t inputs) {
    return _mm512_dpbusd_epi32(s, weights, _mm512_set1_epi32(inputs));
}
inline vec s_floats(sums s) {
    return { _mm512_cvtepi32_ps(s) };
}

#else

constexpr uint32_t N_TOKENS = 4;

using ints = __m256i;

inline ints i_load(const uint8_t * p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p));
}
inline void i_store(uint8_t * p, ints a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), a);
}
inline ints i_low(ints a) {
    return _mm256_and_si256(a, _mm256_set1_epi8(15));
}
inline ints i_high(ints a) {
    return i_low(_mm256_srli_epi16(a, 4));
}
inline ints i_low_32(ints a, ints b) {
    return _mm256_unpacklo_epi32(a, b);
}
inline ints i_high_32(ints a, ints b) {
    return _mm256_unpackhi_epi32(a, b);
}
inline ints i_low_64(ints a, ints b) {
    return _mm256_unpacklo_epi64(a, b);
}
inline ints i_high_64(ints a, ints b) {
    return _mm256_unpackhi_epi64(a, b);
}

inline ints i_rows(const char * p, size_t nb_row) {
    const auto at = [&](int i) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + i * nb_row));
    };

    return _mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(4), 1);
}

inline vec f_of_low(ints a) {
    const __m256i x = _mm256_and_si256(a, _mm256_set1_epi32(0xFFFF));
    const __m256i y = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    return { _mm256_cvtph_ps(_mm256_castsi256_si128(y)) };
}
inline vec f_of_high(ints a) {
    return f_of_low(_mm256_srli_epi32(a, 16));
}

// 16 bits are enough for a block: at most 15 * 127 * 16
using sums = __m256i;

inline sums s_zero() {
    return _mm256_setzero_si256();
}
inline sums s_add(sums s, ints weights, int32_t inputs) {
    return _mm256_add_epi16(s, _mm256_maddubs_epi16(weights, _mm256_set1_epi32(inputs)));
}
inline vec s_floats(sums s) {
    return { _mm256_cvtepi32_ps(_mm256_madd_epi16(s, _mm256_set1_epi16(1))) };
}

#endif

constexpr uint32_t N_QUADS = LLAMA_H2O_BLOCK_SIZE / 4; // groups of four elements

// The blocks of a panel's rows at one index: four elements of each row, adjacent, and their scales.
struct block {
    ints qs[N_QUADS];
    vec d;
    vec m;
};

// The first four 32-bit words of each row, a vector for each word.
inline void transpose(const char * p, size_t nb_row, ints * words) {
    const ints a = i_rows(p, nb_row);
    const ints b = i_rows(p + nb_row, nb_row);
    const ints c = i_rows(p + 2 * nb_row, nb_row);
    const ints d = i_rows(p + 3 * nb_row, nb_row);

    const ints ab_low  = i_low_32(a, b);
    const ints ab_high = i_high_32(a, b);
    const ints cd_low  = i_low_32(c, d);
    const ints cd_high = i_high_32(c, d);

    words[0] = i_low_64(ab_low, cd_low);
    words[1] = i_high_64(ab_low, cd_low);
    words[2] = i_low_64(ab_high, cd_high);
    words[3] = i_high_64(ab_high, cd_high);
}

// Unpacks block b of a panel. Its rows are scattered, so the processor cannot predict the accesses: this also prefetches the same
// amount of the next panel.
inline block unpack(const char * rows, size_t nb_row, uint32_t b) {
    static_assert(sizeof(llama_h2o_q4_1) == 20, "five words");
    constexpr size_t SIZE = W * sizeof(llama_h2o_q4_1);

    for (size_t i = 0; i < SIZE; i += 64) {
        __builtin_prefetch(rows + W * nb_row + b * SIZE + i);
    }
    rows += b * sizeof(llama_h2o_q4_1);

    ints scales[4]; // and following bytes, which are not used
    ints qs[4];
    transpose(rows, nb_row, scales);
    transpose(rows + 4, nb_row, qs);

    block res;
    for (uint32_t j = 0; j < 4; ++j) {
        res.qs[j]     = i_low(qs[j]);
        res.qs[j + 4] = i_high(qs[j]);
    }
    res.d = f_of_low(scales[0]);
    res.m = f_of_high(scales[0]);

    return res;
}

inline int32_t quad(const int8_t * p) {
    int32_t res;
    std::memcpy(&res, p, sizeof(res));
    return res;
}

// Adds the products of N tokens and n_blocks blocks of a panel to the result, or initialises it.
//   block_at(b)  block first_block + b
template <uint32_t N, typename F>
void multiply_tokens(const llama_h2o_product & p,
        F block_at,
        uint32_t first_row,
        uint32_t first_block,
        uint32_t n_blocks,
        uint32_t first_token) {
    const llama_h2o_q8_1 * inputs[N];
    const float * scales[N];
    float * out[N];
    vec acc[N];
    for (uint32_t t = 0; t < N; ++t) {
        const size_t token = first_token + t;

        inputs[t] = p.inputs + token * p.n_blocks + first_block;
        scales[t] = p.scales + (token * p.n_blocks + first_block) * 2;
        out[t]    = reinterpret_cast<float *>(p.out + token * p.nb_out) + first_row;
        acc[t]    = first_block == 0 ? v_set(0.0f) : v_load(out[t]);
    }

    for (uint32_t b = 0; b < n_blocks; ++b) {
        const block & weights = block_at(b);

        sums s[N];
        for (uint32_t t = 0; t < N; ++t) {
            s[t] = s_zero();
        }
        for (uint32_t j = 0; j < N_QUADS; ++j) {
            for (uint32_t t = 0; t < N; ++t) {
                s[t] = s_add(s[t], weights.qs[j], quad(inputs[t][b].qs + 4 * j));
            }
        }
        for (uint32_t t = 0; t < N; ++t) {
            acc[t] = v_fma(weights.m, v_set(scales[t][2 * b + 1]), acc[t]);
            acc[t] = v_fma(s_floats(s[t]), v_mul(weights.d, v_set(scales[t][2 * b])), acc[t]);
        }
    }

    for (uint32_t t = 0; t < N; ++t) {
        v_store(out[t], acc[t]);
    }
}

// Calls fn(first, n) for all tokens, n of them at a time; n is a constant for the compiler.
template <uint32_t N = N_TOKENS, typename F>
void for_tokens(uint32_t first, uint32_t n_tokens, F fn) {
    for (; first + N <= n_tokens; first += N) {
        fn(first, std::integral_constant<uint32_t, N>());
    }
    if constexpr (N > 1) {
        for_tokens<N - 1>(first, n_tokens, fn);
    }
}

// Multiplies a panel by more tokens than one pass handles: unpacks as many blocks at a time as fit in the processor caches.
void multiply_many(const llama_h2o_product & p, const char * rows, uint32_t first_row) {
    constexpr uint32_t MAX_BLOCKS = 64;

    block blocks[MAX_BLOCKS];
    for (uint32_t first = 0; first < p.n_blocks; first += MAX_BLOCKS) {
        const uint32_t n = p.n_blocks - first < MAX_BLOCKS ? p.n_blocks - first : MAX_BLOCKS;
        for (uint32_t b = 0; b < n; ++b) {
            blocks[b] = unpack(rows, p.nb_row, first + b);
        }

        const auto block_at = [&](uint32_t b) -> const block & {
            return blocks[b];
        };
        for_tokens(0, p.n_tokens, [&](uint32_t token, auto n_at_once) {
            multiply_tokens<n_at_once>(p, block_at, first_row, first, n, token);
        });
    }
}

// Multiplies a panel by few tokens, without storing unpacked blocks.
void multiply_few(const llama_h2o_product & p, const char * rows, uint32_t first_row) {
    const auto block_at = [&](uint32_t b) {
        return unpack(rows, p.nb_row, b);
    };
    for_tokens(0, p.n_tokens,
            [&](uint32_t token, auto n) { multiply_tokens<n>(p, block_at, first_row, 0, p.n_blocks, token); });
}

void multiply(const llama_h2o_product & p, uint32_t panel_begin, uint32_t panel_end) {
    for (uint32_t i = panel_begin; i < panel_end; ++i) {
        const uint32_t first_row = i * W;
        const char * rows        = p.weights + first_row * p.nb_row;
        p.n_tokens > N_TOKENS ? multiply_many(p, rows, first_row) : multiply_few(p, rows, first_row);
    }
}

void read_scales(const llama_h2o_product & p) {
    for (size_t i = 0; i < size_t(p.n_blocks) * p.n_tokens; ++i) {
        p.scales[2 * i]     = _cvtsh_ss(p.inputs[i].d);
        p.scales[2 * i + 1] = _cvtsh_ss(p.inputs[i].s);
    }
}

} // namespace
