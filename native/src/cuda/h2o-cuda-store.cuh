// Reading, rotating and storing rows, one per warp, with one rounding, exactly as on the CPU.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "kernels/h2o-rotation.h"

namespace {

__device__ inline void store_half(char * to, float x) {
    *reinterpret_cast<uint16_t *>(to) = __half_as_ushort(__float2half_rn(x));
}

// Stores the scale of a block and returns the factor of its elements.
__device__ inline float store_scale(char * block, float scale) {
    if (threadIdx.x % N_WARP == 0) {
        store_half(block, scale);
    }

    return scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
}

// Stores a block of 32 elements, with one warp.
__device__ inline void store_q8_0(char * block, float x) {
    const float by = store_scale(block, __fdiv_rn(warp_max(fabsf(x)), 127.0f));

    block[2 + threadIdx.x % N_WARP] = char(__float2int_rn(__fmul_rn(x, by)));
}

__device__ inline void store_q4_0(char * block, float x) {
    const uint32_t lane = threadIdx.x % N_WARP;

    const float high  = warp_max(x);
    const float low   = warp_max(-x);
    const float by    = store_scale(block, __fdiv_rn(high > low ? high : -low, -8.0f));
    const float level = fminf(floorf(__fmaf_rn(x, by, 8.5f)), 15.0f);
    const float other = __shfl_xor_sync(0xffffffff, level, 16);
    if (lane < 16) {
        block[2 + lane] = char(uint32_t(level) | uint32_t(other) << 4);
    }
}

// Stores a row, with one warp.
__device__ inline void store_row(ggml_type type, const float * x, uint32_t n_embd, char * to) {
    for (uint32_t i = threadIdx.x % N_WARP; i < n_embd; i += N_WARP) {
        switch (type) {
            case GGML_TYPE_F32:
                reinterpret_cast<float *>(to)[i] = x[i];
                break;
            case GGML_TYPE_F16:
                store_half(to + 2 * i, x[i]);
                break;
            case GGML_TYPE_Q8_0:
                store_q8_0(to + i / 32 * 34, x[i]);
                break;
            default:
                store_q4_0(to + i / 32 * 18, x[i]);
                break;
        }
    }
}

// Reads N_ELEMENTS elements from i on.
__device__ inline void load_elements(ggml_type type, const char * row, uint32_t i, float * x) {
    row_types::with(type, [&](auto rows) { rows.load(row, i, x); });
}

__device__ inline void read_row(ggml_type type, const char * from, uint32_t n_embd, float * x) {
    const uint32_t i = threadIdx.x % N_WARP * N_ELEMENTS;
    if (i < n_embd) {
        load_elements(type, from, i, x + i);
    }
    __syncwarp();
}

// Applies the Hadamard transform to a row in shared memory, with one warp, in blocks of n_mix elements.
__device__ inline void mix_row(float * row, uint32_t n_embd, uint32_t n_mix) {
    const uint32_t lane = threadIdx.x % N_WARP;

    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(float(n_mix)));
    for (uint32_t i = lane; i < n_embd; i += N_WARP) {
        row[i] *= scale;
    }
    for (uint32_t len = 1; len < n_mix; len *= 2) {
        __syncwarp();
        for (uint32_t i = lane; i < n_embd / 2; i += N_WARP) {
            float * lo    = row + i / len * 2 * len + i % len;
            const float x = lo[0];
            const float y = lo[len];

            lo[0]   = x + y;
            lo[len] = x - y;
        }
    }
    __syncwarp();
}

__device__ inline void rotate_row(const llama_h2o_rotation & how, const float * factors, float * x) {
    const float * sines = factors + how.n_dims;
    for (uint32_t pair = threadIdx.x % N_WARP; pair < how.n_dims / 2; pair += N_WARP) {
        const size_t i = how.lower(pair);
        const size_t j = how.upper(pair);
        const float p  = x[how.first + i];
        const float q  = x[how.first + j];

        x[how.first + i] = __fmaf_rn(q, sines[i], __fmul_rn(p, factors[i]));
        x[how.first + j] = __fmaf_rn(p, sines[j], __fmul_rn(q, factors[j]));
    }
    __syncwarp();
}

// Rotates keys in place. grid [n/N_WARPS], one warp per key
__global__ void rotate_keys(const llama_h2o_key_rotations a) {
    __shared__ float rows[N_WARPS][MAX_EMBD];

    ggml_cuda_pdl_sync();

    const uint32_t warp = threadIdx.x / N_WARP;
    const uint32_t i    = blockIdx.x * N_WARPS + warp;
    if (i >= a.n) {
        return;
    }

    float * x  = rows[warp];
    char * key = a.keys + size_t(a.rows[i]) * a.nb_row;
    read_row(a.type, key, a.n_embd, x);
    if (a.n_mix > 0) {
        mix_row(x, a.n_embd, a.n_mix);
    }
    rotate_row(a.how, a.factors + size_t(a.rotations[i]) * 2 * a.how.n_dims, x);
    if (a.n_mix > 0) {
        mix_row(x, a.n_embd, a.n_mix);
    }
    store_row(a.type, x, a.n_embd, key);
}

} // namespace
