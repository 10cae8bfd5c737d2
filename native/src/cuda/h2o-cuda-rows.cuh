// Row types: load(row, i, x) reads eight elements from i on, i a multiple of eight.

#pragma once

#include "kernels/h2o-row-types.h"

#include <cuda_fp16.h>

#include <cstdint>

namespace {

constexpr uint32_t N_ELEMENTS = 8;

__device__ inline float to_float(uint16_t f16) {
    return __half2float(__ushort_as_half(f16));
}

struct rows_f32 {
    static __device__ void load(const char * row, uint32_t i, float * x) {
        const float * from = reinterpret_cast<const float *>(row) + i;
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
            x[e] = from[e];
        }
    }
};

struct rows_f16 {
    static __device__ void load(const char * row, uint32_t i, float * x) {
        const uint4 words = *reinterpret_cast<const uint4 *>(row + i * sizeof(uint16_t));

        const uint32_t pairs[4] = { words.x, words.y, words.z, words.w };
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
            x[e] = to_float(uint16_t(pairs[e / 2] >> (e % 2 * 16)));
        }
    }
};

// Eight bytes with an alignment of two.
struct bytes8 {
    uint16_t pairs[4];

    __device__ explicit bytes8(const char * p) {
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            pairs[i] = reinterpret_cast<const uint16_t *>(p)[i];
        }
    }

    __device__ uint8_t operator[](uint32_t i) const { return uint8_t(pairs[i / 2] >> (i % 2 * 8)); }
};

__device__ inline float scale_of(const char * block) {
    return to_float(*reinterpret_cast<const uint16_t *>(block));
}

// blocks of 32 elements: the scale, then the elements
struct rows_q8_0 {
    static __device__ void load(const char * row, uint32_t i, float * x) {
        const char * block = row + i / 32 * (2 + 32);

        const float scale = scale_of(block);
        const bytes8 bytes(block + 2 + i % 32);
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
            x[e] = scale * float(int8_t(bytes[e]));
        }
    }
};

// the same; byte i has elements i and i + 16
struct rows_q4_0 {
    static __device__ void load(const char * row, uint32_t i, float * x) {
        const char * block = row + i / 32 * (2 + 16);

        const float scale = scale_of(block);
        const bytes8 bytes(block + 2 + i % 16);
        const int shift = i % 32 >= 16 ? 4 : 0;
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
            x[e] = scale * float((bytes[e] >> shift & 0x0f) - 8);
        }
    }
};

using row_types = llama_h2o_row_types<rows_f32, rows_f16, rows_q8_0, rows_q4_0>;

} // namespace
