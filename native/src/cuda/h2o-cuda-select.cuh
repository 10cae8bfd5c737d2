// Selects the rows with the highest scores among all rows of the archive.

#pragma once

#include "cuda/h2o-cuda-kth.cuh"
#include "cuda/h2o-cuda-search.cuh"

namespace {

constexpr uint32_t N_SELECTORS = 512; // threads of a block

static_assert(N_COUNTS == llama_h2o_device_text::N_COUNTS && SCORE_SHIFT == 32 - N_DIGIT_BITS);

// Lists the rows with scores above `last`, and the first k with this score, in row order. Returns their number.
__device__ inline uint32_t list_rows(const uint32_t * scores, uint32_t n, uint32_t last, uint32_t k, uint32_t * rows) {
    constexpr uint32_t N = N_SELECTORS / N_WARP;

    __shared__ uint32_t n_better[N];
    __shared__ uint32_t n_like[N];

    const uint32_t lane  = threadIdx.x % N_WARP;
    const uint32_t warp  = threadIdx.x / N_WARP;
    const uint32_t n_own = (n / N_WARP + N - 1) / N * N_WARP; // consecutive rows per warp
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

// Lists the retrieved rows: those in focus, then those with the highest scores. grid [n_blocks], N_SELECTORS threads
__global__ void __launch_bounds__(N_SELECTORS)
        select_rows(const llama_h2o_attention a, const llama_h2o_search s, const llama_h2o_cuda_search_space space) {
    ggml_cuda_pdl_sync();

    const asking own(a, s, space, blockIdx.x);
    const llama_h2o_device_text & text = own.text;

    uint32_t * list        = own.list();
    const uint32_t focus   = own.in_focus();
    const uint32_t n_focus = __popc(focus);
    if (threadIdx.x < 32 && (focus >> threadIdx.x & 1)) {
        list[1 + __popc(focus & ((1u << threadIdx.x) - 1))] = text.focus + threadIdx.x;
    }

    uint32_t n = 0;
    uint32_t k = own.n_to_find();
    if (k > 0) {
        const uint32_t n_rows   = text.n_pages * PAGE;
        const uint32_t * scores = own.scores();
        // only the leading bits are common to many scores, and search_parts() has counted these
        const auto get = [&](uint32_t i, uint32_t & score) {
            score = scores[i];
            return true;
        };
        const auto last = find_last<uint32_t>(n_rows, k, get, own.counts());

        n = list_rows(scores, n_rows, last, k, list + 1 + n_focus);
    }
    if (threadIdx.x == 0) {
        list[0] = n_focus + n;
    }
}

} // namespace
