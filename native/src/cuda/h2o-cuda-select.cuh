// The rows with the highest scores, of as many as there are in the archive.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "cuda/h2o-cuda-search.cuh"

namespace {

constexpr uint32_t N_SELECTORS = 512; // threads of a block

// bits of a score that are found at a time
constexpr uint32_t N_DIGIT_BITS = 11;
constexpr uint32_t N_COUNTS     = llama_h2o_device_text::N_COUNTS;
constexpr uint32_t N_BINS       = 32; // counts that are added up first

static_assert(N_COUNTS == 1u << N_DIGIT_BITS && SCORE_SHIFT == 32 - N_DIGIT_BITS);

// The largest digit that k numbers have or exceed; takes those that exceed it off k. Leaves 0 in k if all that have it are
// wanted. By all threads of a block.
__device__ inline uint32_t find_digit(const uint32_t * counts, uint32_t & k) {
    __shared__ uint32_t of_bins[N_COUNTS / N_BINS];

    __syncthreads();
    if (threadIdx.x < N_COUNTS / N_BINS) {
        uint32_t sum = 0;
        for (uint32_t i = 0; i < N_BINS; ++i) {
            sum += counts[threadIdx.x * N_BINS + i];
        }
        of_bins[threadIdx.x] = sum;
    }
    __syncthreads();

    uint32_t bin = N_COUNTS / N_BINS - 1;
    while (bin > 0 && of_bins[bin] < k) {
        k -= of_bins[bin--];
    }
    uint32_t digit = bin * N_BINS + N_BINS - 1;
    while (digit > bin * N_BINS && counts[digit] < k) {
        k -= counts[digit--];
    }
    if (counts[digit] <= k) {
        k = 0;
    }

    return digit;
}

// The score of the k-th best key; leaves in k how many of those with the same score are wanted, 0: all. Few bits are common to
// many keys but for the first ones, which look() has counted.
__device__ inline uint32_t find_score(const uint32_t * scores, uint32_t n, uint32_t * counts_of_look, uint32_t & k) {
    __shared__ uint32_t counts[N_COUNTS];

    for (uint32_t i = threadIdx.x; i < N_COUNTS; i += N_SELECTORS) {
        counts[i]         = counts_of_look[i];
        counts_of_look[i] = 0; // for the next layer
    }
    uint32_t res   = find_digit(counts, k) << SCORE_SHIFT;
    uint32_t known = SCORE_SHIFT; // bits behind those that are
    while (known > 0 && k > 0) {
        const uint32_t n_bits = known < N_DIGIT_BITS ? known : N_DIGIT_BITS;
        const uint32_t shift  = known - n_bits;

        __syncthreads();
        for (uint32_t i = threadIdx.x; i < N_COUNTS; i += N_SELECTORS) {
            counts[i] = 0;
        }
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < n; i += N_SELECTORS) {
            if ((scores[i] ^ res) >> known == 0) {
                atomicAdd(&counts[scores[i] >> shift & ((1u << n_bits) - 1)], 1u);
            }
        }
        res   |= find_digit(counts, k) << shift;
        known  = shift;
    }

    return res;
}

// Lists those that are better than the last one and the first k like it, in the order of rows. Returns how many.
__device__ inline uint32_t list_rows(const uint32_t * scores, uint32_t n, uint32_t last, uint32_t k, uint32_t * rows) {
    constexpr uint32_t N = N_SELECTORS / N_WARP;

    __shared__ uint32_t n_better[N];
    __shared__ uint32_t n_like[N];

    const uint32_t lane  = threadIdx.x % N_WARP;
    const uint32_t warp  = threadIdx.x / N_WARP;
    const uint32_t n_own = (n / N_WARP + N - 1) / N * N_WARP; // rows of a warp, one after the other
    const uint32_t end   = (warp + 1) * n_own < n ? (warp + 1) * n_own : n;

    const auto for_each = [&](auto fn) {
        for (uint32_t first = warp * n_own; first < end; first += N_WARP) {
            const uint32_t score = scores[first + lane];
            const bool is_better = score > last || (k == 0 && score == last && score > 0);

            const uint32_t better = __ballot_sync(0xffffffff, is_better);
            fn(first + lane, better, __ballot_sync(0xffffffff, k > 0 && score == last));
        }
    };

    uint32_t counts[2] = {};
    for_each([&](uint32_t, uint32_t better, uint32_t like) {
        counts[0] += __popc(better);
        counts[1] += __popc(like);
    });
    if (lane == 0) {
        n_better[warp] = counts[0];
        n_like[warp]   = counts[1];
    }
    __syncthreads();

    uint32_t before[2] = {};
    uint32_t all[2]    = {};
    for (uint32_t i = 0; i < N; ++i) {
        before[0] += i < warp ? n_better[i] : 0;
        before[1] += i < warp ? n_like[i] : 0;
        all[0]    += n_better[i];
        all[1]    += n_like[i];
    }
    const uint32_t earlier = (1u << lane) - 1;
    for_each([&](uint32_t row, uint32_t better, uint32_t like) {
        const uint32_t n_before = before[0] + __popc(better & earlier);
        const uint32_t n_equal  = before[1] + __popc(like & earlier);
        if (better >> lane & 1 || (like >> lane & 1 && n_equal < k)) {
            rows[n_before + min(n_equal, k)] = row;
        }
        before[0] += __popc(better);
        before[1] += __popc(like);
    });

    return all[0] + min(all[1], k);
}

// The rows that queries attend to: those in focus, then those that are found. grid [n_blocks], N_SELECTORS threads
__global__ void __launch_bounds__(N_SELECTORS)
        select_rows(const llama_h2o_attention a, const device_search s, const llama_h2o_cuda_search_space space) {
    ggml_cuda_pdl_sync();

    const asking_place own(a, space, blockIdx.x);
    const llama_h2o_device_text & text = s.texts[own.stream * s.stride];

    uint32_t * list        = found_list(a, space, own);
    const uint32_t focus   = in_focus(text, own.head_kv);
    const uint32_t n_focus = __popc(focus);
    if (threadIdx.x < 32 && (focus >> threadIdx.x & 1)) {
        list[1 + __popc(focus & ((1u << threadIdx.x) - 1))] = text.focus + threadIdx.x;
    }

    uint32_t n = 0;
    uint32_t k = n_to_find(a, text, own);
    if (k > 0) {
        const uint32_t n_rows   = text.n_pages * PAGE;
        const uint32_t * scores = scores_of(text, own);
        const uint32_t last     = find_score(scores, n_rows, counts_of(text, own), k);

        n = list_rows(scores, n_rows, last, k, list + 1 + n_focus);
    }
    if (threadIdx.x == 0) {
        list[0] = n_focus + n;
    }
}

} // namespace
