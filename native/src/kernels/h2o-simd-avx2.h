// Vectors of floats for AVX2: see h2o-simd.h, which includes it.

#pragma once

namespace {

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

} // namespace
