// The best of many candidates, in passing, by all threads of a block.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "cuda/h2o-cuda-kth.cuh"
#include "kernels/h2o-search.h"

namespace {

// A row and how much it is looked at, in this order. Of equal ones the first is more.
using candidate = unsigned long long;

__device__ inline candidate make_candidate(float score, uint32_t row) {
    const uint32_t bits    = __float_as_uint(score);
    const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;

    return candidate(ordered) << 32 | uint32_t(~row);
}

__device__ inline uint32_t row_of(candidate x) {
    return ~uint32_t(x);
}

// In shared memory. All threads of the block call its functions together; those that add come in the order of rows.
struct best_candidates {
    static constexpr uint32_t ROOM = 2 * llama_h2o_cuda_search_space::MAX_FIND;

    candidate list[ROOM];
    uint32_t n_of_warps[N_WARPS];
    candidate least; // one has to be more than this to be among the best

    // The threads before this one that have something, and in `n` how many there are in all.
    __device__ uint32_t place_of(bool has, uint32_t & n) {
        const uint32_t lane = threadIdx.x % N_WARP;
        const uint32_t warp = threadIdx.x / N_WARP;
        const uint32_t bits = __ballot_sync(0xffffffff, has);

        __syncthreads();
        if (lane == 0) {
            n_of_warps[warp] = __popc(bits);
        }
        __syncthreads();

        uint32_t place = __popc(bits & ((1u << lane) - 1));
        n              = 0;
        for (uint32_t i = 0; i < N_WARPS; ++i) {
            place += i < warp ? n_of_warps[i] : 0;
            n     += n_of_warps[i];
        }

        return place;
    }

    __device__ void start() {
        if (threadIdx.x == 0) {
            least = make_candidate(MINUS_INF, 0);
        }
        __syncthreads();
    }

    // Adds those of the threads to n of them that are more than the least; n_find are kept of many.
    __device__ void add(candidate x, uint32_t & n, uint32_t n_find) {
        if (n + N_THREADS > ROOM) {
            keep_best(n, n_find);
        }

        uint32_t n_new;
        const bool has       = x > least;
        const uint32_t place = place_of(has, n_new);
        if (has) {
            list[n + place] = x;
        }
        n += n_new;
    }

    // Leaves the n_find best of n.
    __device__ void keep_best(uint32_t & n, uint32_t n_find) {
        __syncthreads();
        if (n <= n_find) {
            return;
        }

        uint32_t k            = n_find;
        const candidate worst = find_last<candidate>(n, k, [&](uint32_t i, candidate & x) {
            x = list[i];
            return true;
        });

        uint32_t n_kept = 0;
        for (uint32_t first = 0; first < n; first += N_THREADS) {
            const uint32_t i  = first + threadIdx.x;
            const candidate x = i < n ? list[i] : 0;

            uint32_t n_more;
            const uint32_t place = place_of(x >= worst, n_more);
            if (x >= worst) {
                list[n_kept + place] = x;
            }
            n_kept += n_more;
        }
        n = n_kept;
        if (threadIdx.x == 0) {
            least = worst;
        }
        __syncthreads();
    }
};

} // namespace
