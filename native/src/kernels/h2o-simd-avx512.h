// Vectors of floats for AVX-512: see h2o-simd.h, which includes it.

#pragma once

namespace {

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

// elements must be in -128 <= x < 128; truncates
inline void v_store_i8(char * p, vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a.v)));
}

inline void v_store_f16(char * p, vec a) {
    const __m256i x = _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), x);
}

// elements must be in 0 <= x < 256; truncates
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

// the low or high 4 bits of the bytes, minus 8
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

// a * 2^n for integers n; the result must be normal
inline vec v_scale2(vec a, vec n) {
    return { _mm512_scalef_ps(a.v, n.v) };
}

// bit mask of the elements above the limit
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

#if defined(__AVX512BF16__)

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

// adds a * b of both halves to c
inline vec v_fma(vec_pairs a, vec_pairs b, vec c) {
    return { _mm512_dpbf16_ps(c.v, reinterpret_cast<__m512bh>(a.v), reinterpret_cast<__m512bh>(b.v)) };
}

inline __m512i v_to_bf16(vec a) {
    return _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

// pairs of an element of a and one of b
inline vec_pairs v_pair(vec a, vec b) {
    return { _mm512_or_si512(v_to_bf16(a), _mm512_slli_epi32(v_to_bf16(b), 16)) };
}

// pairs of adjacent elements of a
inline void v_store_pairs(bf16_pair * p, vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(a.v)));
}

#endif

} // namespace
