// Codes of keys: encoding, and summing the lookup tables of a query over the codes of sixteen or more keys at a time.

#pragma once

#include "kernels/h2o-hadamard.h"
#include "kernels/h2o-kernel-rows.h"
#include "kernels/h2o-search.h"

#include <cmath>

namespace {

constexpr uint32_t PAGE = LLAMA_H2O_PAGE;
constexpr uint32_t HALF = PAGE / 2;

// Largest table entry: the sum of four must fit in a byte.
constexpr float LEVELS     = 63.0f;
constexpr uint32_t AT_ONCE = 4; // tables that are summed in bytes

// Sums the tables of N queries over the groups, for the keys of a page: [N][PAGE].
#if !defined(H2O_PORTABLE) && defined(__AVX512BW__)

// stores the sums of half a page of keys, in order
inline void store_sums(__m512i even, __m512i odd, uint16_t * sums) {
    const __m512i lo = _mm512_unpacklo_epi16(even, odd);
    const __m512i hi = _mm512_unpackhi_epi16(even, odd);

    // 16-byte lanes are interleaved
    const __m512i first  = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(sums, _mm512_permutex2var_epi64(lo, first, hi));
    _mm512_storeu_si512(sums + 32, _mm512_permutex2var_epi64(lo, second, hi));
}

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i one = _mm512_set1_epi16(255);

    __m512i even[N][2];
    __m512i odd[N][2];
    for (int q = 0; q < N; ++q) {
        even[q][0] = even[q][1] = odd[q][0] = odd[q][1] = _mm512_setzero_si512();
    }
    for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
        __m512i a[N];
        __m512i b[N];
        for (int q = 0; q < N; ++q) {
            a[q] = b[q] = _mm512_setzero_si512();
        }
        for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
            const __m512i x = _mm512_loadu_si512(signs + k * HALF);
            const __m512i y = _mm512_and_si512(x, low);
            const __m512i z = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
            for (int q = 0; q < N; ++q) {
                const __m128i * table = reinterpret_cast<const __m128i *>(tables + (q * n_groups + k) * 16);
                const __m512i t       = _mm512_broadcast_i32x4(_mm_loadu_si128(table));

                a[q] = _mm512_add_epi8(a[q], _mm512_shuffle_epi8(t, y));
                b[q] = _mm512_add_epi8(b[q], _mm512_shuffle_epi8(t, z));
            }
        }
        for (int q = 0; q < N; ++q) {
            even[q][0] = _mm512_add_epi16(even[q][0], _mm512_and_si512(a[q], one));
            odd[q][0]  = _mm512_add_epi16(odd[q][0], _mm512_srli_epi16(a[q], 8));
            even[q][1] = _mm512_add_epi16(even[q][1], _mm512_and_si512(b[q], one));
            odd[q][1]  = _mm512_add_epi16(odd[q][1], _mm512_srli_epi16(b[q], 8));
        }
    }
    for (int q = 0; q < N; ++q) {
        store_sums(even[q][0], odd[q][0], sums + q * PAGE);
        store_sums(even[q][1], odd[q][1], sums + q * PAGE + HALF);
    }
}

#elif !defined(H2O_PORTABLE) && defined(__AVX2__)

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    const __m256i low = _mm256_set1_epi8(15);
    const __m256i one = _mm256_set1_epi16(255);

    // 32 keys of each half at a time
    for (uint32_t first = 0; first < HALF; first += 32) {
        __m256i even[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        __m256i odd[2]  = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
            __m256i a = _mm256_setzero_si256();
            __m256i b = _mm256_setzero_si256();
            for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
                const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(signs + k * HALF + first));
                const __m256i t = _mm256_broadcastsi128_si256(
                        _mm_loadu_si128(reinterpret_cast<const __m128i *>(tables + k * 16)));
                a = _mm256_add_epi8(a, _mm256_shuffle_epi8(t, _mm256_and_si256(x, low)));
                b = _mm256_add_epi8(b, _mm256_shuffle_epi8(t, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
            }
            even[0] = _mm256_add_epi16(even[0], _mm256_and_si256(a, one));
            odd[0]  = _mm256_add_epi16(odd[0], _mm256_srli_epi16(a, 8));
            even[1] = _mm256_add_epi16(even[1], _mm256_and_si256(b, one));
            odd[1]  = _mm256_add_epi16(odd[1], _mm256_srli_epi16(b, 8));
        }
        for (uint32_t k = 0; k < 2; ++k) {
            const __m256i lo = _mm256_unpacklo_epi16(even[k], odd[k]);
            const __m256i hi = _mm256_unpackhi_epi16(even[k], odd[k]);

            auto * res = reinterpret_cast<__m128i *>(sums + k * HALF + first);
            _mm_storeu_si128(res + 0, _mm256_castsi256_si128(lo));
            _mm_storeu_si128(res + 1, _mm256_castsi256_si128(hi));
            _mm_storeu_si128(res + 2, _mm256_extracti128_si256(lo, 1));
            _mm_storeu_si128(res + 3, _mm256_extracti128_si256(hi, 1));
        }
    }
}

#elif !defined(H2O_PORTABLE) && defined(__ARM_NEON) && defined(__aarch64__)

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    // 16 keys of each half at a time
    for (uint32_t first = 0; first < HALF; first += 16) {
        uint16x8_t total[4] = { vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0) };
        for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
            uint8x16_t a = vdupq_n_u8(0);
            uint8x16_t b = vdupq_n_u8(0);
            for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
                const uint8x16_t x = vld1q_u8(reinterpret_cast<const uint8_t *>(signs + k * HALF + first));
                const uint8x16_t t = vld1q_u8(tables + k * 16);
                a                  = vaddq_u8(a, vqtbl1q_u8(t, vandq_u8(x, vdupq_n_u8(15))));
                b                  = vaddq_u8(b, vqtbl1q_u8(t, vshrq_n_u8(x, 4)));
            }
            total[0] = vaddw_u8(total[0], vget_low_u8(a));
            total[1] = vaddw_u8(total[1], vget_high_u8(a));
            total[2] = vaddw_u8(total[2], vget_low_u8(b));
            total[3] = vaddw_u8(total[3], vget_high_u8(b));
        }
        vst1q_u16(sums + first, total[0]);
        vst1q_u16(sums + first + 8, total[1]);
        vst1q_u16(sums + HALF + first, total[2]);
        vst1q_u16(sums + HALF + first + 8, total[3]);
    }
}

#else

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    for (uint32_t j = 0; j < PAGE; ++j) {
        sums[j] = 0;
    }
    for (uint32_t g = 0; g < n_groups; ++g) {
        for (uint32_t j = 0; j < HALF; ++j) {
            const uint8_t x = uint8_t(signs[g * HALF + j]);
            sums[j]         = uint16_t(sums[j] + tables[g * 16 + (x & 15)]);
            sums[HALF + j]  = uint16_t(sums[HALF + j] + tables[g * 16 + (x >> 4)]);
        }
    }
}

#endif

// Encodes the keys i0 <= i < i1 of a page.
void encode_page(const float * keys, uint32_t i0, uint32_t i1, uint32_t n_embd, char * codes, float * space) {
    const llama_h2o_code_layout layout { n_embd };

    std::memset(codes, 0, layout.size());
    if (i0 >= i1) {
        return;
    }

    auto * scales = reinterpret_cast<ggml_fp16_t *>(codes + layout.scales());
    auto * centre = reinterpret_cast<ggml_fp16_t *>(codes + layout.centre());
    auto * signs  = reinterpret_cast<uint8_t *>(codes + layout.signs());

    float * mean = space;
    float * row  = space + n_embd;
    for (uint32_t i = 0; i < n_embd; ++i) {
        double sum = 0.0;
        for (uint32_t j = i0; j < i1; ++j) {
            sum += keys[j * n_embd + i];
        }
        mean[i] = float(sum / (i1 - i0));
    }
    ggml_fp32_to_fp16_row(mean, centre, n_embd);
    ggml_fp16_to_fp32_row(centre, mean, n_embd);

    for (uint32_t j = i0; j < i1; ++j) {
        for (uint32_t i = 0; i < n_embd; ++i) {
            row[i] = keys[j * n_embd + i] - mean[i];
        }
        hadamard(row, n_embd, layout.n_mix());

        vec sum     = v_set(0.0f);
        vec squares = v_set(0.0f);
        for (uint32_t i = 0; i < n_embd; i += W) {
            const vec x = v_load(row + i);
            sum         = v_add(sum, v_max(x, v_sub(v_set(0.0f), x)));
            squares     = v_fma(x, x, squares);
        }
        const float all = v_sum(sum);
        scales[j]       = ggml_fp32_to_fp16(all > 0.0f ? v_sum(squares) / all : 0.0f);

        const uint32_t shift = j / HALF * 4;
        for (uint32_t i = 0; i < n_embd; i += 4) {
            uint32_t bits = 0;
            for (uint32_t k = 0; k < 4 && i + k < n_embd; ++k) {
                bits |= uint32_t(row[i + k] >= 0.0f) << k;
            }
            signs[size_t(i / 4) * HALF + j % HALF] |= uint8_t(bits << shift);
        }
    }
}

} // namespace
