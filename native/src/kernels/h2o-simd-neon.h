// Vectors of floats for NEON: see h2o-simd.h, which includes it.

#pragma once

namespace {

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

} // namespace
