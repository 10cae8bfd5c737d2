// A vector of floats, as wide as the instruction set that the including file is compiled for. Nothing
// here has external linkage: the same names mean other code in another file.

#pragma once

#include "ggml.h"

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(H2O_PORTABLE)
// below
#elif defined(__AVX512F__) || defined(__AVX2__)
#    include <immintrin.h>
#elif defined(__ARM_NEON)
#    include <arm_neon.h>
#endif

namespace {

struct vec {
#if !defined(H2O_PORTABLE) && defined(__AVX512F__)
    static constexpr int n = 16;
#elif !defined(H2O_PORTABLE) && defined(__AVX2__)
    static constexpr int n = 8;
#else
    static constexpr int n = 4;
#endif

    typedef float floats __attribute__((vector_size(n * sizeof(float))));

    floats v;
};

inline vec v_set(float x) {
    return { x - vec::floats {} };
}
inline vec v_load(const float * p) {
    vec res;
    std::memcpy(&res.v, p, sizeof(res.v));
    return res;
}
inline void v_store(float * p, vec a) {
    std::memcpy(p, &a.v, sizeof(a.v));
}
inline vec v_add(vec a, vec b) {
    return { a.v + b.v };
}
inline vec v_sub(vec a, vec b) {
    return { a.v - b.v };
}
inline vec v_mul(vec a, vec b) {
    return { a.v * b.v };
}
inline vec v_div(vec a, vec b) {
    return { a.v / b.v };
}

// 0 where x is below the limit, else a, also where x is no number
inline vec v_unless_below(vec x, float limit, vec a) {
    return { x.v < v_set(limit).v ? v_set(0.0f).v : a.v };
}

// a + mask, or minus infinity where the mask is that, whatever a is
inline vec v_add_mask(vec a, vec mask) {
    return { mask.v == v_set(-INFINITY).v ? mask.v : a.v + mask.v };
}

#if !defined(H2O_PORTABLE) && defined(__AVX512F__)

inline vec v_max(vec a, vec b) {
    return { _mm512_max_ps(a.v, b.v) };
}
inline vec v_fma(vec a, vec b, vec c) {
    return { _mm512_fmadd_ps(a.v, b.v, c.v) };
}
inline float v_sum(vec a) {
    return _mm512_reduce_add_ps(a.v);
}
inline float v_top(vec a) {
    return _mm512_reduce_max_ps(a.v);
}

inline vec v_load_f16(const char * p) {
    return { _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))) };
}

// of elements -128 <= x < 128, cut off
inline void v_store_i8(char * p, vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a.v)));
}

inline void v_store_f16(char * p, vec a) {
    const __m256i x = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x);
}

// of elements 0 <= x < 256, cut off
inline void v_store_u8(uint8_t * p, vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a.v)));
}

// element i becomes element i ^ LEN, a power of two
template <int LEN>
inline vec v_swap(vec a) {
    if constexpr (LEN == 1) {
        return { _mm512_permute_ps(a.v, 0xb1) };
    } else if constexpr (LEN == 2) {
        return { _mm512_permute_ps(a.v, 0x4e) };
    } else {
        return { _mm512_shuffle_f32x4(a.v, a.v, LEN == 4 ? 0xb1 : 0x4e) };
    }
}

inline vec v_load_u16(const uint16_t * p) {
    return { _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))) };
}

inline vec v_from_i8(__m128i x) {
    return { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)) };
}

inline vec v_load_i8(const char * p) {
    return v_from_i8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
}

// the low or the high halves of the bytes, less 8
inline vec v_load_i4(const char * p, bool high) {
    __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    if (high) {
        x = _mm_srli_epi16(x, 4);
    }
    return v_from_i8(_mm_sub_epi8(_mm_and_si128(x, _mm_set1_epi8(15)), _mm_set1_epi8(8)));
}

inline vec v_round(vec a) {
    return { _mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
}

// a * 2^n for whole n of normal size
inline vec v_scale2(vec a, vec n) {
    return { _mm512_scalef_ps(a.v, n.v) };
}

// a bit for every element above the limit
inline uint32_t v_above(vec a, float limit) {
    return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_GT_OQ);
}

// the sums of four vectors
inline void v_store_sums(float * p, vec a, vec b, vec c, vec d) {
    const __m512 ab   = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
    const __m512 cd   = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
    const __m512d lo  = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d hi  = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    const __m256 half = _mm256_add_ps(
            _mm512_castps512_ps256(abcd), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(abcd), 1)));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

#    if defined(__AVX512BF16__)

// Two bf16 numbers, the first one in the low half.
struct bf16_pair {
    uint32_t bits;
};

// A pair in each lane.
struct vec_pairs {
    __m512i v;
};

inline vec_pairs v_set(bf16_pair x) {
    return { _mm512_set1_epi32(int(x.bits)) };
}
inline vec_pairs v_load(const bf16_pair * p) {
    return { _mm512_loadu_si512(p) };
}
inline void v_store(bf16_pair * p, vec_pairs a) {
    _mm512_storeu_si512(p, a.v);
}

// a * b of both halves, added to c
inline vec v_fma(vec_pairs a, vec_pairs b, vec c) {
    return { _mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v)) };
}

inline __m512i v_to_bf16(vec a) {
    return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

// the elements of a as first ones, those of b as second ones
inline vec_pairs v_pair(vec a, vec b) {
    return { _mm512_or_si512(v_to_bf16(a), _mm512_slli_epi32(v_to_bf16(b), 16)) };
}

// the elements of a, two side by side in a pair
inline void v_store_pairs(bf16_pair * p, vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

#    endif

#elif !defined(H2O_PORTABLE) && defined(__AVX2__)

inline vec v_max(vec a, vec b) {
    return { _mm256_max_ps(a.v, b.v) };
}
inline vec v_fma(vec a, vec b, vec c) {
    return { _mm256_fmadd_ps(a.v, b.v, c.v) };
}

inline float v_sum(vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x        = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

inline float v_top(vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x        = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline vec v_load_f16(const char * p) {
    return { _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))) };
}

inline void v_store_i8(char * p, vec a) {
    const __m256i x = _mm256_cvttps_epi32(a.v);
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packs_epi16(y, y));
}

inline void v_store_f16(char * p, vec a) {
    const __m128i x = _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), x);
}

inline void v_store_u8(uint8_t * p, vec a) {
    const __m256i x = _mm256_cvttps_epi32(a.v);
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i *>(p), _mm_packus_epi16(y, y));
}

template <int LEN>
inline vec v_swap(vec a) {
    if constexpr (LEN == 4) {
        return { _mm256_permute2f128_ps(a.v, a.v, 1) };
    } else {
        return { _mm256_permute_ps(a.v, LEN == 1 ? 0xb1 : 0x4e) };
    }
}

inline vec v_load_u16(const uint16_t * p) {
    return { _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))) };
}

inline vec v_from_i8(__m128i x) {
    return { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)) };
}

inline vec v_load_i8(const char * p) {
    return v_from_i8(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
}

inline vec v_load_i4(const char * p, bool high) {
    __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(p));
    if (high) {
        x = _mm_srli_epi16(x, 4);
    }
    return v_from_i8(_mm_sub_epi8(_mm_and_si128(x, _mm_set1_epi8(15)), _mm_set1_epi8(8)));
}

inline vec v_round(vec a) {
    return { _mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC) };
}

inline vec v_scale2(vec a, vec n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return { _mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23))) };
}

inline uint32_t v_above(vec a, float limit) {
    return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a.v, _mm256_set1_ps(limit), _CMP_GT_OQ)));
}

inline void v_store_sums(float * p, vec a, vec b, vec c, vec d) {
    const __m256 abcd = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
    _mm_storeu_ps(p, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}

#elif !defined(H2O_PORTABLE) && defined(__ARM_NEON)

inline vec v_max(vec a, vec b) {
    return { vmaxq_f32(a.v, b.v) };
}
inline vec v_fma(vec a, vec b, vec c) {
    return { vfmaq_f32(c.v, a.v, b.v) };
}
inline float v_sum(vec a) {
    return vaddvq_f32(a.v);
}
inline float v_top(vec a) {
    return vmaxvq_f32(a.v);
}

inline vec v_load_f16(const char * p) {
    return { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t *>(p)))) };
}

inline void v_store_i8(char * p, vec a) {
    const int16x4_t x = vmovn_s32(vcvtq_s32_f32(a.v));
    vst1_lane_u32(reinterpret_cast<uint32_t *>(p), vreinterpret_u32_s8(vmovn_s16(vcombine_s16(x, x))), 0);
}

inline void v_store_f16(char * p, vec a) {
    vst1_u16(reinterpret_cast<uint16_t *>(p), vreinterpret_u16_f16(vcvt_f16_f32(a.v)));
}

inline void v_store_u8(uint8_t * p, vec a) {
    const uint16x4_t x = vmovn_u32(vcvtq_u32_f32(a.v));
    vst1_lane_u32(reinterpret_cast<uint32_t *>(p), vreinterpret_u32_u8(vmovn_u16(vcombine_u16(x, x))), 0);
}

template <int LEN>
inline vec v_swap(vec a) {
    return { LEN == 1 ? vrev64q_f32(a.v) : vextq_f32(a.v, a.v, 2) };
}

inline vec v_load_u16(const uint16_t * p) {
    return { vcvtq_f32_u32(vmovl_u16(vld1_u16(p))) };
}

inline vec v_from_i8(int8x8_t x) {
    return { vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(x)))) };
}

inline int8x8_t v_load_4_bytes(const char * p) {
    uint32_t x;
    std::memcpy(&x, p, sizeof(x));
    return vreinterpret_s8_u32(vdup_n_u32(x));
}

inline vec v_load_i8(const char * p) {
    return v_from_i8(v_load_4_bytes(p));
}

inline vec v_load_i4(const char * p, bool high) {
    uint8x8_t x = vreinterpret_u8_s8(v_load_4_bytes(p));
    x           = high ? vshr_n_u8(x, 4) : vand_u8(x, vdup_n_u8(15));
    return v_from_i8(vsub_s8(vreinterpret_s8_u8(x), vdup_n_s8(8)));
}

inline vec v_round(vec a) {
    return { vrndnq_f32(a.v) };
}

inline vec v_scale2(vec a, vec n) {
    const int32x4_t e = vaddq_s32(vcvtq_s32_f32(n.v), vdupq_n_s32(127));
    return { vmulq_f32(a.v, vreinterpretq_f32_s32(vshlq_n_s32(e, 23))) };
}

inline uint32_t v_above(vec a, float limit) {
    const uint32x4_t bits = vandq_u32(vcgtq_f32(a.v, vdupq_n_f32(limit)), uint32x4_t { 1, 2, 4, 8 });
    return vaddvq_u32(bits);
}

inline void v_store_sums(float * p, vec a, vec b, vec c, vec d) {
    vst1q_f32(p, vpaddq_f32(vpaddq_f32(a.v, b.v), vpaddq_f32(c.v, d.v)));
}

#else

template <typename F>
inline vec v_each(F fn) {
    vec res;
    for (int i = 0; i < vec::n; ++i) {
        res.v[i] = fn(i);
    }
    return res;
}

inline vec v_max(vec a, vec b) {
    return v_each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline vec v_fma(vec a, vec b, vec c) {
    return v_each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline float v_sum(vec a) {
    return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]);
}
inline float v_top(vec a) {
    const float x = a.v[0] > a.v[1] ? a.v[0] : a.v[1];
    const float y = a.v[2] > a.v[3] ? a.v[2] : a.v[3];
    return x > y ? x : y;
}

inline vec v_load_f16(const char * p) {
    float x[vec::n];
    ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t *>(p), x, vec::n);
    return v_load(x);
}

inline void v_store_i8(char * p, vec a) {
    for (int i = 0; i < vec::n; ++i) {
        p[i] = char(int8_t(a.v[i]));
    }
}

inline void v_store_f16(char * p, vec a) {
    float x[vec::n];
    v_store(x, a);
    ggml_fp32_to_fp16_row(x, reinterpret_cast<ggml_fp16_t *>(p), vec::n);
}

inline void v_store_u8(uint8_t * p, vec a) {
    for (int i = 0; i < vec::n; ++i) {
        p[i] = uint8_t(a.v[i]);
    }
}

template <int LEN>
inline vec v_swap(vec a) {
    return v_each([&](int i) { return a.v[i ^ LEN]; });
}

inline vec v_load_u16(const uint16_t * p) {
    return v_each([&](int i) { return float(p[i]); });
}

inline vec v_load_i8(const char * p) {
    return v_each([&](int i) { return float(int8_t(p[i])); });
}

inline vec v_load_i4(const char * p, bool high) {
    return v_each([&](int i) { return float((high ? uint8_t(p[i]) >> 4 : p[i] & 15) - 8); });
}

inline vec v_round(vec a) {
    return v_each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline vec v_scale2(vec a, vec n) {
    return v_each([&](int i) { return std::isfinite(n.v[i]) ? std::ldexp(a.v[i], int(n.v[i])) : n.v[i]; });
}
inline uint32_t v_above(vec a, float limit) {
    uint32_t res = 0;
    for (int i = 0; i < vec::n; ++i) {
        res |= uint32_t(a.v[i] > limit) << i;
    }
    return res;
}

inline void v_store_sums(float * p, vec a, vec b, vec c, vec d) {
    p[0] = v_sum(a);
    p[1] = v_sum(b);
    p[2] = v_sum(c);
    p[3] = v_sum(d);
}

#endif

// The elements that have a bit, side by side. Up to the length of a vector anything may come behind them.
inline void v_store_some(float * p, vec a, uint32_t bits) {
#if !defined(H2O_PORTABLE) && defined(__AVX512F__)
    v_store(p, { _mm512_maskz_compress_ps(__mmask16(bits), a.v) });
#else
    float x[vec::n];
    v_store(x, a);
    for (; bits != 0; bits &= bits - 1) {
        *p++ = x[__builtin_ctz(bits)];
    }
#endif
}

// e^x for x <= 0, to 2 units in the last place, and exactly 0 below the smallest normal number; no number where x is
// none, for which the order of the arguments of v_max() matters. The polynomial is that of expf() in the Cephes library.
inline vec v_exp(vec x) {
    constexpr float LOWEST = -87.0f;

    const vec y = v_max(v_set(LOWEST), x);
    const vec n = v_round(v_mul(y, v_set(1.44269504088896341f)));

    vec r = v_fma(n, v_set(-0.693359375f), y);
    r     = v_fma(n, v_set(2.12194440e-4f), r);

    vec p = v_set(1.9875691500e-4f);
    p     = v_fma(p, r, v_set(1.3981999507e-3f));
    p     = v_fma(p, r, v_set(8.3334519073e-3f));
    p     = v_fma(p, r, v_set(4.1665795894e-2f));
    p     = v_fma(p, r, v_set(1.6666665459e-1f));
    p     = v_fma(p, r, v_set(5.0000001201e-1f));
    p     = v_fma(v_mul(p, r), r, v_add(r, v_set(1.0f)));

    return v_unless_below(x, LOWEST, v_scale2(p, n));
}

inline vec v_tanh(vec x) {
    const vec zero = v_set(0.0f);
    const vec one  = v_set(1.0f);

    const vec minus = v_sub(zero, x);
    const vec e     = v_exp(v_mul(v_max(x, minus), v_set(-2.0f)));
    const vec t     = v_div(v_sub(one, e), v_add(one, e));

    return v_sub(v_unless_below(x, 0.0f, t), v_unless_below(minus, 0.0f, t));
}

} // namespace
