// Attention to archived rows that were found, on the device, which reads each of them from the host's memory once.

#pragma once

#include "cuda/h2o-cuda-search.cuh"

namespace {

constexpr uint32_t N_TILE      = N_WARP; // rows at a time
constexpr uint32_t MAX_STRIDE  = MAX_EMBD + 4;
constexpr uint32_t N_V_AT_ONCE = 4 * N_WARP; // elements of V
constexpr uint32_t MAX_ROWS    = llama_h2o_cuda_search_space::MAX_FIND + LLAMA_H2O_PASSAGE;

// Found rows of K or V are in shared memory as floats, so far apart that threads can read a row each.
__device__ inline uint32_t stride_of(uint32_t n_embd) {
    return n_embd + 4;
}

// Bytes of elements of a row.
__device__ inline uint32_t size_of_row(ggml_type type, uint32_t n_embd) {
    return type == GGML_TYPE_F32    ? n_embd * 4
           : type == GGML_TYPE_F16  ? n_embd * 2
           : type == GGML_TYPE_Q8_0 ? n_embd / 32 * 34
                                    : n_embd / 32 * 18;
}

// Copies rows as they are, one behind the other: threads read what lies side by side, and do not wait for each other's.
template <typename WORD>
__device__ void copy_found(const llama_h2o_device_text & text,
        uint64_t offset,
        size_t nb_row,
        const uint32_t * rows,
        uint32_t n,
        uint32_t size,
        char * to) {
    constexpr uint32_t N_EACH = N_TILE / N_WARPS; // rows of a warp
    constexpr uint32_t N_AT   = 2;                // words of a row that a thread reads at once

    const uint32_t lane   = threadIdx.x % N_WARP;
    const uint32_t warp   = threadIdx.x / N_WARP;
    const uint32_t n_word = size / sizeof(WORD);

    const WORD * from[N_EACH];
#pragma unroll
    for (uint32_t i = 0; i < N_EACH; ++i) {
        const uint32_t row = rows[warp + i * N_WARPS < n ? warp + i * N_WARPS : 0];
        from[i]            = reinterpret_cast<const WORD *>(text.pages[row / PAGE] + offset + row % PAGE * nb_row);
    }
    for (uint32_t first = lane; first < n_word; first += N_AT * N_WARP) {
        WORD words[N_EACH][N_AT];
#pragma unroll
        for (uint32_t i = 0; i < N_EACH; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < N_AT; ++k) {
                words[i][k] = from[i][first + k * N_WARP < n_word ? first + k * N_WARP : 0];
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < N_EACH; ++i) {
#pragma unroll
            for (uint32_t k = 0; k < N_AT; ++k) {
                if (first + k * N_WARP < n_word) {
                    reinterpret_cast<WORD *>(to + (warp + i * N_WARPS) * size)[first + k * N_WARP] = words[i][k];
                }
            }
        }
    }
    __syncthreads();
}

// Reads rows as floats. Up to N_EMBD elements.
template <uint32_t N_EMBD>
__device__ void load_found(const device_search & s,
        const llama_h2o_device_text & text,
        uint64_t offset,
        const uint32_t * rows,
        uint32_t n,
        uint32_t n_embd,
        float * tile) {
    const uint32_t size     = size_of_row(s.type, n_embd);
    const uint32_t n_of_row = n_embd / N_ELEMENTS;

    char * copies = reinterpret_cast<char *>(tile); // where the floats will be
    if (size % sizeof(uint32_t) == 0 && s.nb_row % sizeof(uint32_t) == 0) {
        copy_found<uint32_t>(text, offset, s.nb_row, rows, n, size, copies);
    } else {
        copy_found<uint16_t>(text, offset, s.nb_row, rows, n, size, copies);
    }

    constexpr uint32_t N_EACH = N_TILE * N_EMBD / N_ELEMENTS / N_THREADS;

    float x[N_EACH][N_ELEMENTS];
#pragma unroll
    for (uint32_t k = 0; k < N_EACH; ++k) {
        const uint32_t item = threadIdx.x + k * N_THREADS;
        const char * row    = copies + item / n_of_row * size;
        const uint32_t i    = item % n_of_row * N_ELEMENTS;
        if (item >= n * n_of_row) {
            continue;
        }
        switch (s.type) {
            case GGML_TYPE_F32:
                rows_f32::load(row, i, x[k]);
                break;
            case GGML_TYPE_F16:
                rows_f16::load(row, i, x[k]);
                break;
            case GGML_TYPE_Q8_0:
                rows_q8_0::load(row, i, x[k]);
                break;
            default:
                rows_q4_0::load(row, i, x[k]);
                break;
        }
    }
    __syncthreads();
#pragma unroll
    for (uint32_t k = 0; k < N_EACH; ++k) {
        const uint32_t item = threadIdx.x + k * N_THREADS;
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

// Turns keys on to where their pages count.
__device__ inline void turn_found(const device_search & s,
        const llama_h2o_device_text & text,
        const uint32_t * rows,
        uint32_t n,
        uint32_t n_embd,
        float * tile) {
    const uint32_t n_pairs = s.turning.n_dims / 2;

    for (uint32_t item = threadIdx.x; item < n * n_pairs; item += N_THREADS) {
        const uint32_t page = rows[item / n_pairs] / PAGE;
        if (page < text.n_unturned) {
            continue;
        }
        const float * factors = text.turns + size_t(page - text.n_unturned) * 2 * s.turning.n_dims;
        const float * sines   = factors + s.turning.n_dims;
        float * x             = tile + item / n_pairs * stride_of(n_embd) + s.turning.first;

        const uint32_t i = uint32_t(s.turning.lower(item % n_pairs));
        const uint32_t j = uint32_t(s.turning.upper(item % n_pairs));
        const float low  = x[i];
        const float high = x[j];

        x[i] = low * factors[i] + high * sines[i];
        x[j] = high * factors[j] + low * sines[j];
    }
    __syncthreads();
}

// The rows that the parts found, and those in focus: in shared memory. Returns how many.
__device__ inline uint32_t gather_rows(const llama_h2o_attention & a,
        const device_search & s,
        const llama_h2o_cuda_search_space & space,
        const llama_h2o_device_text & text,
        const asking_place & own,
        best_candidates & best,
        uint32_t * rows) {
    const uint32_t focus   = in_focus(text, own.head_kv);
    const uint32_t n_focus = __popc(focus);
    const uint32_t n_find  = n_to_find(a, text, own);

    if (threadIdx.x < 32 && (focus >> threadIdx.x & 1)) {
        rows[__popc(focus & ((1u << threadIdx.x) - 1))] = text.focus + threadIdx.x;
    }

    best.start();
    const auto * candidates = reinterpret_cast<const candidate *>(a.work + space.candidates) +
                              size_t(blockIdx.x) * space.n_parts * s.n_find;

    uint32_t n = 0;
    for (uint32_t first = 0; first < space.n_parts * n_find; first += N_THREADS) {
        const uint32_t i = first + threadIdx.x;
        best.add(i < space.n_parts * n_find ? candidates[i / n_find * s.n_find + i % n_find] : 0, n, n_find);
    }
    best.keep_best(n, n_find);
    for (uint32_t i = threadIdx.x; i < n; i += N_THREADS) {
        rows[n_focus + i] = row_of(best.list[i]);
    }
    __syncthreads();

    return n_focus + n;
}

// The result of a query, and behind it what is left to the cells: as beside() has it.
__device__ inline float * found_output(const llama_h2o_attention & a,
        const llama_h2o_cuda_search_space & space,
        const asking_place & own,
        uint32_t row) {
    const row_place place(a, own.head_kv, own.row + row);
    float * out = space.is_beside ? a.out : a.work + llama_h2o_cuda_workspace(a).found;

    return out + (size_t(own.stream * a.n_tokens + place.token) * a.n_head + place.head) * (a.n_embd_head_v + 1);
}

// Logits of found keys, of 4*N_ROWS queries. A thread has a key of the tile, a warp every fourth query.
template <uint32_t N_ROWS>
__device__ void compute_found_logits(const llama_h2o_attention & a,
        const device_search & s,
        const llama_h2o_cuda_search_space & space,
        const asking_place & own,
        const float * tile,
        uint32_t first) {
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t warp   = threadIdx.x / N_WARP;
    const float * key     = tile + threadIdx.x % N_WARP * stride_of(n_embd);

    const float * queries[N_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < N_ROWS; ++i) {
        const uint32_t row = warp + i * N_WARPS < own.n ? warp + i * N_WARPS : 0;
        queries[i]         = a.work + space.queries + size_t(own.first + row) * n_embd;
    }

    float sums[N_ROWS] = {};
    for (int e = 0; e < int(n_embd); e += 4) {
        const float x[4] = { key[e], key[e + 1], key[e + 2], key[e + 3] };
#pragma unroll
        for (uint32_t i = 0; i < N_ROWS; ++i) {
            const float4 q  = *reinterpret_cast<const float4 *>(queries[i] + e);
            sums[i]        += x[0] * q.x + x[1] * q.y + x[2] * q.z + x[3] * q.w;
        }
    }
#pragma unroll
    for (uint32_t i = 0; i < N_ROWS; ++i) {
        const uint32_t row = warp + i * N_WARPS;
        float logit        = sums[i] * a.scale;
        if (s.cap > 0.0f) {
            logit = s.cap * tanhf(logit / s.cap);
        }
        if (row < own.n) {
            a.work[space.logits + size_t(own.first + row) * space.n_found + first + threadIdx.x % N_WARP] = logit;
        }
    }
}

// Logits become shares of the attention to cells and found rows in one. Returns the sum of a warp's.
__device__ inline float compute_shares(const llama_h2o_attention & a,
        const llama_h2o_cuda_search_space & space,
        const asking_place & own,
        uint32_t n_found) {
    const uint32_t lane = threadIdx.x % N_WARP;

    float of_warp = 0.0f;
    for (uint32_t row = threadIdx.x / N_WARP; row < own.n; row += N_WARPS) {
        const size_t query = own.first + row;
        float * x          = a.work + space.logits + query * space.n_found;
        const float lse    = a.work[space.asks + query * llama_h2o_cuda_search_space::N_ASK + 2];

        float top = MINUS_INF;
        for (uint32_t j = lane; j < n_found; j += N_WARP) {
            top = fmaxf(top, x[j]);
        }
        top = fmaxf(warp_max(top), lse);

        float sum = 0.0f;
        for (uint32_t j = lane; j < n_found; j += N_WARP) {
            x[j]  = expf(x[j] - top);
            sum  += x[j];
        }
        sum = team_sum<N_WARP>(sum);

        const float of_cells = expf(lse - top);
        const float by       = 1.0f / (sum + of_cells);
        for (uint32_t j = lane; j < n_found; j += N_WARP) {
            x[j] *= by;
        }
        of_warp += sum * by;
        if (lane == 0) {
            found_output(a, space, own, row)[a.n_embd_head_v] = of_cells * by;
        }
    }

    return of_warp;
}

// in 2^-32
__device__ inline unsigned long long as_whole(float x) {
    return x > 0.0f ? static_cast<unsigned long long>(x * 4294967296.0f) : 0;
}

// Notes how much found rows were looked at.
__device__ inline void note_found(const llama_h2o_attention & a,
        const llama_h2o_cuda_search_space & space,
        const llama_h2o_device_text & text,
        const asking_place & own,
        const uint32_t * rows,
        uint32_t n_found) {
    float of_head = 0.0f;
    for (uint32_t j = threadIdx.x; j < n_found; j += N_THREADS) {
        float squares = 0.0f;
        for (uint32_t row = 0; row < own.n; ++row) {
            const float share  = a.work[space.logits + size_t(own.first + row) * space.n_found + j];
            squares           += share * share;
        }
        const unsigned long long whole = as_whole(squares);

        of_head += squares;
        atomicAdd(text.weights + rows[j], whole);
        if (text.heads[own.head_kv].codes >= 0) {
            atomicAdd(text.interest + rows[j] / LLAMA_H2O_PASSAGE, whole);
        }
    }
    of_head = team_sum<N_WARP>(of_head);
    if (threadIdx.x % N_WARP == 0) {
        atomicAdd(text.gains + own.head_kv, as_whole(of_head));
    }
}

// Adds values of a tile, by their shares: a thread has four elements of 4*N_ROWS queries' results, a warp every fourth query.
template <uint32_t N_ROWS>
__device__ void add_found_values(const llama_h2o_attention & a,
        const llama_h2o_cuda_search_space & space,
        const asking_place & own,
        const float * tile,
        uint32_t first,
        uint32_t n,
        uint32_t n_embd,
        float (*sums)[4]) {
    const uint32_t lane = threadIdx.x % N_WARP;
    const uint32_t warp = threadIdx.x / N_WARP;
    if (4 * lane >= n_embd) {
        return;
    }

    const float * shares = a.work + space.logits + size_t(own.first) * space.n_found + first;
    for (int j = 0; j < int(n); ++j) {
        const float * from = tile + j * stride_of(n_embd) + 4 * lane;
        const float x[4]   = { from[0], from[1], from[2], from[3] };
#pragma unroll
        for (uint32_t i = 0; i < N_ROWS; ++i) {
            const uint32_t row = warp + i * N_WARPS < own.n ? warp + i * N_WARPS : 0;
            const float share  = shares[size_t(row) * space.n_found + j];
#pragma unroll
            for (uint32_t e = 0; e < 4; ++e) {
                sums[i][e] += share * x[e];
            }
        }
    }
}

// grid [n_blocks], N_THREADS threads. 4*N_ROWS: queries that ask together, at most
template <uint32_t N_ROWS>
__global__ void attend_found(
        const llama_h2o_attention a, const device_search s, const llama_h2o_cuda_search_space space) {
    // the rows once they are known
    __shared__ union {
        best_candidates best;
        float tile[N_TILE * MAX_STRIDE];
    } work;
    __shared__ uint32_t rows[MAX_ROWS];

    ggml_cuda_pdl_sync();

    const asking_place own(a, space, blockIdx.x);
    const llama_h2o_device_text & text = s.texts[own.stream * s.stride];

    const uint32_t lane    = threadIdx.x % N_WARP;
    const uint32_t warp    = threadIdx.x / N_WARP;
    const uint32_t n_found = gather_rows(a, s, space, text, own, work.best, rows);

    for (uint32_t first = 0; first < n_found; first += N_TILE) {
        const uint32_t n = n_found - first < N_TILE ? n_found - first : N_TILE;
        load_found<MAX_EMBD>(s, text, text.heads[own.head_kv].keys, rows + first, n, a.n_embd_head_k, work.tile);
        turn_found(s, text, rows + first, n, a.n_embd_head_k, work.tile);
        compute_found_logits<N_ROWS>(a, s, space, own, work.tile, first);
        __syncthreads();
    }

    const float of_warp = compute_shares(a, space, own, n_found);
    __syncthreads();
    if (n_found > 0) {
        note_found(a, space, text, own, rows, n_found);
    }
    if (n_found > 0 && lane == 0) {
        atomicAdd(text.shares, as_whole(of_warp));
    }

    for (uint32_t part = 0; part < a.n_embd_head_v; part += N_V_AT_ONCE) {
        const uint32_t n_embd = a.n_embd_head_v - part < N_V_AT_ONCE ? a.n_embd_head_v - part : N_V_AT_ONCE;

        float sums[N_ROWS][4] = {};
        for (uint32_t first = 0; first < n_found; first += N_TILE) {
            const uint32_t n = n_found - first < N_TILE ? n_found - first : N_TILE;
            load_found<N_V_AT_ONCE>(s, text, text.heads[own.head_kv].values + size_of_row(s.type, part), rows + first,
                    n, n_embd, work.tile);
            add_found_values<N_ROWS>(a, space, own, work.tile, first, n, n_embd, sums);
            __syncthreads();
        }
#pragma unroll
        for (uint32_t i = 0; i < N_ROWS; ++i) {
            for (uint32_t e = 0; e < 4 && 4 * lane < n_embd && warp + i * N_WARPS < own.n; ++e) {
                found_output(a, space, own, warp + i * N_WARPS)[part + 4 * lane + e] = sums[i][e];
            }
        }
    }
}

} // namespace
