// Search of the archive on the device: as in h2o-search.h, but queries are rounded to bytes, which tensor cores multiply by the
// signs. The scores of all rows are stored, see h2o-cuda-select.cuh.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "cuda/h2o-cuda-mma.cuh"
#include "cuda/h2o-cuda-store.cuh"
#include "kernels/h2o-search.h"

namespace {

constexpr uint32_t PAGE       = LLAMA_H2O_PAGE;
constexpr uint32_t MAX_ASKING = llama_h2o_attention::BLOCK;

// The remaining leading bits of a score have N_COUNTS values.
constexpr uint32_t SCORE_SHIFT = 21;

// The queries of a KV head that search together, one such group per block, and the text that they search.
struct asking {
    const llama_h2o_attention & a;
    const llama_h2o_cuda_search_space & space;

    uint32_t index;
    uint32_t pair;
    uint32_t stream;
    uint32_t head_kv;
    uint32_t group;
    uint32_t row;   // first query of the KV head
    uint32_t first; // index among all queries
    uint32_t n;

    const llama_h2o_device_text & text;

    __device__ asking(const llama_h2o_attention & a,
            const llama_h2o_search & s,
            const llama_h2o_cuda_search_space & space,
            uint32_t index) :
        a(a), space(space), index(index), pair(index / space.n_groups), stream(pair / a.n_head_kv),
        head_kv(pair % a.n_head_kv), group(index % space.n_groups), row(group * space.n_asking),
        first(pair * a.n_rows() + row), n(a.n_rows() - row < space.n_asking ? a.n_rows() - row : space.n_asking),
        text(s.on_device[stream * s.device_stride]) {}

    // bit mask of hidden rows in focus
    __device__ uint32_t in_focus() const {
        if (text.n_pages == 0 || text.focus == llama_h2o_search_text::NO_FOCUS) {
            return 0;
        }
        const uint64_t * hidden = text.hidden + size_t(head_kv) * text.n_pages * (PAGE / 64);

        return uint32_t(hidden[text.focus / 64] >> text.focus % 64);
    }

    // number of rows to retrieve by their codes
    __device__ uint32_t n_to_find() const {
        if (text.n_pages == 0 || text.heads[head_kv].codes < 0) {
            return 0;
        }
        const uint64_t n_alone = uint64_t(n / a.n_group()) * text.heads[head_kv].n_alone;

        return n_alone < text.heads[head_kv].n_together ? uint32_t(n_alone) : text.heads[head_kv].n_together;
    }

    // The log-sum-exp of the logits of a query in the cells, in all threads of a warp.
    __device__ float cells_lse(uint32_t i) const {
        if (space.is_alongside) {
            const row_place place(a, head_kv, row + i);
            return a.lse[size_t(stream * a.n_head + place.head) * a.n_tokens + place.token];
        }
        const merged_sums sums = cells_sums(a, llama_h2o_cuda_workspace(a), pair, row + i);

        return sums.max + logf(sums.sum + sums.own);
    }

    // Index of the scores and counts. Only for heads that search.
    __device__ size_t scoring_place() const { return size_t(text.heads[head_kv].codes) * text.max_groups + group; }
    __device__ uint32_t * scores() const { return text.scores + scoring_place() * text.max_pages * PAGE; }
    __device__ uint32_t * counts() const { return text.counts + scoring_place() * text.N_COUNTS; }

    // Number and indices of the retrieved rows.
    __device__ uint32_t * list() const {
        return reinterpret_cast<uint32_t *>(a.work + space.rows) + size_t(index) * (1 + space.n_retrieved);
    }

    // [n_embd][n_stride] the queries, without Hadamard transform
    __device__ float * queries() const {
        return a.work + space.queries + size_t(index) * a.n_embd_head_k * space.n_stride;
    }

    // The result of a query and the share left to the cells, as in llama_h2o_kernel::alongside.
    __device__ float * output(uint32_t i) const {
        const row_place place(a, head_kv, row + i);
        float * out = space.is_alongside ? a.out : a.work + llama_h2o_cuda_workspace(a).retrieved;

        return out + (size_t(stream * a.n_tokens + place.token) * a.n_head + place.head) * (a.n_embd_head_v + 1);
    }
};

// The queries of a block in shared memory, prepared for the search. Rows after the last query are unused.
template <uint32_t N_WORDS>
struct searching {
    static constexpr uint32_t N_OF_LANE = N_WORDS / 4; // adjacent words per lane

    alignas(16) uint32_t words[MAX_ASKING][N_WORDS + 4]; // padded against bank conflicts
    alignas(16) float steps[MAX_ASKING][2]; // of a product: two steps, and the correction for its sum of bytes
    float lse[MAX_ASKING];
    float centres[N_WARPS][MAX_ASKING]; // products with the centres of some pages
    float mixed[N_WARPS][MAX_EMBD];     // a query per warp
    uint32_t counts[llama_h2o_device_text::N_COUNTS];
};

// Rounds the queries, one per warp. All blocks with the same queries store the same values.
template <uint32_t N_WORDS>
__device__ void ask(
        const llama_h2o_attention & a, const llama_h2o_search & s, const asking & own, searching<N_WORDS> & search) {
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t lane   = threadIdx.x % N_WARP;
    const uint32_t warp   = threadIdx.x / N_WARP;

    float * x = search.mixed[warp];
    for (uint32_t row = warp; row < (own.n + 7) / 8 * 8; row += N_WARPS) {
        uint32_t * words = search.words[row];
        if (row >= own.n) {
            for (uint32_t i = lane; i < N_WORDS; i += N_WARP) {
                words[i] = 0;
            }
            if (lane == 0) {
                search.steps[row][0] = search.steps[row][1] = 0.0f;
                search.lse[row]                             = INFINITY;
            }
            continue;
        }

        const row_place place(a, own.head_kv, own.row + row);
        const auto * q = reinterpret_cast<const float *>(at(a.q, own.stream, place.head, place.token));
        for (uint32_t i = lane; i < MAX_EMBD; i += N_WARP) {
            x[i] = i < n_embd ? q[i] : 0.0f;
        }
        __syncwarp();
        if (s.n_query_mix > 0) {
            mix_row(x, n_embd, s.n_query_mix);
        }
        for (uint32_t i = lane; i < n_embd; i += N_WARP) {
            own.queries()[i * own.space.n_stride + row] = x[i];
        }
        mix_row(x, n_embd, llama_h2o_code_layout { n_embd }.n_mix());

        float most = 0.0f;
        for (uint32_t i = lane; i < n_embd; i += N_WARP) {
            most = fmaxf(most, fabsf(x[i]));
        }
        most = warp_max(most);

        const float by = most > 0.0f ? 127.0f / most : 0.0f;
        float total    = 0.0f;
        for (uint32_t i = lane; i < N_WORDS; i += N_WARP) {
            uint32_t word = 0;
            for (uint32_t k = 0; k < 4; ++k) {
                const int byte  = __float2int_rn(x[4 * i + k] * by);
                word           |= uint32_t(byte & 255) << 8 * k;
                total          += float(byte);
            }
            words[i % 4 * (N_WORDS / 4) + i / 8 * 2 + i / 4 % 2] = word;
        }
        total = team_sum<N_WARP>(total);

        const float lse  = own.cells_lse(row);
        const float step = most / 127.0f * a.scale;
        if (lane == 0) {
            search.steps[row][0]                    = 2.0f * step;
            search.steps[row][1]                    = step * total;
            search.lse[row]                         = lse;
            a.work[own.space.lse + own.first + row] = lse;
        }
        __syncwarp();
    }
    __syncthreads();
}

// Products of queries with the centres of pages, one page per warp. Several threads share a product.
//   codes_of  (i): the codes of the page of warp i
template <uint32_t N_WORDS, typename F>
__device__ void multiply_centres(const llama_h2o_attention & a,
        const float * queries,
        uint32_t n_stride,
        uint32_t n_rows,
        F codes_of,
        searching<N_WORDS> & search) {
    const uint32_t n_embd = a.n_embd_head_k;
    const size_t centre   = llama_h2o_code_layout { n_embd }.centre();

    uint32_t n_each = N_WARP;
    while (n_each > 1 && n_each * n_rows > N_THREADS / N_WARPS) {
        n_each /= 2;
    }
    for (uint32_t first = 0; first < N_WARPS * n_rows; first += N_THREADS / n_each) {
        const uint32_t i    = first + threadIdx.x / n_each;
        const uint32_t row  = i % n_rows;
        const uint32_t warp = i / n_rows < N_WARPS ? i / n_rows : 0;
        const auto * x      = reinterpret_cast<const uint16_t *>(codes_of(warp) + centre);

        float sum = 0.0f;
        for (uint32_t e = threadIdx.x % n_each; e < n_embd; e += n_each) {
            sum += queries[e * n_stride + row] * to_float(x[e]);
        }
        for (uint32_t offset = n_each / 2; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffff, sum, offset);
        }
        if (threadIdx.x % n_each == 0 && i < N_WARPS * n_rows) {
            search.centres[warp][row] = sum * a.scale;
        }
    }
    __syncthreads();
}

// Four bits as four bytes.
__device__ inline uint32_t spread(uint32_t bits) {
    return bits * 0x00204081 & 0x01010101;
}

__device__ inline uint32_t byte_of(const uint2 & x, uint32_t i) {
    return (i < 4 ? x.x : x.y) >> (i % 4 * 8) & 255;
}

// The largest estimate over all queries for 16 keys: eight from 8*i on, for lanes 4*i + t, and the eight half a page after them.
// Each lane gets four results: of the first eight keys if t < 2, otherwise of the others; the first four of them if t is even.
template <uint32_t N_WORDS>
__device__ void find_tops(const searching<N_WORDS> & search,
        const float * centres,
        uint32_t n_rows,
        const llama_h2o_code_layout & layout,
        const char * codes,
        float cap,
        float (&res)[4]) {
    constexpr uint32_t N_DEEP_STEPS = N_WORDS / 8; // of 32 elements

    const uint32_t i = threadIdx.x % N_WARP / 4;
    const uint32_t t = threadIdx.x % 4;

    uint2 signs[N_DEEP_STEPS][2];
    uint4 scales[2];
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
        for (uint32_t step = 0; step < N_DEEP_STEPS; ++step) {
            const uint32_t g = step * 8 + k * 4 + t;

            signs[step][k] =
                    g < layout.n_groups() ? reinterpret_cast<const uint2 *>(codes + g * (PAGE / 2))[i] : uint2 {};
        }
        scales[k] = reinterpret_cast<const uint4 *>(codes + layout.scales())[k * (PAGE / 16) + i];
    }

#pragma unroll
    for (uint32_t key = 0; key < 8; ++key) {
        uint32_t a[N_DEEP_STEPS][4];
        float factors[2];
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k) {
#pragma unroll
            for (uint32_t step = 0; step < N_DEEP_STEPS; ++step) {
                const uint32_t byte = byte_of(signs[step][k], key);

                a[step][2 * k]     = spread(byte & 15);
                a[step][2 * k + 1] = spread(byte >> 4);
            }
            const uint32_t words[4] = { scales[k].x, scales[k].y, scales[k].z, scales[k].w };
            factors[k]              = to_float(uint16_t(words[key / 2] >> (key % 2 * 16)));
        }

        float tops[2] = { MINUS_INF, MINUS_INF };
        for (uint32_t row = 0; row < n_rows; row += 8) {
            const auto * words = reinterpret_cast<const uint4 *>(search.words[row + i] + t * search.N_OF_LANE);

            int products[4] = {};
#pragma unroll
            for (uint32_t step = 0; step < N_DEEP_STEPS; step += 2) {
                const uint4 four = words[step / 2];
                multiply_add(products, a[step], uint2 { four.x, four.y });
                multiply_add(products, a[step + 1], uint2 { four.z, four.w });
            }
#pragma unroll
            for (uint32_t k = 0; k < 4; ++k) {
                const uint32_t own = row + 2 * t + k % 2;

                float logit = factors[k / 2] * (search.steps[own][0] * float(products[k]) - search.steps[own][1]) +
                              centres[own];
                if (cap > 0.0f) {
                    logit = cap * tanhf(logit / cap);
                }
                tops[k / 2] = fmaxf(tops[k / 2], logit - search.lse[own]);
            }
        }
#pragma unroll
        for (uint32_t k = 0; k < 2; ++k) {
            tops[k] = fmaxf(tops[k], __shfl_xor_sync(0xffffffff, tops[k], 1));
            tops[k] = fmaxf(tops[k], __shfl_xor_sync(0xffffffff, tops[k], 2));
        }
        if (t % 2 == key / 4) {
            res[key % 4] = t < 2 ? tops[0] : tops[1];
        }
    }
}

// Maps scores to integers with the same order; 0: not wanted.
__device__ inline uint32_t ordered_score(float score, bool wanted) {
    const uint32_t bits = __float_as_uint(score);

    return !(wanted && score > MINUS_INF) ? 0 : bits & 0x80000000 ? ~bits : bits | 0x80000000;
}

// Scores a part of the pages, one warp per page. grid [n_parts, n_blocks], N_THREADS threads
template <uint32_t N_WORDS>
__global__ void __launch_bounds__(N_THREADS, 2)
        search_parts(const llama_h2o_attention a, const llama_h2o_search s, const llama_h2o_cuda_search_space space) {
    __shared__ searching<N_WORDS> work;

    ggml_cuda_pdl_sync();

    const asking own(a, s, space, blockIdx.y);
    const llama_h2o_device_text & text = own.text;

    const bool searches = own.n_to_find() > 0;
    const bool attends  = searches || own.in_focus() > 0;
    const uint32_t size = text.n_pages;
    const uint32_t end  = uint32_t(uint64_t(blockIdx.x + 1) * size / gridDim.x);
    uint32_t page       = uint32_t(uint64_t(blockIdx.x) * size / gridDim.x);
    if (!attends || (blockIdx.x > 0 && (!searches || page >= end))) {
        return; // the first block has stored the queries for the next kernels
    }
    ask(a, s, own, work);
    if (!searches) {
        return;
    }

    const uint32_t warp = threadIdx.x / N_WARP;
    const llama_h2o_code_layout layout { a.n_embd_head_k };

    const auto * hidden    = text.hidden + size_t(own.head_kv) * size * (PAGE / 64);
    const char * codes     = text.codes + size_t(text.heads[own.head_kv].codes) * text.max_pages * layout.size();
    const float * queries  = own.queries();
    const uint32_t n_rows  = (own.n + 7) / 8 * 8;
    const uint32_t first   = threadIdx.x % N_WARP / 4 * 8 + threadIdx.x % 4 / 2 * (PAGE / 2) + threadIdx.x % 2 * 4;
    const uint32_t passage = text.focus / LLAMA_H2O_PASSAGE; // all heads attend to it anyway

    for (uint32_t i = threadIdx.x; i < llama_h2o_device_text::N_COUNTS; i += N_THREADS) {
        work.counts[i] = 0;
    }
    for (uint32_t i = threadIdx.x; i < N_WARPS * MAX_ASKING; i += N_THREADS) {
        work.centres[i / MAX_ASKING][i % MAX_ASKING] = 0.0f;
    }
    for (; page < end; page += N_WARPS) {
        const auto codes_of = [&](uint32_t i) {
            return codes + (text.first_slot + (page + i < end ? page + i : page)) % text.max_pages * layout.size();
        };
        __syncthreads();
        multiply_centres(a, queries, space.n_stride, own.n, codes_of, work);
        if (page + warp >= end) {
            continue;
        }

        const uint32_t row = (page + warp) * PAGE + first;
        float scores[4];
        find_tops(work, work.centres[warp], n_rows, layout, codes_of(warp), s.cap, scores);

        const bool is_read    = text.focus != llama_h2o_search_text::NO_FOCUS && row / LLAMA_H2O_PASSAGE == passage;
        const uint32_t wanted = is_read ? 0 : uint32_t(hidden[row / 64] >> row % 64);
        uint32_t ordered[4];
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
            ordered[k] = ordered_score(scores[k], wanted >> k & 1);
            if (ordered[k] > 0) {
                atomicAdd(&work.counts[ordered[k] >> SCORE_SHIFT], 1u);
            }
        }
        *reinterpret_cast<uint4 *>(own.scores() + row) = { ordered[0], ordered[1], ordered[2], ordered[3] };
    }

    __syncthreads();
    for (uint32_t i = threadIdx.x; i < llama_h2o_device_text::N_COUNTS; i += N_THREADS) {
        if (work.counts[i] > 0) {
            atomicAdd(own.counts() + i, work.counts[i]);
        }
    }
}

} // namespace
