// Keys that are turned on where they lie, a pair of elements a thread, as the CPU does it: in 32 bits, rounded once.

#pragma once

#include "cuda/h2o-cuda-rows.cuh"
#include "cuda/h2o-cuda.h"

#include "ggml-cuda/common.cuh"

namespace {

__global__ void turn_keys(llama_h2o_key_turns a) {
    ggml_cuda_pdl_sync();

    const uint32_t n_dims = a.how.n_dims;
    const float * factors = a.factors + size_t(a.turns[blockIdx.x]) * 2 * n_dims;
    uint16_t * x          = a.keys + size_t(a.rows[blockIdx.x]) * a.n_embd + a.how.first;

    for (uint32_t pair = threadIdx.x; pair < n_dims / 2; pair += blockDim.x) {
        const size_t i = a.how.lower(pair);
        const size_t j = a.how.upper(pair);
        const float p  = to_float(x[i]);
        const float q  = to_float(x[j]);

        x[i] = __half_as_ushort(__float2half_rn(__fmaf_rn(q, factors[n_dims + i], __fmul_rn(p, factors[i]))));
        x[j] = __half_as_ushort(__float2half_rn(__fmaf_rn(p, factors[n_dims + j], __fmul_rn(q, factors[j]))));
    }
}

} // namespace
