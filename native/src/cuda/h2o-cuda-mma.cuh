// Matrix products on tensor cores.

#pragma once

#include "ggml-cuda/common.cuh"

#include <cstdint>

namespace {

// Adds a product to sums[16][8], in float32: rows of a times rows of b, of 16 halves each. The matrices are distributed over a
// warp. Lane 4*i + t has
//
//   sums  of row i of a and rows 2*t and 2*t + 1 of b, then of row i + 8 and these
//   a     two halves of row i, two of row i + 8, two more of row i, two more of row i + 8
//   b     two halves of row i and two more
//
// The assignment of the 16 elements to t = 0 to 3 is arbitrary, but must be the same for a and b.
__device__ inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], const uint2 & b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%8}, {%0, %1, %2, %3};\n\t"
        "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%6, %7}, {%9}, {%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
    __trap(); // never called on such a device, see llama_h2o_cuda_set_ops()
#endif
}

// The same for integers: rows of a times rows of b, of 32 signed bytes each. Lane 4*i + t has bytes 4*t to 4*t + 3 and 16 + 4*t to
// 16 + 4*t + 3 of a row.
__device__ inline void multiply_add(int (&sums)[4], const uint32_t (&a)[4], const uint2 & b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#elif __CUDA_ARCH__ >= 750
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%4}, {%8}, {%0, %1};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%6}, {%9}, {%0, %1};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2, %3}, {%5}, {%8}, {%2, %3};\n\t"
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%2, %3}, {%7}, {%9}, {%2, %3};"
            : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
    const uint32_t lane = threadIdx.x % 32;
    for (uint32_t t = 0; t < 4; ++t) {
        for (uint32_t i = 0; i < 4; ++i) {
            const int row = lane / 4 * 4 + t;
            const int col = (lane % 4 * 2 + i % 2) * 4 + t;

            sums[i] = ggml_cuda_dp4a(int(__shfl_sync(0xffffffff, i < 2 ? a[0] : a[1], row)),
                    int(__shfl_sync(0xffffffff, b.x, col)), sums[i]);
            sums[i] = ggml_cuda_dp4a(int(__shfl_sync(0xffffffff, i < 2 ? a[2] : a[3], row)),
                    int(__shfl_sync(0xffffffff, b.y, col)), sums[i]);
        }
    }
#endif
}

} // namespace
