// A vector of floats for the instruction set of the including file. Nothing here has external linkage, because the same names
// have different code in other files.

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

// 0 if x is below the limit, otherwise a, also if x is NaN
inline vec v_unless_below(vec x, float limit, vec a) {
    return { x.v < v_set(limit).v ? v_set(0.0f).v : a.v };
}

// a + mask, or -inf if the mask is -inf, even if a is NaN
inline vec v_add_mask(vec a, vec mask) {
    return { mask.v == v_set(-INFINITY).v ? mask.v : a.v + mask.v };
}

} // namespace

#if !defined(H2O_PORTABLE) && defined(__AVX512F__)
#    include "kernels/h2o-simd-avx512.h"
#elif !defined(H2O_PORTABLE) && defined(__AVX2__)
#    include "kernels/h2o-simd-avx2.h"
#elif !defined(H2O_PORTABLE) && defined(__ARM_NEON)
#    include "kernels/h2o-simd-neon.h"
#else
#    include "kernels/h2o-simd-portable.h"
#endif

namespace {

// Stores the elements whose bit is set, adjacent. The rest of the vector is undefined.
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

// e^x for x <= 0, within 2 units in the last place, and exactly 0 below the smallest normal number. NaN if x is NaN, which depends
// on the order of the arguments of v_max(). The polynomial is that of expf() in the Cephes library.
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
