// Writing rows to the archive in host memory: rotated and rounded exactly as on the CPU.

#pragma once

#include "cuda/h2o-cuda-search.cuh"
#include "cuda/h2o-cuda-store.cuh"

namespace {

constexpr uint32_t N_RUN = 8; // adjacent rows of a head per block; divides a page

static_assert(PAGE % N_RUN == 0 && N_RUN % N_WARPS == 0);

template <typename WORD>
__device__ void copy_words(const char * from, char * to, uint32_t size) {
    for (uint32_t i = threadIdx.x; i < size / sizeof(WORD); i += N_THREADS) {
        reinterpret_cast<WORD *>(to)[i] = reinterpret_cast<const WORD *>(from)[i];
    }
}

// Converts a row to its stored form, with one warp. rotation: index of its factors; -1: not rotated
__device__ inline void archive_row(const llama_h2o_archived_rows & a,
        const llama_h2o_archived_rows::source & from,
        uint32_t head,
        int32_t cell,
        uint32_t n_mix,
        int32_t rotation,
        float * x,
        char * to) {
    read_row(from.type, from.data + cell * from.nb_cell + head * from.nb_head, from.n_embd, x);
    if (n_mix > 0) {
        mix_row(x, from.n_embd, n_mix);
    }
    if (rotation >= 0) {
        rotate_row(a.how, a.factors + size_t(rotation) * 2 * a.how.n_dims, x);
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
    const int32_t first  = *a.first;
    const int32_t before = first % int32_t(N_RUN);
    const int32_t begin  = blockIdx.x == 0 ? 0 : int32_t(blockIdx.x * N_RUN) - before; // tokens of this run
    const int32_t end    = min(int32_t((blockIdx.x + 1) * N_RUN) - before, int32_t(a.n_tokens));
    if (begin >= end) {
        return;
    }

    char * bytes = reinterpret_cast<char *>(stored);
    for (int32_t i = begin + int32_t(warp); i < end; i += int32_t(N_WARPS)) {
        char * to = bytes + (i - begin) * a.nb_row;
        archive_row(a, a.k, head, a.cells[i], a.n_mix, a.rotations[head * a.n_tokens + i], rows[warp], to);
        archive_row(a, a.v, head, a.cells[i], 0, -1, rows[warp], to);
    }
    __syncthreads();

    const uint32_t p = uint32_t(first + begin);
    char * to        = a.pages[p / PAGE - first / PAGE] + a.offset + head * a.stride + p % PAGE * a.nb_row;
    if (a.nb_row % sizeof(uint32_t) == 0) {
        copy_words<uint32_t>(bytes, to, (end - begin) * a.nb_row);
    } else {
        copy_words<uint16_t>(bytes, to, (end - begin) * a.nb_row);
    }
}

} // namespace
