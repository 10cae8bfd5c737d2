// Attention of a few queries over the rows of the cache, and the update of their scores, on the device.
//
// The cells are split into as many parts as blocks can run at once. In attend_part() each warp of a block reads K and V of its
// cells once for all query heads of a KV group, with an online softmax, and stores the logits. Then the warps merge their
// results. combine_parts() merges the parts, computes the probabilities from the logits and adds them to the scores.

#pragma once

#include "cuda/h2o-cuda-rows.cuh"
#include "cuda/h2o-cuda.h"

#include "ggml-cuda/common.cuh"

#include <cmath>

namespace {

constexpr uint32_t N_THREADS = 128;
constexpr uint32_t N_WARP    = 32;
constexpr uint32_t N_WARPS   = N_THREADS / N_WARP;
constexpr uint32_t N_LANES   = 8; // threads that read a row of K together
constexpr uint32_t MAX_EMBD  = LLAMA_H2O_CUDA_MAX_EMBD;

constexpr float MINUS_INF = -INFINITY;

//
// addresses
//

// the queries of a KV head, by token, then by head of the group
struct row_place {
    uint32_t token;
    uint32_t head;

    __device__ row_place(const llama_h2o_attention & a, uint32_t head_kv, uint32_t row) :
        token(row / a.n_group()), head(head_kv * a.n_group() + row % a.n_group()) {}
};

// The logit of the attention sink of a query; -inf without sinks.
__device__ inline float sink_of(const llama_h2o_attention & a, uint32_t head_kv, uint32_t row) {
    return a.sinks ? a.sinks[row_place(a, head_kv, row).head] : MINUS_INF;
}

const __device__ inline char * at(
        const llama_h2o_attention::operand & x, uint32_t stream, uint32_t head, uint32_t row) {
    return x.data + stream * x.nb_stream + head * x.nb_head + row * x.nb_row;
}

__device__ inline float * of_head(const llama_h2o_attention & a, float * collected, uint32_t stream, uint32_t head_kv) {
    return reinterpret_cast<float *>(
            reinterpret_cast<char *>(collected) + stream * a.nb_score_stream + head_kv * a.nb_score_head);
}

//
// sums and maxima over threads
//

__device__ inline float warp_max(float x) {
    for (uint32_t offset = N_WARP / 2; offset > 0; offset /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, offset));
    }
    return x;
}

template <uint32_t N>
__device__ float team_sum(float x) {
    for (uint32_t offset = N / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(0xffffffff, x, offset);
    }
    return x;
}

// exp(x - max), also if all cells are masked or logits are NaN
__device__ inline float exp_from(float x, float max) {
    return expf(max == MINUS_INF ? x : x - max);
}

//
// an online softmax
//

// The state of the online softmax for the queries of a warp. Maxima are equal in all threads. Each thread has the sums over its
// own keys, and N elements of each result.
template <uint32_t N_ROWS, uint32_t N>
struct online_softmax {
    float maxima[N_ROWS];
    float sums[N_ROWS];
    float results[N_ROWS][N];

    __device__ online_softmax() {
#pragma unroll
        for (uint32_t row = 0; row < N_ROWS; ++row) {
            maxima[row] = MINUS_INF;
            sums[row]   = 0.0f;
#pragma unroll
            for (uint32_t e = 0; e < N; ++e) {
                results[row][e] = 0.0f;
            }
        }
    }

    // Adds a key of this thread by its logit and returns its weight.
    __device__ float add_key(uint32_t row, float logit) {
        const float max    = fmaxf(maxima[row], warp_max(logit));
        const float by     = exp_from(maxima[row], max);
        const float weight = exp_from(logit, max);

        maxima[row] = max;
        sums[row]   = sums[row] * by + weight;
#pragma unroll
        for (uint32_t e = 0; e < N; ++e) {
            results[row][e] *= by;
        }

        return weight;
    }
};

// The largest logit of a query and the sum of exp(logit - maximum), merged from all parts and one additional logit. All threads
// of a warp have the result.
struct merged_sums {
    float max = MINUS_INF;
    float sum = 0.0f; // of the parts
    float own;        // of the additional logit

    __device__ merged_sums(const float * maxima, const float * sums, uint32_t n_parts, uint32_t stride, float logit) {
        for (uint32_t part = threadIdx.x % N_WARP; part < n_parts; part += N_WARP) {
            const float of_part = maxima[part * stride];
            const float larger  = fmaxf(max, of_part);

            sum = sum * exp_from(max, larger) + sums[part * stride] * exp_from(of_part, larger);
            max = larger;
        }
        const float of_thread = max;

        max = fmaxf(warp_max(max), logit);
        sum = team_sum<N_WARP>(sum * exp_from(of_thread, max));
        own = exp_from(logit, max);
    }
};

//
// a part of the cells
//

// Blocks per multiprocessor, limited by the registers for R rows.
template <uint32_t R>
constexpr uint32_t N_RESIDENT = R <= 2   ? 4
                                : R <= 4 ? 3
                                         : 2;

// Computes the logits of a warp's cells, without the mask.
//   keys     of N_WARP cells
//   queries  [R][MAX_EMBD]
template <typename ROWS, uint32_t R>
__device__ void multiply_rows(
        const llama_h2o_attention & a, const char * keys, const float * queries, float (*logits)[N_WARP]) {
    // several keys are loaded at once, limited by the registers, because each shuffle waits for its key
    constexpr uint32_t N_KEYS  = R == 1 ? 8 : 4;
    constexpr uint32_t N_TEAMS = N_WARP / N_LANES;

    const uint32_t lane = threadIdx.x % N_LANES;
    const uint32_t team = threadIdx.x % N_WARP / N_LANES;

    for (uint32_t first = team; first < N_WARP; first += N_TEAMS * N_KEYS) {
        float dots[N_KEYS][R] = {};
#pragma unroll 2
        for (uint32_t i = lane * N_ELEMENTS; i < a.n_embd_head_k; i += N_LANES * N_ELEMENTS) {
            float x[N_KEYS][N_ELEMENTS];
#pragma unroll
            for (uint32_t key = 0; key < N_KEYS; ++key) {
                ROWS::load(keys + (first + key * N_TEAMS) * a.k.nb_row, i, x[key]);
            }
#pragma unroll
            for (uint32_t row = 0; row < R; ++row) {
#pragma unroll
                for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                    const float query = queries[row * MAX_EMBD + i + e];
#pragma unroll
                    for (uint32_t key = 0; key < N_KEYS; ++key) {
                        dots[key][row] += x[key][e] * query;
                    }
                }
            }
        }

#pragma unroll
        for (uint32_t key = 0; key < N_KEYS; ++key) {
#pragma unroll
            for (uint32_t row = 0; row < R; ++row) {
                const float logit = team_sum<N_LANES>(dots[key][row]);
                if (lane == row % N_LANES) {
                    logits[row][first + key * N_TEAMS] = logit;
                }
            }
        }
    }
    __syncwarp();
}

// Threads of a warp that read a row of V together, N_ELEMENTS each.
struct value_team {
    uint32_t n_lanes;
    uint32_t n_teams;
    uint32_t lane;
    uint32_t index; // n_teams: idle

    __device__ explicit value_team(const llama_h2o_attention & a) :
        n_lanes(a.n_embd_head_v / N_ELEMENTS), n_teams(N_WARP / n_lanes), lane(threadIdx.x % N_WARP % n_lanes),
        index(threadIdx.x % N_WARP / n_lanes) {}
};

// Adds the values of a warp's cells, weighted.
template <typename ROWS, uint32_t R>
__device__ void add_rows(const llama_h2o_attention & a,
        const value_team & team,
        const char * values,
        const float (*weights)[N_WARP],
        float (&results)[R][N_ELEMENTS]) {
    // a fixed count, so that the compiler can load several cells at once
    const int n_cells = team.index < team.n_teams ? (N_WARP - team.index + team.n_teams - 1) / team.n_teams : 0;
#pragma unroll 8
    for (int i = 0; i < n_cells; ++i) {
        const uint32_t cell = team.index + i * team.n_teams;

        float x[N_ELEMENTS];
        ROWS::load(values + cell * a.v.nb_row, team.lane * N_ELEMENTS, x);
#pragma unroll
        for (uint32_t row = 0; row < R; ++row) {
            const float weight = weights[row][cell];
#pragma unroll
            for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                results[row][e] += weight * x[e];
            }
        }
    }
}

// grid [n_parts, n_pairs*n_groups], N_THREADS threads. R: maximum queries of a group
template <typename ROWS, uint32_t R>
__global__ void __launch_bounds__(N_THREADS, N_RESIDENT<R>)
        attend_part(const llama_h2o_attention a, const llama_h2o_cuda_workspace work) {
    constexpr uint32_t N_MERGED = R < 4 ? R : 4; // results that are merged at once

    // the queries, then the results of the teams
    alignas(16) __shared__ float scratch[N_THREADS * N_ELEMENTS * N_MERGED];
    static_assert(R * MAX_EMBD <= N_THREADS * N_ELEMENTS * N_MERGED);

    __shared__ float weights[N_WARPS][R][N_WARP]; // logits before
    __shared__ float maxima[N_WARPS][R];
    __shared__ float sums[N_WARPS][R];
    __shared__ float tops[R]; // of all warps

    const uint32_t pair    = blockIdx.y / work.n_groups;
    const uint32_t stream  = pair / a.n_head_kv;
    const uint32_t head_kv = pair % a.n_head_kv;
    const uint32_t lane    = threadIdx.x % N_WARP;
    const uint32_t warp    = threadIdx.x / N_WARP;
    const uint32_t n_heads = a.n_group();

    const uint32_t own_row  = R < work.MAX_ROWS ? 0 : blockIdx.y % work.n_groups * R; // first query of the KV head
    const uint32_t own_rows = pair * a.n_rows() + own_row;                            // of all
    const uint32_t n_rows   = a.n_rows() - own_row < R ? a.n_rows() - own_row : R;

    ggml_cuda_pdl_sync(); // the previous kernel may still be running

    for (uint32_t row = 0; row < R; ++row) {
        const row_place place(a, head_kv, own_row + (row < n_rows ? row : 0));
        const auto * q = reinterpret_cast<const float *>(at(a.q, stream, place.head, place.token));
        for (uint32_t i = threadIdx.x; i < a.n_embd_head_k; i += N_THREADS) {
            scratch[row * MAX_EMBD + i] = q[i] * a.scale;
        }
    }
    __syncthreads();

    const value_team team(a);
    online_softmax<R, N_ELEMENTS> shares;

    for (uint32_t cell = (blockIdx.x * N_WARPS + warp) * N_WARP; cell < a.n_kv; cell += gridDim.x * N_THREADS) {
        const char * mask = at(a.mask, stream, 0, own_row / n_heads) + (cell + lane) * sizeof(uint16_t);
        float * logits    = a.work + work.logits + size_t(own_rows) * a.n_kv + cell + lane;

        float masked = to_float(*reinterpret_cast<const uint16_t *>(mask));
        multiply_rows<ROWS, R>(a, at(a.k, stream, head_kv, cell), scratch, weights[warp]);

        uint32_t n_left = n_heads - own_row % n_heads; // queries of a token
#pragma unroll
        for (uint32_t row = 0; row < R; ++row) {
            if (n_left == 0 && row < n_rows) {
                mask   += a.mask.nb_row;
                masked  = to_float(*reinterpret_cast<const uint16_t *>(mask));
                n_left  = n_heads;
            }
            --n_left;

            // also if the logit of a masked row is NaN
            const float logit = masked == MINUS_INF ? MINUS_INF : weights[warp][row][lane] + masked;
            if (row < n_rows) {
                *logits  = logit;
                logits  += a.n_kv;
            }
            weights[warp][row][lane] = shares.add_key(row, logit);
        }
        __syncwarp();
        add_rows<ROWS, R>(a, team, at(a.v, stream, head_kv, cell), weights[warp], shares.results);
        __syncwarp();
    }
    ggml_cuda_pdl_lc();

#pragma unroll
    for (uint32_t row = 0; row < R; ++row) {
        const float sum = team_sum<N_WARP>(shares.sums[row]);
        if (lane == 0) {
            maxima[warp][row] = shares.maxima[row];
            sums[warp][row]   = sum;
        }
    }
    __syncthreads();

    for (uint32_t row = warp; row < n_rows; row += N_WARPS) {
        const merged_sums merged(maxima[0] + row, sums[0] + row, N_WARPS, R, MINUS_INF);
        if (lane == 0) {
            const size_t place = work.place(own_rows + row, blockIdx.x);

            a.work[work.maxima + place] = tops[row] = merged.max;
            a.work[work.sums + place]               = merged.sum;
        }
    }
    __syncthreads();

    const uint32_t n_embd = a.n_embd_head_v;
#pragma unroll
    for (uint32_t first = 0; first < R; first += N_MERGED) {
        if (team.index < team.n_teams) {
            float * of_team = scratch + (warp * team.n_teams + team.index) * N_MERGED * n_embd;
#pragma unroll
            for (uint32_t row = 0; row < N_MERGED; ++row) {
                const float by = exp_from(maxima[warp][first + row], tops[first + row]);
#pragma unroll
                for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                    of_team[row * n_embd + team.lane * N_ELEMENTS + e] = shares.results[first + row][e] * by;
                }
            }
        }
        __syncthreads();

        for (uint32_t i = threadIdx.x; i < N_MERGED * n_embd && first + i / n_embd < n_rows; i += N_THREADS) {
            float sum = 0.0f;
            for (uint32_t j = 0; j < N_WARPS * team.n_teams; ++j) {
                sum += scratch[j * N_MERGED * n_embd + i];
            }
            const size_t place = work.place(own_rows + first + i / n_embd, blockIdx.x);

            a.work[work.shares + place * n_embd + i % n_embd] = sum;
        }
        __syncthreads();
    }
}

//
// merging parts
//

// Merges the logits of a query, including its sink.
__device__ inline merged_sums cells_sums(
        const llama_h2o_attention & a, const llama_h2o_cuda_workspace & work, uint32_t pair, uint32_t row) {
    const size_t first = work.place(pair * a.n_rows() + row, 0);

    return { a.work + work.maxima + first, a.work + work.sums + first, work.n_parts, 1,
        sink_of(a, pair % a.n_head_kv, row) };
}

// The contribution of retrieved rows to a query's result, and the share left to the cells, as in llama_h2o_kernel::alongside.
const __device__ inline float * retrieved_result(
        const llama_h2o_attention & a, const llama_h2o_cuda_workspace & work, uint32_t pair, uint32_t row) {
    const row_place place(a, pair % a.n_head_kv, row);

    return a.work + work.retrieved +
           (size_t(pair / a.n_head_kv * a.n_tokens + place.token) * a.n_head + place.head) * (a.n_embd_head_v + 1);
}

// grid [n_kv/N_THREADS + n_rows, n_pairs], N_THREADS threads: the first blocks of a pair update the scores, each other
// block computes a row of the result
__global__ void combine_parts(const llama_h2o_attention a, const llama_h2o_cuda_workspace work) {
    __shared__ float maxima[llama_h2o_attention::MAX_FEW_ROWS];
    __shared__ float scales[llama_h2o_attention::MAX_FEW_ROWS]; // 1 / sum of the exponentials
    __shared__ float of_warps[N_WARPS * MAX_EMBD];

    const uint32_t pair    = blockIdx.y;
    const uint32_t stream  = pair / a.n_head_kv;
    const uint32_t head_kv = pair % a.n_head_kv;
    const uint32_t n_rows  = a.n_rows();

    const uint32_t lane = threadIdx.x % N_WARP;
    const uint32_t warp = threadIdx.x / N_WARP;

    const bool is_row       = blockIdx.x + n_rows >= gridDim.x;
    const uint32_t own_row  = is_row ? blockIdx.x + n_rows - gridDim.x : 0;
    const uint32_t end_rows = is_row ? own_row + 1 : n_rows;

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    for (uint32_t row = own_row + warp; row < end_rows; row += N_WARPS) {
        const merged_sums of_row = cells_sums(a, work, pair, row);
        const float sum          = of_row.sum + of_row.own;
        if (lane == 0) {
            maxima[row] = of_row.max;
            scales[row] = sum > 0.0f ? 1.0f / sum : 0.0f;
            if (a.search) {
                scales[row] *= retrieved_result(a, work, pair, row)[a.n_embd_head_v]; // share left to the cells
            }
        }
    }
    __syncthreads();

    const uint32_t cell = blockIdx.x * N_THREADS + threadIdx.x;
    if (!is_row) {
        float sum     = 0.0f;
        float squares = 0.0f;
        for (uint32_t row = 0; row < n_rows && cell < a.n_kv; ++row) {
            const float logit   = a.work[work.logits + (size_t(pair) * n_rows + row) * a.n_kv + cell];
            const float prob    = exp_from(logit, maxima[row]) * scales[row];
            const char * credit = a.credit.data ? at(a.credit, stream, 0, row / a.n_group()) : nullptr;

            sum     += prob * (credit ? reinterpret_cast<const float *>(credit)[cell] : 1.0f);
            squares += prob * prob;
        }
        if (a.scores && cell < a.n_kv) {
            of_head(a, a.scores, stream, head_kv)[cell] += sum / float(a.n_group());
        }
        if (a.squares && cell < a.n_kv) {
            of_head(a, a.squares, stream, head_kv)[cell] += squares / float(a.n_group());
        }
        return;
    }

    const uint32_t n_embd  = a.n_embd_head_v;
    const size_t first     = work.place(pair * n_rows + own_row, 0);
    const float * of_parts = a.work + work.maxima + first;

    // the warps share the parts
    for (uint32_t i = 4 * lane; i < n_embd; i += 4 * N_WARP) {
        float sums[4] = {};
#pragma unroll 8
        for (int part = warp; part < int(work.n_parts); part += int(N_WARPS)) {
            const auto share = *reinterpret_cast<const float4 *>(a.work + work.shares + (first + part) * n_embd + i);
            const float by   = exp_from(of_parts[part], maxima[own_row]);

            sums[0] += share.x * by;
            sums[1] += share.y * by;
            sums[2] += share.z * by;
            sums[3] += share.w * by;
        }
        for (uint32_t e = 0; e < 4; ++e) {
            of_warps[warp * n_embd + i + e] = sums[e];
        }
    }
    __syncthreads();

    const row_place place(a, head_kv, own_row);
    for (uint32_t i = threadIdx.x; i < n_embd; i += N_THREADS) {
        float sum = 0.0f;
        for (uint32_t j = 0; j < N_WARPS; ++j) {
            sum += of_warps[j * n_embd + i];
        }
        sum = sum * scales[own_row] + (a.search ? retrieved_result(a, work, pair, own_row)[i] : 0.0f);
        a.out[(size_t(stream * a.n_tokens + place.token) * a.n_head + place.head) * n_embd + i] = sum;
    }
}

//
// scores of many queries, from stored probabilities
//

// Maximum warps that share the queries of 32 cells.
constexpr uint32_t MAX_ADDERS = 16;

__host__ __device__ inline uint32_t n_adders(const llama_h2o_sum & a) {
    return a.n_tokens < MAX_ADDERS ? a.n_tokens : MAX_ADDERS;
}

// Adds the sum over queries and the mean over the heads of the KV group, in float32 and in a fixed order, unlike a matrix product
// on tensor cores. grid [n_kv/N_WARP, n_pairs], N_WARP*n_adders() threads
__global__ void add_probs(const llama_h2o_sum a) {
    __shared__ float of_warps[MAX_ADDERS * N_WARP];

    const uint32_t lane    = threadIdx.x % N_WARP;
    const uint32_t warp    = threadIdx.x / N_WARP;
    const uint32_t cell    = blockIdx.x * N_WARP + lane;
    const uint32_t stream  = blockIdx.y / a.n_head_kv;
    const uint32_t head_kv = blockIdx.y % a.n_head_kv;
    const uint32_t n_group = a.n_head / a.n_head_kv;

    ggml_cuda_pdl_sync();

    float sum = 0.0f;
    for (uint32_t head = head_kv * n_group; head < (head_kv + 1) * n_group && cell < a.n_kv; ++head) {
        const char * probs  = at(a.probs, stream, head, 0);
        const char * credit = a.credit.data ? at(a.credit, stream, 0, 0) : nullptr;
#pragma unroll 8
        for (int token = warp; token < int(a.n_tokens); token += int(n_adders(a))) {
            const float prob = reinterpret_cast<const float *>(probs + token * a.probs.nb_row)[cell];
            sum += credit ? prob * reinterpret_cast<const float *>(credit + token * a.credit.nb_row)[cell] : prob;
        }
    }
    of_warps[threadIdx.x] = sum;
    __syncthreads();

    ggml_cuda_pdl_lc();

    if (warp == 0 && cell < a.n_kv) {
        for (uint32_t i = 1; i < n_adders(a); ++i) {
            sum += of_warps[i * N_WARP + lane];
        }
        char * sums = reinterpret_cast<char *>(a.sums) + stream * a.nb_sum_stream + head_kv * a.nb_sum_head;
        reinterpret_cast<float *>(sums)[cell] += sum / float(n_group);
    }
}

} // namespace
