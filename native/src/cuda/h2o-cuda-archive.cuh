// Rows on their way to the archive, which lies in the host's memory: read where they are, turned and rounded as the CPU does it,
// and written there.

#pragma once

#include "cuda/h2o-cuda-search.cuh"

namespace {

constexpr uint32_t N_RUN = 8; // rows of a head that a block writes side by side: pages are whole runs

static_assert(PAGE % N_RUN == 0 && N_RUN % N_WARPS == 0);

__device__ inline void store_half(char * to, float x) {
    *reinterpret_cast<uint16_t *>(to) = __half_as_ushort(__float2half_rn(x));
}

// Stores the scale of a block. Returns what its elements are multiplied with.
__device__ inline float store_scale(char * block, float scale) {
    if (threadIdx.x % N_WARP == 0) {
        store_half(block, scale);
    }

    return scale != 0.0f ? __fdiv_rn(1.0f, scale) : 0.0f;
}

// A block of 32 elements by a warp.
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

// Stores a row of a warp.
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

__device__ inline void read_row(ggml_type type, const char * from, uint32_t n_embd, float * x) {
    const uint32_t i = threadIdx.x % N_WARP * N_ELEMENTS;
    if (i < n_embd) {
        switch (type) {
            case GGML_TYPE_F32:
                rows_f32::load(from, i, x + i);
                break;
            case GGML_TYPE_F16:
                rows_f16::load(from, i, x + i);
                break;
            case GGML_TYPE_Q8_0:
                rows_q8_0::load(from, i, x + i);
                break;
            default:
                rows_q4_0::load(from, i, x + i);
                break;
        }
    }
    __syncwarp();
}

__device__ inline void turn_row(const llama_h2o_turning & how, const float * factors, float * x) {
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

template <typename WORD>
__device__ void copy_words(const char * from, char * to, uint32_t size) {
    for (uint32_t i = threadIdx.x; i < size / sizeof(WORD); i += N_THREADS) {
        reinterpret_cast<WORD *>(to)[i] = reinterpret_cast<const WORD *>(from)[i];
    }
}

// A row of a warp, as it is stored. turn: which factors; or -1
__device__ inline void archive_row(const llama_h2o_archived_rows & a,
        const llama_h2o_archived_rows::source & from,
        uint32_t head,
        int32_t cell,
        uint32_t n_mix,
        int32_t turn,
        float * x,
        char * to) {
    read_row(from.type, from.data + cell * from.nb_cell + head * from.nb_head, from.n_embd, x);
    if (n_mix > 0) {
        mix_row(x, from.n_embd, n_mix);
    }
    if (turn >= 0) {
        turn_row(a.how, a.factors + size_t(turn) * 2 * a.how.n_dims, x);
    }
    store_row(a.type, x, from.n_embd, to + from.offset);
    __syncwarp();
}

// grid [runs, n_head_kv], N_THREADS threads
__global__ void archive_rows(const llama_h2o_archived_rows a) {
    __shared__ float rows[N_WARPS][MAX_EMBD];
    __shared__ uint32_t stored[N_RUN * 2 * MAX_EMBD]; // bytes

    ggml_cuda_pdl_sync();

    const uint32_t warp  = threadIdx.x / N_WARP;
    const uint32_t head  = blockIdx.y;
    const int32_t before = a.first % int32_t(N_RUN);
    const int32_t begin  = blockIdx.x == 0 ? 0 : int32_t(blockIdx.x * N_RUN) - before; // of the tokens
    const int32_t end    = min(int32_t((blockIdx.x + 1) * N_RUN) - before, int32_t(a.n_tokens));

    char * bytes = reinterpret_cast<char *>(stored);
    for (int32_t i = begin + int32_t(warp); i < end; i += int32_t(N_WARPS)) {
        char * to = bytes + (i - begin) * a.nb_row;
        archive_row(a, a.k, head, a.cells[i], a.n_mix, a.turns[head * a.n_tokens + i], rows[warp], to);
        archive_row(a, a.v, head, a.cells[i], 0, -1, rows[warp], to);
    }
    __syncthreads();

    const uint32_t p = uint32_t(a.first + begin);
    char * to        = a.pages[p / PAGE - a.first / PAGE] + a.offset + head * a.stride + p % PAGE * a.nb_row;
    if (a.nb_row % sizeof(uint32_t) == 0) {
        copy_words<uint32_t>(bytes, to, (end - begin) * a.nb_row);
    } else {
        copy_words<uint16_t>(bytes, to, (end - begin) * a.nb_row);
    }
}

} // namespace
