// Vectors of floats for any processor, element by element: see h2o-simd.h, which includes it.

#pragma once

namespace {

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

} // namespace
