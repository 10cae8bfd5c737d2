// The product of tensor cores: the one place that has instructions of theirs.

#pragma once

#include <cstdint>

namespace {

// Adds to a product of 16 x 8 numbers, sums[16][8], in float32: rows of a with rows of b, of 16 halves each. A warp has them
// in pieces. Lane 4*i + t has
//
//   sums  of row i of a and rows 2*t and 2*t + 1 of b, then of row i + 8 and these
//   a     two halves of row i, two of row i + 8, two more of row i, two more of row i + 8
//   b     two halves of row i and two more
//
// Which four of the 16 these are does not matter: all different for t = 0 to 3, and the same ones of a and b.
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
    __trap(); // no such device is asked, see llama_h2o_cuda_set_ops()
#endif
}

} // namespace
