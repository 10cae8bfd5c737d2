// Attention of a few queries over the rows of the cache, and the update of their scores, on the device.
//
// The cells are split into parts, so that all of the device is busy with one token. attend_part() reads K and V of a
// part once, for all query heads of a KV group, and leaves its logits and its share of the result; combine() puts
// the shares together and adds the probabilities, which it finds from the logits, to the scores.

#pragma once

#include "cuda/h2o-cuda-rows.cuh"
#include "cuda/h2o-cuda.h"

#include "ggml-cuda/common.cuh"

#include <cmath>

namespace {

constexpr uint32_t N_THREADS = 128;
constexpr uint32_t N_WARP    = 32;
constexpr uint32_t N_WARPS   = N_THREADS / N_WARP;
constexpr uint32_t MAX_CELLS = llama_h2o_cuda_workspace::MAX_CELLS; // of a part
constexpr uint32_t N_LANES   = 8;                                   // threads that read a row of K together
constexpr uint32_t MAX_EMBD  = LLAMA_H2O_CUDA_MAX_EMBD;

constexpr float MINUS_INF = -INFINITY;

// Of R rows of the result those that are summed up at once: as many as fit into registers.
template <uint32_t R>
constexpr uint32_t N_AT_ONCE = R < 4 ? R : 4;

//
// where things lie
//

// the queries of a KV head, token by token, the heads of its group side by side
struct row_place {
    uint32_t token;
    uint32_t head;

    __device__ row_place(const llama_h2o_attention & a, uint32_t head_kv, uint32_t row) :
        token(row / a.n_group()), head(head_kv * a.n_group() + row % a.n_group()) {}
};

// The logit of the sink of a query; minus infinity without sinks.
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

// exp(x - max), where there may be nothing but masked cells, or logits that are no numbers
__device__ inline float exp_from(float x, float max) {
    return expf(max == MINUS_INF ? x : x - max);
}

//
// a part of the cells
//

struct part_place {
    uint32_t index;
    uint32_t pair;
    uint32_t stream;
    uint32_t head_kv;
    uint32_t first; // cell
    uint32_t n;     // cells

    __device__ part_place(const llama_h2o_attention & a, uint32_t n_cells) :
        index(blockIdx.x), pair(blockIdx.y), stream(pair / a.n_head_kv), head_kv(pair % a.n_head_kv),
        first(index * n_cells), n(a.n_kv - first < n_cells ? a.n_kv - first : n_cells) {}
};

// The logits of the part, [R][MAX_CELLS] in shared memory. R: rows at most.
template <typename ROWS, uint32_t R>
__device__ void compute_logits(const llama_h2o_attention & a, const part_place & own, float * queries, float * logits) {
    const uint32_t n_embd = a.n_embd_head_k;

    for (uint32_t i = threadIdx.x; i < R * n_embd; i += N_THREADS) {
        const uint32_t row = i / n_embd;
        if (row < a.n_rows()) {
            const row_place place(a, own.head_kv, row);
            const char * q = at(a.q, own.stream, place.head, place.token);
            queries[i]     = reinterpret_cast<const float *>(q)[i % n_embd] * a.scale;
        } else {
            queries[i] = 0.0f;
        }
    }
    __syncthreads();

    const uint32_t lane = threadIdx.x % N_LANES;

    // keys are on their way together, as many as registers hold: a shuffle would wait for each
    constexpr uint32_t N_KEYS  = R <= 2 ? 4 : 2;
    constexpr uint32_t N_TEAMS = N_THREADS / N_LANES;

    for (uint32_t first = threadIdx.x / N_LANES; first < own.n; first += N_TEAMS * N_KEYS) {
        float dots[N_KEYS][R] = {};
        for (uint32_t i = lane * N_ELEMENTS; i < n_embd; i += N_LANES * N_ELEMENTS) {
            float x[N_KEYS][N_ELEMENTS];
#pragma unroll
            for (uint32_t key = 0; key < N_KEYS; ++key) {
                const uint32_t cell = first + key * N_TEAMS;
                ROWS::load(at(a.k, own.stream, own.head_kv, own.first + (cell < own.n ? cell : first)), i, x[key]);
            }
#pragma unroll
            for (uint32_t row = 0; row < R; ++row) {
#pragma unroll
                for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                    const float query = queries[row * n_embd + i + e];
#pragma unroll
                    for (uint32_t key = 0; key < N_KEYS; ++key) {
                        dots[key][row] += x[key][e] * query;
                    }
                }
            }
        }

#pragma unroll
        for (uint32_t key = 0; key < N_KEYS; ++key) {
            const uint32_t cell = first + key * N_TEAMS;
#pragma unroll
            for (uint32_t row = 0; row < R; ++row) {
                const float logit = team_sum<N_LANES>(dots[key][row]);
                if (lane == row % N_LANES && cell < own.n) {
                    logits[row * MAX_CELLS + cell] = logit;
                }
            }
        }
    }
    __syncthreads();
}

// Adds the mask and turns logits into exp(logit - maximum), a warp for each row.
__device__ inline void compute_weights(
        const llama_h2o_attention & a, const llama_h2o_cuda_workspace & work, const part_place & own, float * logits) {
    const uint32_t lane = threadIdx.x % N_WARP;

    for (uint32_t row = threadIdx.x / N_WARP; row < a.n_rows(); row += N_WARPS) {
        const char * mask = at(a.mask, own.stream, 0, row / a.n_group()) + own.first * sizeof(uint16_t);

        float * of_row = logits + row * MAX_CELLS;
        float * left   = a.work + work.logits + (size_t(own.pair) * a.n_rows() + row) * a.n_kv + own.first;

        float max = MINUS_INF;
        for (uint32_t cell = lane; cell < own.n; cell += N_WARP) {
            const float masked = to_float(reinterpret_cast<const uint16_t *>(mask)[cell]);
            const float logit  = masked == MINUS_INF ? MINUS_INF : of_row[cell] + masked;

            of_row[cell] = logit;
            left[cell]   = logit;
            max          = fmaxf(max, logit);
        }
        max = warp_max(max);

        float sum = 0.0f;
        for (uint32_t cell = lane; cell < own.n; cell += N_WARP) {
            of_row[cell]  = exp_from(of_row[cell], max);
            sum          += of_row[cell];
        }
        sum = team_sum<N_WARP>(sum);

        if (lane == 0) {
            const size_t i = (size_t(own.pair) * work.n_parts + own.index) * a.n_rows() + row;

            a.work[work.maxima + i] = max;
            a.work[work.sums + i]   = sum;
        }
    }
    __syncthreads();
}

// The sum of the rows of V, each by its weight.
//   of_teams  [n_teams][N_AT_ONCE][n_embd] in shared memory
template <typename ROWS, uint32_t R>
__device__ void compute_share(
        const llama_h2o_attention & a, const part_place & own, const float * weights, float * of_teams, float * share) {
    constexpr uint32_t N_ROWS = N_AT_ONCE<R>;

    // the threads of a team read a row together
    const uint32_t n_embd  = a.n_embd_head_v;
    const uint32_t n_lanes = n_embd / N_ELEMENTS;
    const int n_teams      = N_THREADS / n_lanes;
    const uint32_t lane    = threadIdx.x % n_lanes;
    const int team         = threadIdx.x / n_lanes;

    for (uint32_t row = 0; row < a.n_rows(); row += N_ROWS) {
        float sums[N_ROWS][N_ELEMENTS] = {};

        // counted, so that the loads of several cells go out together
        const int n_cells = team < n_teams ? (int(own.n) - team + n_teams - 1) / n_teams : 0;
#pragma unroll 4
        for (int i_cell = 0; i_cell < n_cells; ++i_cell) {
            const uint32_t cell = team + i_cell * n_teams;

            float x[N_ELEMENTS];
            ROWS::load(at(a.v, own.stream, own.head_kv, own.first + cell), lane * N_ELEMENTS, x);
#pragma unroll
            for (uint32_t i = 0; i < N_ROWS; ++i) {
                const float weight = weights[(row + i) * MAX_CELLS + cell];
#pragma unroll
                for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                    sums[i][e] += weight * x[e];
                }
            }
        }

        if (team < n_teams) {
#pragma unroll
            for (uint32_t i = 0; i < N_ROWS; ++i) {
#pragma unroll
                for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
                    of_teams[(team * N_ROWS + i) * n_embd + lane * N_ELEMENTS + e] = sums[i][e];
                }
            }
        }
        __syncthreads();

        for (uint32_t i = threadIdx.x; i < N_ROWS * n_embd && row + i / n_embd < a.n_rows(); i += N_THREADS) {
            float sum = 0.0f;
            for (int j = 0; j < n_teams; ++j) {
                sum += of_teams[j * N_ROWS * n_embd + i];
            }
            share[row * n_embd + i] = sum;
        }
        __syncthreads();
    }
}

// grid [n_parts, n_pairs], N_THREADS threads
template <typename ROWS, uint32_t R>
__global__ void attend_part(const llama_h2o_attention a, const llama_h2o_cuda_workspace work) {
    __shared__ float logits[R * MAX_CELLS]; // then the weights
    // the queries, then the sums of the teams
    alignas(16) __shared__ float scratch[N_THREADS * N_ELEMENTS * N_AT_ONCE<R>];
    static_assert(R * MAX_EMBD <= N_THREADS * N_ELEMENTS * N_AT_ONCE<R>);

    const part_place own(a, work.n_cells);

    ggml_cuda_pdl_sync(); // what comes before may still be running

    const size_t first_row = (size_t(own.pair) * work.n_parts + own.index) * a.n_rows();

    compute_logits<ROWS, R>(a, own, scratch, logits);
    compute_weights(a, work, own, logits);
    ggml_cuda_pdl_lc();
    compute_share<ROWS, R>(a, own, logits, scratch, a.work + work.shares + first_row * a.n_embd_head_v);
}

//
// all parts
//

// The largest logit of a query, its sink's included, and the sum of exp(logit - maximum): known to all threads of a warp.
struct part_sums {
    float max = MINUS_INF;
    float sum = 0.0f;

    __device__ part_sums(
            const llama_h2o_attention & a, const llama_h2o_cuda_workspace & work, uint32_t pair, uint32_t row) {
        const uint32_t lane = threadIdx.x % N_WARP;
        const int n_parts   = work.n_parts;
        const size_t first  = size_t(pair) * n_parts * a.n_rows() + row;
        const float sink    = sink_of(a, pair % a.n_head_kv, row);

        max = sink;
        for (int part = lane; part < n_parts; part += int(N_WARP)) {
            max = fmaxf(max, a.work[work.maxima + first + part * a.n_rows()]);
        }
        max = warp_max(max);

        for (int part = lane; part < n_parts; part += int(N_WARP)) {
            const size_t i  = first + part * a.n_rows();
            sum            += a.work[work.sums + i] * exp_from(a.work[work.maxima + i], max);
        }
        sum = team_sum<N_WARP>(sum) + exp_from(sink, max);
    }
};

// What found rows add to a query's result, and what they leave to the cells: as beside() has it.
const __device__ inline float * found_result(
        const llama_h2o_attention & a, const llama_h2o_cuda_workspace & work, uint32_t pair, uint32_t row) {
    const row_place place(a, pair % a.n_head_kv, row);

    return a.work + work.found +
           (size_t(pair / a.n_head_kv * a.n_tokens + place.token) * a.n_head + place.head) * (a.n_embd_head_v + 1);
}

// grid [n_kv/N_THREADS + n_rows, n_pairs], N_THREADS threads: the first blocks of a pair have the scores, the others a row
// of the result each
__global__ void combine_parts(const llama_h2o_attention a, const llama_h2o_cuda_workspace work) {
    __shared__ float maxima[llama_h2o_attention::MAX_FEW_ROWS];
    __shared__ float scales[llama_h2o_attention::MAX_FEW_ROWS]; // 1 / sum of the exponentials
    __shared__ float of_warps[N_WARPS * MAX_EMBD];

    const uint32_t pair    = blockIdx.y;
    const uint32_t stream  = pair / a.n_head_kv;
    const uint32_t head_kv = pair % a.n_head_kv;
    const int n_parts      = work.n_parts;
    const uint32_t n_rows  = a.n_rows();
    const size_t first     = size_t(pair) * n_parts * n_rows; // of the parts

    const uint32_t lane = threadIdx.x % N_WARP;
    const uint32_t warp = threadIdx.x / N_WARP;

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    for (uint32_t row = warp; row < n_rows; row += N_WARPS) {
        const part_sums sums(a, work, pair, row);
        if (lane == 0) {
            maxima[row] = sums.max;
            scales[row] = sums.sum > 0.0f ? 1.0f / sums.sum : 0.0f;
            if (a.search) {
                scales[row] *= found_result(a, work, pair, row)[a.n_embd_head_v]; // is left to the cells
            }
        }
    }
    __syncthreads();

    const uint32_t cell = blockIdx.x * N_THREADS + threadIdx.x;
    if (blockIdx.x + n_rows < gridDim.x) {
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

    const uint32_t row    = blockIdx.x + n_rows - gridDim.x;
    const uint32_t n_embd = a.n_embd_head_v;

    // the warps share the parts
    for (uint32_t i = lane; i < n_embd; i += N_WARP) {
        float sum = 0.0f;
#pragma unroll 4
        for (int part = warp; part < n_parts; part += int(N_WARPS)) {
            const size_t place = first + part * n_rows + row;
            sum += a.work[work.shares + place * n_embd + i] * exp_from(a.work[work.maxima + place], maxima[row]);
        }
        of_warps[warp * n_embd + i] = sum;
    }
    __syncthreads();

    const row_place place(a, head_kv, row);
    for (uint32_t i = threadIdx.x; i < n_embd; i += N_THREADS) {
        float sum = 0.0f;
        for (uint32_t j = 0; j < N_WARPS; ++j) {
            sum += of_warps[j * n_embd + i];
        }
        sum = sum * scales[row] + (a.search ? found_result(a, work, pair, row)[i] : 0.0f);
        a.out[(size_t(stream * a.n_tokens + place.token) * a.n_head + place.head) * n_embd + i] = sum;
    }
}

//
// many queries, whose probabilities others have computed
//

// Warps that share the queries of as many cells as a warp has threads.
constexpr uint32_t MAX_ADDERS = 16;

__host__ __device__ inline uint32_t n_adders(const llama_h2o_sum & a) {
    return a.n_tokens < MAX_ADDERS ? a.n_tokens : MAX_ADDERS;
}

// The sum over queries, the mean over the heads of the KV group: in float32 and in a fixed order, which a matrix product on
// tensor cores is not. grid [n_kv/N_WARP, n_pairs], N_WARP*n_adders() threads
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
