// Launching the kernels, each with its grid.

#pragma once

#include "cuda/h2o-cuda-archive.cuh"
#include "cuda/h2o-cuda-choose.cuh"
#include "cuda/h2o-cuda-prompt.cuh"
#include "cuda/h2o-cuda-retrieved.cuh"
#include "cuda/h2o-cuda-select.cuh"

#include <algorithm>

namespace {

template <typename... T>
void launch(void (*kernel)(T...), dim3 grid, uint32_t n_threads, cudaStream_t stream, const T &... arguments) {
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(grid, dim3(n_threads), 0, stream), arguments...);
}

// Calls fn(n) with the number of rows of a block as a constant.
template <typename F>
void with_few_rows(uint32_t n_rows, F fn) {
    if (n_rows <= 1) {
        fn(std::integral_constant<uint32_t, 1>());
    } else if (n_rows <= 2) {
        fn(std::integral_constant<uint32_t, 2>());
    } else if (n_rows <= 4) {
        fn(std::integral_constant<uint32_t, 4>());
    } else {
        fn(std::integral_constant<uint32_t, llama_h2o_cuda_workspace::MAX_ROWS>());
    }
}

// Limits the slots to the blocks that this device runs at once: one more block would double the time.
inline llama_h2o_attention on_this_device(llama_h2o_attention a) {
    with_few_rows(a.n_rows(), [&](auto n) {
        const uint32_t n_multiprocessors = ggml_cuda_info().devices[ggml_cuda_get_device()].nsm;

        a.n_slots = std::min(a.n_slots, n_multiprocessors * N_RESIDENT<n()>);
    });

    return a;
}

inline void launch_attend(const llama_h2o_attention & from, cudaStream_t stream) {
    const llama_h2o_attention a = on_this_device(from);
    const llama_h2o_cuda_workspace work(a);
    const dim3 grid(work.n_parts, a.n_pairs() * work.n_groups);

    row_types::with(a.k.type, [&](auto rows) {
        with_few_rows(a.n_rows(),
                [&](auto n) { launch(attend_part<decltype(rows), n()>, grid, N_THREADS, stream, a, work); });
    });
}

// Searches the archive and attends to the retrieved rows, for few queries after ATTEND, or alone.
inline void launch_search(const llama_h2o_attention & from, bool is_alongside, cudaStream_t stream) {
    const llama_h2o_attention a = is_alongside ? from : on_this_device(from);
    const llama_h2o_search search(*a.search);
    const llama_h2o_cuda_search_space space(a, is_alongside);

    using kernel_t = void (*)(llama_h2o_attention, llama_h2o_search, llama_h2o_cuda_search_space);

    const auto with = [&](kernel_t kernel, dim3 grid, uint32_t n_threads) {
        launch(kernel, grid, n_threads, stream, a, *a.search, space);
    };
    const auto of_size = [&](auto kernels) -> kernel_t {
        return space.n_asking <= N_RETRIEVED_WARPS       ? kernels[0]
               : space.n_asking <= 4 * N_RETRIEVED_WARPS ? kernels[1]
                                                         : kernels[2];
    };
    constexpr uint32_t N_MANY = MAX_ASKING / N_RETRIEVED_WARPS;

    const kernel_t attend_short[] = { attend_retrieved<1, 1>, attend_retrieved<4, 1>, attend_retrieved<N_MANY, 1> };
    const kernel_t attend_long[]  = { attend_retrieved<1, 2>, attend_retrieved<4, 2>, attend_retrieved<N_MANY, 2> };

    with(a.n_embd_head_k <= 64       ? search_parts<16>
            : a.n_embd_head_k <= 128 ? search_parts<32>
                                     : search_parts<64>,
            dim3(space.n_parts, space.n_blocks), N_THREADS);
    with(select_rows, dim3(space.n_blocks), N_SELECTORS);
    with(of_size(std::max(a.n_embd_head_k, a.n_embd_head_v) <= N_V_AT_ONCE ? attend_short : attend_long),
            dim3(space.n_splits, space.n_blocks), N_RETRIEVED_THREADS);
    with(combine_retrieved,
            dim3((space.n_retrieved + N_RETRIEVED_THREADS - 1) / N_RETRIEVED_THREADS + space.n_asking, space.n_blocks),
            N_RETRIEVED_THREADS);
}

inline void launch_combine(const llama_h2o_attention & from, cudaStream_t stream) {
    const llama_h2o_attention a = on_this_device(from);
    const dim3 grid((a.n_kv + N_THREADS - 1) / N_THREADS + a.n_rows(), a.n_pairs());

    launch(combine_parts, grid, N_THREADS, stream, a, llama_h2o_cuda_workspace(a));
}

inline void launch_add(const llama_h2o_sum & a, cudaStream_t stream) {
    const dim3 grid((a.n_kv + N_WARP - 1) / N_WARP, a.n_pairs());

    launch(add_probs, grid, N_WARP * n_adders(a), stream, a);
}

// Calls fn(rows, n) with an object of the struct for this type and a constant n >= n_embd.
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
    const uint32_t n_warps = (a.n_cells + 4 * N_WARP - 1) / (4 * N_WARP); // 4 cells per thread

    launch(choose_rows, dim3(a.n_heads), std::min(N_WARP * n_warps, MAX_CHOOSERS), stream, a);
}

inline void launch_rotate(const llama_h2o_key_rotations & a, cudaStream_t stream) {
    launch(rotate_keys, dim3((a.n + N_WARPS - 1) / N_WARPS), N_THREADS, stream, a);
}

inline void launch_archive(const llama_h2o_archived_rows & a, cudaStream_t stream) {
    const uint32_t n_runs = (a.n_tokens + N_RUN - 1) / N_RUN + 1; // the first one may be incomplete

    launch(archive_rows, dim3(n_runs, a.n_head_kv), N_THREADS, stream, a);
}

} // namespace
