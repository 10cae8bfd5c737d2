// Attention to retrieved rows on the device, which reads each row once, from its own memory or from the host's. The rows are split
// over blocks; combine_retrieved() merges their results and records the attention.

#pragma once

#include "cuda/h2o-cuda-search.cuh"

namespace {

constexpr uint32_t N_TILE      = llama_h2o_cuda_search_space::N_TILE;
constexpr uint32_t MAX_STRIDE  = MAX_EMBD + 4;
constexpr uint32_t N_V_AT_ONCE = 4 * N_WARP; // elements of V

constexpr uint32_t N_RETRIEVED_THREADS = 256;
constexpr uint32_t N_RETRIEVED_WARPS   = N_RETRIEVED_THREADS / N_WARP;

static_assert(N_TILE == N_WARP, "a thread for each row");

// Stride of retrieved rows in shared memory, as floats: threads that read one row each use different banks.
__device__ inline uint32_t stride_of(uint32_t n_embd) {
    return n_embd + 4;
}

// Bytes of a row.
__device__ inline uint32_t size_of_row(ggml_type type, uint32_t n_embd) {
    return type == GGML_TYPE_F32    ? n_embd * 4
           : type == GGML_TYPE_F16  ? n_embd * 2
           : type == GGML_TYPE_Q8_0 ? n_embd / 32 * 34
                                    : n_embd / 32 * 18;
}

// The rows of a head in a page, in device or host memory.
const __device__ inline char * rows_of(
        const llama_h2o_device_text & text, const llama_h2o_device_text::head & head, uint32_t page, size_t nb_row) {
    if (head.codes < 0 || page < text.first_near) {
        return text.pages[page] + head.keys;
    }

    return text.near + (text.near_slot + page) % text.n_near * text.nb_near + head.codes * PAGE * nb_row;
}

// Loads the rows of a tile ahead, because host memory is slow: a warp reads every eighth row, adjacent words.
struct retrieved_words {
    static constexpr uint32_t N_EACH = N_TILE / N_RETRIEVED_WARPS; // rows per warp
    static constexpr uint32_t N_AT   = 2;                          // words of a row per thread
    static constexpr uint32_t N      = N_AT * N_WARP;              // words per row

    uint32_t words[N_EACH][N_AT];

    // Loads words from `first` on. Rows with an odd number of halves are not aligned to words.
    //   offset  in the rows of a head
    __device__ void fetch(const llama_h2o_device_text & text,
            const llama_h2o_device_text::head & head,
            uint64_t offset,
            size_t nb_row,
            const uint32_t * rows,
            uint32_t n,
            uint32_t size,
            uint32_t first) {
        const uint32_t warp   = threadIdx.x / N_WARP;
        const bool is_aligned = (offset | nb_row) % sizeof(uint32_t) == 0;
#pragma unroll
        for (uint32_t i = 0; i < N_EACH; ++i) {
            const uint32_t row = rows[warp + i * N_RETRIEVED_WARPS < n ? warp + i * N_RETRIEVED_WARPS : 0];
            const char * from  = rows_of(text, head, row / PAGE, nb_row) + offset + row % PAGE * nb_row;
#pragma unroll
            for (uint32_t k = 0; k < N_AT; ++k) {
                const uint32_t at = (first + threadIdx.x % N_WARP + k * N_WARP) * sizeof(uint32_t);
                if (is_aligned && at + 4 <= size) {
                    words[i][k] = *reinterpret_cast<const uint32_t *>(from + at);
                } else if (at < size) {
                    const auto * halves = reinterpret_cast<const uint16_t *>(from + at);
                    words[i][k]         = halves[0] | uint32_t(at + 4 <= size ? halves[1] : 0) << 16;
                }
            }
        }
    }

    //   to  rows of `stride` bytes
    __device__ void put(char * to, uint32_t stride, uint32_t first) const {
        const uint32_t warp = threadIdx.x / N_WARP;
#pragma unroll
        for (uint32_t i = 0; i < N_EACH; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < N_AT; ++k) {
                const uint32_t at = (first + threadIdx.x % N_WARP + k * N_WARP) * sizeof(uint32_t);
                if (at < stride) {
                    *reinterpret_cast<uint32_t *>(to + (warp + i * N_RETRIEVED_WARPS) * stride + at) = words[i][k];
                }
            }
        }
    }
};

// Converts rows to floats in shared memory; their first words must have been fetched. Up to N_EMBD elements.
template <uint32_t N_EMBD>
__device__ void load_retrieved(const llama_h2o_search & s,
        const llama_h2o_device_text & text,
        const llama_h2o_device_text::head & head,
        retrieved_words & words,
        uint64_t offset,
        const uint32_t * rows,
        uint32_t n,
        uint32_t n_embd,
        float * tile) {
    const uint32_t size     = size_of_row(s.type, n_embd);
    const uint32_t stride   = (size + 15) / 16 * 16;
    const uint32_t n_of_row = n_embd / N_ELEMENTS;

    char * copies = reinterpret_cast<char *>(tile); // the memory of the floats
    words.put(copies, stride, 0);
    for (uint32_t first = words.N; first * sizeof(uint32_t) < size; first += words.N) {
        words.fetch(text, head, offset, s.nb_row, rows, n, size, first);
        words.put(copies, stride, first);
    }
    __syncthreads();

    constexpr uint32_t N_EACH = N_TILE * N_EMBD / N_ELEMENTS / N_RETRIEVED_THREADS;

    float x[N_EACH][N_ELEMENTS];
#pragma unroll
    for (uint32_t k = 0; k < N_EACH; ++k) {
        const uint32_t item = threadIdx.x + k * N_RETRIEVED_THREADS;
        const char * row    = copies + item / n_of_row * stride;
        const uint32_t i    = item % n_of_row * N_ELEMENTS;
        if (item < n * n_of_row) {
            load_elements(s.type, row, i, x[k]);
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < N_EACH; ++k) {
        const uint32_t item = threadIdx.x + k * N_RETRIEVED_THREADS;
        float * to          = tile + item / n_of_row * stride_of(n_embd) + item % n_of_row * N_ELEMENTS;
#pragma unroll
        for (uint32_t e = 0; e < N_ELEMENTS; ++e) {
            if (item < n * n_of_row) {
                to[e] = x[k][e];
            }
        }
    }
    __syncthreads();
}

// Rotates keys to the RoPE positions of their pages.
__device__ inline void rotate_retrieved(const llama_h2o_search & s,
        const llama_h2o_device_text & text,
        const uint32_t * rows,
        uint32_t n,
        uint32_t n_embd,
        float * tile) {
    const uint32_t n_pairs = s.rotation.n_dims / 2;

    for (uint32_t item = threadIdx.x; item < n * n_pairs; item += N_RETRIEVED_THREADS) {
        const uint32_t page = rows[item / n_pairs] / PAGE;
        if (page < text.n_unrotated) {
            continue;
        }
        const float * factors = text.factors + size_t(page - text.n_unrotated) * 2 * s.rotation.n_dims;
        const float * sines   = factors + s.rotation.n_dims;
        float * x             = tile + item / n_pairs * stride_of(n_embd) + s.rotation.first;

        const uint32_t i = uint32_t(s.rotation.lower(item % n_pairs));
        const uint32_t j = uint32_t(s.rotation.upper(item % n_pairs));
        const float low  = x[i];
        const float high = x[j];

        x[i] = low * factors[i] + high * sines[i];
        x[j] = high * factors[j] + low * sines[j];
    }
    __syncthreads();
}

// Products of the queries of a warp, N_ROWS, with a thread's key.
template <uint32_t N_ROWS>
__device__ void multiply_keys(
        const float * queries, uint32_t n_stride, const float * key, uint32_t n_embd, float (&sums)[N_ROWS]) {
    for (uint32_t e = 0; e < n_embd; e += 4) {
        const float4 four = *reinterpret_cast<const float4 *>(key + e);
        const float x[4]  = { four.x, four.y, four.z, four.w };
#pragma unroll
        for (uint32_t k = 0; k < 4; ++k) {
            const float * q = queries + size_t(e + k) * n_stride;
            if constexpr (N_ROWS == 1) {
                sums[0] += x[k] * q[0];
            } else {
#pragma unroll
                for (uint32_t i = 0; i < N_ROWS; i += 4) {
                    const float4 of = *reinterpret_cast<const float4 *>(q + i);

                    sums[i]     += x[k] * of.x;
                    sums[i + 1] += x[k] * of.y;
                    sums[i + 2] += x[k] * of.z;
                    sums[i + 3] += x[k] * of.w;
                }
            }
        }
    }
}

// Adds the values of a tile, weighted.
//   weights  [N_ROWS][N_TILE]
//   results  a thread has four elements from 4*part on
template <uint32_t N_ROWS, uint32_t N>
__device__ void add_retrieved(uint32_t part,
        const float (*weights)[N_TILE],
        const float * tile,
        uint32_t n,
        uint32_t n_embd,
        float (&results)[N_ROWS][N]) {
    const uint32_t i = threadIdx.x % N_WARP * 4;
    if (i >= n_embd) {
        return;
    }
    for (uint32_t j = 0; j < n; ++j) {
        const float4 four = *reinterpret_cast<const float4 *>(tile + j * stride_of(n_embd) + i);
        const float x[4]  = { four.x, four.y, four.z, four.w };
#pragma unroll
        for (uint32_t row = 0; row < N_ROWS; ++row) {
            const float weight = weights[row][j];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                results[row][4 * part + e] += weight * x[e];
            }
        }
    }
}

// Attends to a split of the retrieved rows. grid [n_splits, n_blocks], N_RETRIEVED_THREADS threads. 8*N_ROWS: maximum queries that
// search together; 128*N_V_PARTS: elements of K and V
template <uint32_t N_ROWS, uint32_t N_V_PARTS>
__global__ void __launch_bounds__(N_RETRIEVED_THREADS, 1) attend_retrieved(
        const llama_h2o_attention a, const llama_h2o_search s, const llama_h2o_cuda_search_space space) {
    alignas(16) __shared__ float tile[N_TILE * MAX_STRIDE];
    __shared__ float weights[N_ROWS * N_RETRIEVED_WARPS][N_TILE];

    ggml_cuda_pdl_sync();

    const asking own(a, s, space, blockIdx.y);
    const llama_h2o_device_text & text = own.text;

    const uint32_t lane        = threadIdx.x % N_WARP;
    const uint32_t own_row     = threadIdx.x / N_WARP * N_ROWS; // first query of the warp
    const uint32_t * rows      = own.list() + 1;
    const uint32_t n_retrieved = rows[-1];
    const uint32_t first       = blockIdx.x * N_TILE;
    if (first >= n_retrieved) {
        return;
    }

    const uint32_t n_embd_k = a.n_embd_head_k;
    const auto & head       = text.heads[own.head_kv];
    const float * queries   = own.queries() + own_row;

    const auto n_of = [&](uint32_t i) {
        return n_retrieved - i < N_TILE ? n_retrieved - i : N_TILE;
    };
    const auto n_embd_of = [&](uint32_t part) {
        const uint32_t n = a.n_embd_head_v - part * N_V_AT_ONCE;
        return n < N_V_AT_ONCE ? n : N_V_AT_ONCE;
    };
    const auto values_of = [&](uint32_t part) {
        return head.values - head.keys + size_of_row(s.type, part * N_V_AT_ONCE);
    };

    // the next rows are loaded while the current ones are multiplied
    retrieved_words words;
    words.fetch(text, head, 0, s.nb_row, rows + first, n_of(first), size_of_row(s.type, n_embd_k), 0);

    online_softmax<N_ROWS, 4 * N_V_PARTS> shares;
    for (uint32_t i = first; i < n_retrieved; i += space.n_splits * N_TILE) {
        const uint32_t n = n_of(i);
        load_retrieved<N_V_PARTS * N_V_AT_ONCE>(s, text, head, words, 0, rows + i, n, n_embd_k, tile);
        rotate_retrieved(s, text, rows + i, n, n_embd_k, tile);
        words.fetch(text, head, values_of(0), s.nb_row, rows + i, n, size_of_row(s.type, n_embd_of(0)), 0);

        float logits[N_ROWS] = {};
        multiply_keys<N_ROWS>(queries, space.n_stride, tile + lane * stride_of(n_embd_k), n_embd_k, logits);
#pragma unroll
        for (uint32_t k = 0; k < N_ROWS; ++k) {
            logits[k] *= a.scale;
            if (s.cap > 0.0f) {
                logits[k] = s.cap * tanhf(logits[k] / s.cap);
            }
            if (own_row + k < own.n) {
                a.work[space.logits + size_t(own.first + own_row + k) * space.n_retrieved + i + lane] = logits[k];
            }
            weights[own_row + k][lane] = shares.add_key(k, lane < n && own_row + k < own.n ? logits[k] : MINUS_INF);
        }

#pragma unroll
        for (uint32_t part = 0; part < N_V_PARTS; ++part) {
            __syncthreads();
            load_retrieved<N_V_AT_ONCE>(s, text, head, words, values_of(part), rows + i, n, n_embd_of(part), tile);
            if (part + 1 < N_V_PARTS) {
                words.fetch(text, head, values_of(part + 1), s.nb_row, rows + i, n,
                        size_of_row(s.type, n_embd_of(part + 1)), 0);
            } else if (i + space.n_splits * N_TILE < n_retrieved) {
                const uint32_t next = i + space.n_splits * N_TILE;
                words.fetch(text, head, 0, s.nb_row, rows + next, n_of(next), size_of_row(s.type, n_embd_k), 0);
            }
            add_retrieved(part, weights + own_row, tile, n, n_embd_of(part), shares.results);
        }
        __syncthreads();
    }

#pragma unroll
    for (uint32_t k = 0; k < N_ROWS; ++k) {
        const uint32_t row = own_row + k;
        if (row >= own.n) {
            break;
        }
        const size_t place = (size_t(own.index) * space.n_splits + blockIdx.x) * space.n_asking + row;
        const float sum    = team_sum<N_WARP>(shares.sums[k]);
        if (lane == 0) {
            a.work[space.maxima + place] = shares.maxima[k];
            a.work[space.sums + place]   = sum;
        }
#pragma unroll
        for (uint32_t part = 0; part < N_V_PARTS; ++part) {
            for (uint32_t e = 0; e < 4 && 4 * lane < n_embd_of(part); ++e) {
                a.work[space.shares + place * a.n_embd_head_v + part * N_V_AT_ONCE + 4 * lane + e] =
                        shares.results[k][4 * part + e];
            }
        }
    }
}

// in multiples of 2^-32
__device__ inline unsigned long long as_whole(float x) {
    return x > 0.0f ? static_cast<unsigned long long>(x * 4294967296.0f) : 0;
}

// Merges retrieved rows and cells in one softmax. grid [n_retrieved/N_RETRIEVED_THREADS + n_asking, n_blocks], N_RETRIEVED_THREADS
// threads: the first blocks record the attention to rows, each other block computes the result of a query
__global__ void __launch_bounds__(N_RETRIEVED_THREADS) combine_retrieved(
        const llama_h2o_attention a, const llama_h2o_search s, const llama_h2o_cuda_search_space space) {
    __shared__ float maxima[MAX_ASKING];
    __shared__ float scales[MAX_ASKING]; // 1 / sum of the exponentials

    ggml_cuda_pdl_sync();

    const asking own(a, s, space, blockIdx.y);
    const llama_h2o_device_text & text = own.text;

    const uint32_t * rows      = own.list() + 1;
    const uint32_t n_retrieved = rows[-1];
    const uint32_t n_tiles     = (n_retrieved + N_TILE - 1) / N_TILE;
    const uint32_t n_splits    = n_tiles < space.n_splits ? n_tiles : space.n_splits;
    const size_t place         = size_t(own.index) * space.n_splits * space.n_asking; // index of the first split

    const bool is_row  = blockIdx.x + space.n_asking >= gridDim.x;
    const uint32_t row = blockIdx.x + space.n_asking - gridDim.x;
    if (is_row ? row >= own.n : blockIdx.x * N_RETRIEVED_THREADS >= n_retrieved) {
        return;
    }

    const uint32_t lane = threadIdx.x % N_WARP;
    for (uint32_t i  = (is_row ? row : 0) + threadIdx.x / N_WARP; i < (is_row ? row + 1 : own.n);
            i       += N_RETRIEVED_WARPS) {
        const float lse = n_retrieved > 0 ? a.work[space.lse + own.first + i] : 0.0f; // of the cells
        const merged_sums sums(
                a.work + space.maxima + place + i, a.work + space.sums + place + i, n_splits, space.n_asking, lse);
        if (lane == 0) {
            maxima[i] = sums.max;
            scales[i] = sums.sum + sums.own > 0.0f ? 1.0f / (sums.sum + sums.own) : 0.0f;
        }
        if (is_row && lane == 0) {
            own.output(row)[a.n_embd_head_v] = sums.own * scales[i];
            if (n_retrieved > 0) { // a text without pages has no sums
                atomicAdd(text.shares, as_whole(sums.sum * scales[i]));
            }
        }
    }
    __syncthreads();

    if (is_row) {
        for (uint32_t i = threadIdx.x; i < a.n_embd_head_v; i += N_RETRIEVED_THREADS) {
            float sum = 0.0f;
            for (uint32_t split = 0; split < n_splits; ++split) {
                const size_t at = place + split * space.n_asking + row;

                sum += a.work[space.shares + at * a.n_embd_head_v + i] *
                       exp_from(a.work[space.maxima + at], maxima[row]);
            }
            own.output(row)[i] = sum * scales[row];
        }
        return;
    }

    const uint32_t j = blockIdx.x * N_RETRIEVED_THREADS + threadIdx.x;
    float squares    = 0.0f;
    for (uint32_t i = 0; i < own.n && j < n_retrieved; ++i) {
        const float logit = a.work[space.logits + size_t(own.first + i) * space.n_retrieved + j];
        const float share = exp_from(logit, maxima[i]) * scales[i];

        squares += share * share;
    }
    if (j < n_retrieved) {
        atomicAdd(text.weights + rows[j], as_whole(squares));
    }
    if (j < n_retrieved && text.heads[own.head_kv].codes >= 0) {
        atomicAdd(text.interest + rows[j] / LLAMA_H2O_PASSAGE, as_whole(squares));
    }
    const float of_warp = team_sum<N_WARP>(squares);
    if (lane == 0) {
        atomicAdd(text.gains + own.head_kv, as_whole(of_warp));
    }
}

} // namespace
