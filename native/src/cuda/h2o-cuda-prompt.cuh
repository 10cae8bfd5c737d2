// Scores of many queries, on tensor cores. Flash attention does not return its probabilities, so the logits are computed twice more
// and never stored: sum_part() computes the log-sum-exp of each query, with which add_columns() computes probabilities and sums
// them by cell.
//
// A warp keeps 16 queries in registers and reads cells in tiles in shared memory. Factors of products are rounded to float16,
// everything else is float32. Sums have a fixed order.

#pragma once

#include "cuda/h2o-cuda-attend.cuh"
#include "cuda/h2o-cuda-mma.cuh"

#include <algorithm>
#include <type_traits>

namespace {

constexpr uint32_t N_TILE_THREADS = 256;
constexpr uint32_t N_TILE_WARPS   = N_TILE_THREADS / N_WARP;
constexpr uint32_t N_CELLS        = LLAMA_H2O_TILE; // per tile
constexpr uint32_t N_QUERIES      = 16;             // per warp
constexpr uint32_t N_DEEP         = 16;             // elements per product
constexpr uint32_t N_WIDE         = 8;              // cells per product
constexpr uint32_t N_STRIP        = 32;             // cells whose logits a warp holds at once, limited by registers

// blocks per multiprocessor, limited by registers
template <uint32_t EMBD>
constexpr uint32_t N_TOGETHER = EMBD > MAX_EMBD / 2 ? 1 : 2;

static_assert(N_TILE_WARPS * N_QUERIES == llama_h2o_cuda_lse::N_ROWS);

// logits of a warp's queries and a strip of cells, in the layout of multiply_add()
using strip_logits = float[N_STRIP / N_WIDE][4];

//
// factors
//

// Stride between keys of a tile in halves: an odd multiple of 16, so that eight threads that read four keys use different banks.
__host__ __device__ constexpr uint32_t tile_stride(uint32_t n_embd) {
    return (n_embd / N_DEEP | 1) * N_DEEP;
}

template <typename ROWS>
__device__ uint4 load_halves(const char * row, uint32_t i) {
    if constexpr (std::is_same_v<ROWS, rows_f16>) {
        return *reinterpret_cast<const uint4 *>(row + i * sizeof(uint16_t));
    } else {
        float x[N_ELEMENTS];
        ROWS::load(row, i, x);

        uint32_t pairs[N_ELEMENTS / 2];
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; e += 2) {
            pairs[e / 2] = __half_as_ushort(__float2half_rn(x[e])) | __half_as_ushort(__float2half_rn(x[e + 1])) << 16;
        }
        return { pairs[0], pairs[1], pairs[2], pairs[3] };
    }
}

// A thread's part of a tile of keys, to be stored in shared memory.
template <typename ROWS, uint32_t EMBD>
struct tile_part {
    static constexpr uint32_t SIZE = N_CELLS * tile_stride(EMBD) / N_ELEMENTS; // uint4 per tile

    uint4 pieces[N_CELLS * EMBD / N_ELEMENTS / N_TILE_THREADS] = {};

    __device__ void fetch(const llama_h2o_attention & a, uint32_t stream, uint32_t head_kv, uint32_t first) {
        for_each(a, [&](uint32_t piece, uint32_t cell, uint32_t i) {
            pieces[piece] = load_halves<ROWS>(at(a.k, stream, head_kv, first + cell), i);
        });
    }

    __device__ void put(const llama_h2o_attention & a, uint4 * tile) const {
        for_each(a, [&](uint32_t piece, uint32_t cell, uint32_t i) {
            tile[(cell * tile_stride(a.n_embd_head_k) + i) / N_ELEMENTS] = pieces[piece];
        });
    }

    template <typename F>
    static __device__ void for_each(const llama_h2o_attention & a, F fn) {
        const uint32_t n = a.n_embd_head_k / N_ELEMENTS;
#pragma unroll
        for (uint32_t piece = 0; piece < N_CELLS * EMBD / N_ELEMENTS / N_TILE_THREADS; ++piece) {
            const uint32_t i = piece * N_TILE_THREADS + threadIdx.x;
            if (i < N_CELLS * n) {
                fn(piece, i / n, i % n * N_ELEMENTS);
            }
        }
    }
};

// The queries of a warp, padded with the last one.
template <uint32_t EMBD>
struct warp_queries {
    uint32_t halves[EMBD / N_DEEP][4];
    const char * masks[2]; // from the lane's first cell on

    __device__ warp_queries(const llama_h2o_attention & a, uint32_t stream, uint32_t head_kv, uint32_t first) {
        const uint32_t lane = threadIdx.x % N_WARP;
#pragma unroll
        for (uint32_t side = 0; side < 2; ++side) {
            const row_place place(a, head_kv, std::min(row_of(first, side), a.n_rows() - 1));
            const char * q = at(a.q, stream, place.head, place.token);

            masks[side] = at(a.mask, stream, 0, place.token) + lane % 4 * sizeof(uint32_t);
#pragma unroll
            for (uint32_t i = 0; i < EMBD / N_DEEP; ++i) {
                if (i * N_DEEP < a.n_embd_head_k) {
                    const uint2 four    = reinterpret_cast<const uint2 *>(q)[i * 4 + lane % 4];
                    halves[i][side]     = four.x;
                    halves[i][side + 2] = four.y;
                }
            }
        }
    }

    // the two queries whose logits a lane has
    static __device__ uint32_t row_of(uint32_t first, uint32_t side) {
        return first + side * N_QUERIES / 2 + threadIdx.x % N_WARP / 4;
    }

    // Computes masked logits: -inf for masked cells, even if the product is NaN.
    //   strip  first cell in the tile
    __device__ void attend(const llama_h2o_attention & a,
            const uint4 * tile,
            uint32_t first_cell,
            uint32_t strip,
            strip_logits & logits) const {
        const uint32_t lane = threadIdx.x % N_WARP;
        const uint32_t size = tile_stride(a.n_embd_head_k) / 4;
        const auto * keys   = reinterpret_cast<const uint2 *>(tile) + (strip + lane / 4) * size + lane % 4;
#pragma unroll
        for (uint32_t i = 0; i < EMBD / N_DEEP; ++i) {
            if (i * N_DEEP < a.n_embd_head_k) {
#pragma unroll
                for (uint32_t j = 0; j < N_STRIP / N_WIDE; ++j) {
                    multiply_add(logits[j], halves[i], keys[j * N_WIDE * size + i * 4]);
                }
            }
        }
#pragma unroll
        for (uint32_t j = 0; j < N_STRIP / N_WIDE; ++j) {
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const char * mask = masks[i / 2] + (first_cell + strip + j * N_WIDE) * sizeof(uint16_t);
                const float added = to_float(uint16_t(*reinterpret_cast<const uint32_t *>(mask) >> (i % 2 * 16)));
                logits[j][i]      = added == MINUS_INF ? MINUS_INF : logits[j][i] * a.scale + added;
            }
        }
    }
};

// index of a query in llama_h2o_attention::lse
__device__ inline size_t lse_place(const llama_h2o_attention & a, uint32_t stream, const row_place & place) {
    return (size_t(stream) * a.n_head + place.head) * a.n_tokens + place.token;
}

//
// log-sum-exp
//

// -inf if all cells of a query are masked. grid [blocks of queries * n_parts, n_pairs], N_TILE_THREADS threads. Results are
// [n_parts][n].
template <typename ROWS, uint32_t EMBD>
__global__ void __launch_bounds__(N_TILE_THREADS, N_TOGETHER<EMBD>)
        sum_part(const llama_h2o_attention a, const llama_h2o_cuda_lse work) {
    __shared__ uint4 tile[tile_part<ROWS, EMBD>::SIZE];

    const uint32_t stream  = blockIdx.y / a.n_head_kv;
    const uint32_t head_kv = blockIdx.y % a.n_head_kv;
    const uint32_t part    = blockIdx.x % work.n_parts;
    const uint32_t row     = blockIdx.x / work.n_parts * work.N_ROWS + threadIdx.x / N_WARP * N_QUERIES;
    const uint32_t begin   = std::min(part * work.n_cells, a.n_kv);
    const uint32_t end     = std::min(begin + work.n_cells, a.n_kv);

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    const warp_queries<EMBD> queries(a, stream, head_kv, row);
    tile_part<ROWS, EMBD> next;
    if (begin < end) {
        next.fetch(a, stream, head_kv, begin);
    }

    float maxima[2] = { MINUS_INF, MINUS_INF };
    float sums[2]   = {};
    for (uint32_t cell = begin; cell < end; cell += N_CELLS) {
        __syncthreads();
        next.put(a, tile);
        __syncthreads();
        if (cell + N_CELLS < end) {
            next.fetch(a, stream, head_kv, cell + N_CELLS);
        }
        if (row >= a.n_rows()) {
            continue;
        }

#pragma unroll
        for (uint32_t strip = 0; strip < N_CELLS; strip += N_STRIP) {
            strip_logits logits = {};
            queries.attend(a, tile, cell, strip, logits);
#pragma unroll
            for (uint32_t side = 0; side < 2; ++side) {
                float max = maxima[side];
#pragma unroll
                for (uint32_t i = 0; i < N_STRIP / N_WIDE * 2; ++i) {
                    max = fmaxf(max, logits[i / 2][side * 2 + i % 2]);
                }
                sums[side]   *= exp_from(maxima[side], max);
                maxima[side]  = max;
#pragma unroll
                for (uint32_t i = 0; i < N_STRIP / N_WIDE * 2; ++i) {
                    sums[side] += exp_from(logits[i / 2][side * 2 + i % 2], max);
                }
            }
        }
    }

    for (uint32_t side = 0; side < 2; ++side) {
        const uint32_t own = queries.row_of(row, side);
        const float sink   = part == 0 ? sink_of(a, head_kv, own) : MINUS_INF;

        const float other = fmaxf(maxima[side], __shfl_xor_sync(0xffffffff, maxima[side], 1));
        const float max   = fmaxf(fmaxf(other, __shfl_xor_sync(0xffffffff, other, 2)), sink);
        const float sum   = team_sum<4>(sums[side] * exp_from(maxima[side], max)) + exp_from(sink, max);

        if (own < a.n_rows() && threadIdx.x % 4 == 0) {
            a.out[part * work.n + lse_place(a, stream, row_place(a, head_kv, own))] = max + logf(sum);
        }
    }
}

// grid [n/N_TILE_THREADS], N_TILE_THREADS threads
__global__ void merge_parts(float * of_parts, const llama_h2o_cuda_lse work) {
    const uint32_t i = blockIdx.x * N_TILE_THREADS + threadIdx.x;

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    if (i >= work.n) {
        return;
    }

    float max = MINUS_INF;
    for (uint32_t part = 0; part < work.n_parts; ++part) {
        max = fmaxf(max, of_parts[part * work.n + i]);
    }
    float sum = 0.0f;
    for (uint32_t part = 0; part < work.n_parts; ++part) {
        sum += exp_from(of_parts[part * work.n + i], max);
    }
    of_parts[i] = max + logf(sum);
}

//
// sums by cell
//

// Adds to the scores the sum over queries and the mean over the heads of the KV group, of probabilities or their squares.
// grid [n_kv/N_CELLS, n_pairs], N_TILE_THREADS threads
template <typename ROWS, uint32_t EMBD>
__global__ void __launch_bounds__(N_TILE_THREADS, N_TOGETHER<EMBD>)
        add_columns(const llama_h2o_attention a, float * collected, const bool squared) {
    constexpr uint32_t STRIDE = N_CELLS + N_WIDE; // of the sums of threads, which reuse the memory of the tile

    __shared__ uint4 tile[tile_part<ROWS, EMBD>::SIZE];
    static_assert(sizeof(tile) >= sizeof(float) * STRIDE * N_TILE_THREADS / 4);

    const uint32_t stream  = blockIdx.y / a.n_head_kv;
    const uint32_t head_kv = blockIdx.y % a.n_head_kv;
    const uint32_t first   = blockIdx.x * N_CELLS;

    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();

    tile_part<ROWS, EMBD> keys;
    keys.fetch(a, stream, head_kv, first);
    keys.put(a, tile);
    __syncthreads();

    float sums[N_CELLS / N_WIDE * 2] = {};
    for (uint32_t row = threadIdx.x / N_WARP * N_QUERIES; row < a.n_rows(); row += N_TILE_WARPS * N_QUERIES) {
        const warp_queries<EMBD> queries(a, stream, head_kv, row);

#pragma unroll
        for (uint32_t strip = 0; strip < N_CELLS; strip += N_STRIP) {
            strip_logits logits = {};
            queries.attend(a, tile, first, strip, logits);
#pragma unroll
            for (uint32_t side = 0; side < 2; ++side) {
                const uint32_t own = queries.row_of(row, side);
                const row_place place(a, head_kv, std::min(own, a.n_rows() - 1));

                const char * kept   = a.kept.data ? at(a.kept, stream, place.head, place.token) : nullptr;
                const char * credit = a.credit.data && !squared ? at(a.credit, stream, 0, place.token) : nullptr;

                const float lse   = own < a.n_rows() ? a.lse[lse_place(a, stream, place)] : INFINITY;
                const float share = kept ? *reinterpret_cast<const float *>(kept) : 1.0f;
#pragma unroll
                for (uint32_t i = 0; i < N_STRIP / N_WIDE * 2; ++i) {
                    const uint32_t cell = first + strip + i / 2 * N_WIDE + threadIdx.x % 4 * 2 + i % 2;
                    const float logit   = logits[i / 2][side * 2 + i % 2];
                    const float prob    = logit == MINUS_INF ? 0.0f : expf(logit - lse) * share;

                    const float weight = credit ? reinterpret_cast<const float *>(credit)[cell] : 1.0f;

                    sums[strip / N_WIDE * 2 + i] += prob * (squared ? prob : weight);
                }
            }
        }
    }

    auto * of_threads = reinterpret_cast<float *>(tile);
    __syncthreads();
#pragma unroll
    for (uint32_t i = 0; i < N_CELLS / N_WIDE * 2; ++i) {
        of_threads[threadIdx.x / 4 * STRIDE + i / 2 * N_WIDE + threadIdx.x % 4 * 2 + i % 2] = sums[i];
    }
    __syncthreads();

    if (threadIdx.x < N_CELLS) {
        float sum = 0.0f;
        for (uint32_t i = 0; i < N_TILE_THREADS / 4; ++i) {
            sum += of_threads[i * STRIDE + threadIdx.x];
        }
        of_head(a, collected, stream, head_kv)[first + threadIdx.x] += sum / float(a.n_group());
    }
}

} // namespace
