// The kernels, each with its grid.

#pragma once

#include "cuda/h2o-cuda-archive.cuh"
#include "cuda/h2o-cuda-choose.cuh"
#include "cuda/h2o-cuda-found.cuh"
#include "cuda/h2o-cuda-prompt.cuh"
#include "cuda/h2o-cuda-turn.cuh"
#include "kernels/h2o-row-types.h"

#include <algorithm>

namespace {

template <typename... T>
void launch(void (*kernel)(T...), dim3 grid, uint32_t n_threads, cudaStream_t stream, const T &... arguments) {
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, dim3(n_threads), 0, stream), arguments...);
}

using row_types = llama_h2o_row_types<rows_f32, rows_f16, rows_q8_0, rows_q4_0>;

template <typename ROWS>
void launch_attend_rows(const llama_h2o_attention & a, cudaStream_t stream) {
    const llama_h2o_cuda_workspace work(a);

    const auto with = [&](void (*kernel)(llama_h2o_attention, llama_h2o_cuda_workspace)) {
        launch(kernel, dim3(work.n_parts, a.n_pairs()), N_THREADS, stream, a, work);
    };

    if (a.n_rows() <= 1) {
        with(attend_part<ROWS, 1>);
    } else if (a.n_rows() <= 2) {
        with(attend_part<ROWS, 2>);
    } else if (a.n_rows() <= 4) {
        with(attend_part<ROWS, 4>);
    } else if (a.n_rows() <= 8) {
        with(attend_part<ROWS, 8>);
    } else {
        with(attend_part<ROWS, llama_h2o_attention::MAX_FEW_ROWS>);
    }
}

inline void launch_attend(const llama_h2o_attention & a, cudaStream_t stream) {
    row_types::with(a.k.type, [&](auto rows) { launch_attend_rows<decltype(rows)>(a, stream); });
}

// Looks for rows and attends to them, of few queries behind the cells or beside them.
inline void launch_search(const llama_h2o_attention & a, bool is_beside, cudaStream_t stream) {
    const device_search search(*a.search);
    const llama_h2o_cuda_search_space space(a, is_beside);
    const uint32_t n_blocks = a.n_pairs() * space.n_groups;

    const auto with = [&](void (*kernel)(llama_h2o_attention, device_search, llama_h2o_cuda_search_space), dim3 grid) {
        launch(kernel, grid, N_THREADS, stream, a, search, space);
    };

    with(ask, dim3((a.n_rows() + N_WARPS - 1) / N_WARPS, a.n_pairs()));
    const dim3 grid(space.n_parts, n_blocks);
    if (space.n_words <= 16) {
        with(look<16>, grid);
    } else if (space.n_words <= 32) {
        with(look<32>, grid);
    } else {
        with(look<64>, grid);
    }
    if (space.n_asking <= N_WARPS) {
        with(attend_found<1>, dim3(n_blocks));
    } else if (space.n_asking <= 4 * N_WARPS) {
        with(attend_found<4>, dim3(n_blocks));
    } else {
        with(attend_found<MAX_ASKING / N_WARPS>, dim3(n_blocks));
    }
}

inline void launch_combine(const llama_h2o_attention & a, cudaStream_t stream) {
    const dim3 grid((a.n_kv + N_THREADS - 1) / N_THREADS + a.n_rows(), a.n_pairs());

    launch(combine_parts, grid, N_THREADS, stream, a, llama_h2o_cuda_workspace(a));
}

inline void launch_add(const llama_h2o_sum & a, cudaStream_t stream) {
    const dim3 grid((a.n_kv + N_WARP - 1) / N_WARP, a.n_pairs());

    launch(add_probs, grid, N_WARP * n_adders(a), stream, a);
}

// Calls fn(rows, n) with an object of the struct for this type and the constant that holds its elements.
template <typename F>
void with_rows(const llama_h2o_attention::operand & k, uint32_t n_embd, F fn) {
    row_types::with(k.type, [&](auto rows) {
        if (n_embd <= MAX_EMBD / 2) {
            fn(rows, std::integral_constant<uint32_t, MAX_EMBD / 2>());
        } else {
            fn(rows, std::integral_constant<uint32_t, MAX_EMBD>());
        }
    });
}

inline void launch_lse(const llama_h2o_attention & a, cudaStream_t stream) {
    const llama_h2o_cuda_lse work(a);
    const dim3 grid(work.n_blocks(a) * work.n_parts, a.n_pairs());

    with_rows(a.k, a.n_embd_head_k,
            [&](auto rows, auto n) { launch(sum_part<decltype(rows), n()>, grid, N_TILE_THREADS, stream, a, work); });
    if (work.n_parts > 1) {
        launch(merge_parts, dim3((work.n + N_TILE_THREADS - 1) / N_TILE_THREADS), N_TILE_THREADS, stream, a.out, work);
    }
}

inline void launch_columns(const llama_h2o_attention & a, cudaStream_t stream) {
    const dim3 grid(a.n_kv / N_CELLS, a.n_pairs());

    with_rows(a.k, a.n_embd_head_k, [&](auto rows, auto n) {
        launch(add_columns<decltype(rows), n()>, grid, N_TILE_THREADS, stream, a, a.scores, false);
        if (a.squares) {
            launch(add_columns<decltype(rows), n()>, grid, N_TILE_THREADS, stream, a, a.squares, true);
        }
    });
}

inline void launch_choose(const llama_h2o_device_choice & a, cudaStream_t stream) {
    const uint32_t n_warps = (a.n_cells + 4 * N_WARP - 1) / (4 * N_WARP); // some cells a thread

    launch(choose_rows, dim3(a.n_blocks), std::min(N_WARP * n_warps, MAX_CHOOSERS), stream, a);
}

inline void launch_turn(const llama_h2o_key_turns & a, cudaStream_t stream) {
    launch(turn_keys, dim3((a.n + N_WARPS - 1) / N_WARPS), N_THREADS, stream, a);
}

inline void launch_archive(const llama_h2o_archived_rows & a, cudaStream_t stream) {
    const uint32_t n_runs = (a.n_tokens + N_RUN - 1) / N_RUN + 1; // the first one may be less

    launch(archive_rows, dim3(n_runs, a.n_head_kv), N_THREADS, stream, a);
}

} // namespace
