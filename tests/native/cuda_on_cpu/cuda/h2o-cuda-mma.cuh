// CPU implementation of the tensor core products in the file of the same name.

#pragma once

#include "cuda_fp16.h"

inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint2 & b) {
    using halves = float[4];

    static struct {
        halves a[2]; // of rows i and i + 8
        halves b;
    } lanes[1024];

    const auto unpack = [](halves & to, uint32_t low, uint32_t high) {
        for (uint32_t e = 0; e < 4; ++e) {
            to[e] = __half2float(__ushort_as_half(uint16_t((e < 2 ? low : high) >> e % 2 * 16)));
        }
    };
    auto & own = lanes[threadIdx.x];
    unpack(own.a[0], a[0], a[2]);
    unpack(own.a[1], a[1], a[3]);
    unpack(own.b, b.x, b.y);

    // synchronises the warp, as a shuffle does
    cuda_on_cpu::block::current().yield();
    const uint32_t lane = threadIdx.x % cuda_on_cpu::N_WARP;
    const auto * warp   = lanes + (threadIdx.x - lane);
    for (uint32_t i = 0; i < 4; ++i) {
        for (uint32_t t = 0; t < 4; ++t) {
            const halves & x  = warp[lane / 4 * 4 + t].a[i / 2];
            const halves & y  = warp[(lane % 4 * 2 + i % 2) * 4 + t].b;
            sums[i]          += x[0] * y[0] + x[1] * y[1] + x[2] * y[2] + x[3] * y[3];
        }
    }
    cuda_on_cpu::block::current().yield();
}

inline void multiply_add(int (&sums)[4], const uint32_t (&a)[4], const uint2 & b) {
    static struct {
        uint32_t a[4];
        uint32_t b[2];
    } lanes[1024];

    lanes[threadIdx.x] = { { a[0], a[1], a[2], a[3] }, { b.x, b.y } };

    cuda_on_cpu::block::current().yield();
    const uint32_t lane = threadIdx.x % cuda_on_cpu::N_WARP;
    const auto * warp   = lanes + (threadIdx.x - lane);
    for (uint32_t i = 0; i < 4; ++i) {
        for (uint32_t t = 0; t < 4; ++t) {
            const auto & x = warp[lane / 4 * 4 + t];
            const auto & y = warp[(lane % 4 * 2 + i % 2) * 4 + t];
            for (uint32_t k = 0; k < 2; ++k) {
                for (uint32_t shift = 0; shift < 32; shift += 8) {
                    sums[i] += int(int8_t(x.a[2 * k + i / 2] >> shift)) * int(int8_t(y.b[k] >> shift));
                }
            }
        }
    }
    cuda_on_cpu::block::current().yield();
}
