// The kernels, each with its grid.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "kernels/h2o-row-types.h"

namespace {

template <typename T>
void launch(void (*kernel)(T), dim3 grid, cudaStream_t stream, const T & argument, uint32_t n_threads = N_THREADS) {
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, dim3(n_threads), 0, stream), argument);
}

using row_types = llama_h2o_row_types<rows_f32, rows_f16, rows_q8_0, rows_q4_0>;

template <typename ROWS>
void launch_attend_rows(const llama_h2o_attention & a, cudaStream_t stream) {
    const dim3 grid(llama_h2o_cuda_workspace(a).n_parts, a.n_pairs());

    if (a.n_rows() <= 1) {
        launch(attend_part<ROWS, 1>, grid, stream, a);
    } else if (a.n_rows() <= 2) {
        launch(attend_part<ROWS, 2>, grid, stream, a);
    } else if (a.n_rows() <= 4) {
        launch(attend_part<ROWS, 4>, grid, stream, a);
    } else if (a.n_rows() <= 8) {
        launch(attend_part<ROWS, 8>, grid, stream, a);
    } else {
        launch(attend_part<ROWS, llama_h2o_attention::MAX_FEW_ROWS>, grid, stream, a);
    }
}

inline void launch_attend(const llama_h2o_attention & a, cudaStream_t stream) {
    row_types::with(a.k.type, [&](auto rows) { launch_attend_rows<decltype(rows)>(a, stream); });
}

inline void launch_combine(const llama_h2o_attention & a, cudaStream_t stream) {
    const dim3 grid((a.n_kv + N_THREADS - 1) / N_THREADS + a.n_rows(), a.n_pairs());

    launch(combine_parts, grid, stream, a);
}

inline void launch_add(const llama_h2o_sum & a, cudaStream_t stream) {
    const dim3 grid((a.n_kv + N_WARP - 1) / N_WARP, a.n_pairs());

    launch(add_probs, grid, stream, a, N_WARP * N_ADDERS);
}

} // namespace
