// Keys that are turned on where they lie.

#pragma once

#include "cuda/h2o-cuda-store.cuh"

namespace {

// grid [n/N_WARPS], a warp for each key
__global__ void turn_keys(const llama_h2o_key_turns a) {
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
    turn_row(a.how, a.factors + size_t(a.turns[i]) * 2 * a.how.n_dims, x);
    if (a.n_mix > 0) {
        mix_row(x, a.n_embd, a.n_mix);
    }
    store_row(a.type, x, a.n_embd, key);
}

} // namespace
