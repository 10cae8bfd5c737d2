// Which archived rows queries would attend to most, on the device: as h2o-search.h has it, but that queries are rounded to a byte
// an element, of which four are multiplied with signs at a time.

#pragma once

#include "cuda/h2o-cuda-best.cuh"
#include "cuda/h2o-cuda-store.cuh"

namespace {

constexpr uint32_t PAGE       = LLAMA_H2O_PAGE;
constexpr uint32_t MAX_ASKING = llama_h2o_attention::BLOCK;

static_assert(PAGE == N_THREADS, "a thread for each key of a page");

// What the device needs of a search.
struct device_search {
    ggml_type type;
    size_t nb_row;
    llama_h2o_turning turning;
    uint32_t n_query_mix;
    uint32_t n_find;
    float cap;

    const llama_h2o_device_text * texts;
    uint32_t stride;

    explicit device_search(const llama_h2o_search & s) :
        type(s.type), nb_row(s.nb_row), turning(s.turning), n_query_mix(s.n_query_mix), n_find(s.n_find), cap(s.cap),
        texts(s.on_device), stride(s.device_stride) {}
};

// Queries that ask together, of a KV head: blocks have one of these each.
struct asking_place {
    uint32_t pair;
    uint32_t stream;
    uint32_t head_kv;
    uint32_t row;   // first query of the KV head
    uint32_t first; // of all queries
    uint32_t n;

    __device__ asking_place(const llama_h2o_attention & a, const llama_h2o_cuda_search_space & space, uint32_t index) :
        pair(index / space.n_groups), stream(pair / a.n_head_kv), head_kv(pair % a.n_head_kv),
        row(index % space.n_groups * space.n_asking), first(pair * a.n_rows() + row),
        n(a.n_rows() - row < space.n_asking ? a.n_rows() - row : space.n_asking) {}
};

// hidden rows in focus: a bit each
__device__ inline uint32_t in_focus(const llama_h2o_device_text & text, uint32_t head_kv) {
    if (text.n_pages == 0 || text.focus == llama_h2o_search_text::NO_FOCUS) {
        return 0;
    }
    const uint64_t * hidden = text.hidden + size_t(head_kv) * text.n_pages * (PAGE / 64);

    return uint32_t(hidden[text.focus / 64] >> text.focus % 64);
}

// rows that queries find by their codes
__device__ inline uint32_t n_to_find(
        const llama_h2o_attention & a, const llama_h2o_device_text & text, const asking_place & own) {
    if (text.n_pages == 0 || text.heads[own.head_kv].codes < 0) {
        return 0;
    }
    const llama_h2o_device_text::head & head = text.heads[own.head_kv];

    const uint64_t n = uint64_t(own.n / a.n_group()) * head.n_alone;

    return n < head.n_together ? uint32_t(n) : head.n_together;
}

// The logarithm of the sum of exp(logit) over the cells, of a query: known to all threads of a warp.
__device__ inline float cells_lse(
        const llama_h2o_attention & a, const llama_h2o_cuda_search_space & space, uint32_t pair, uint32_t row) {
    if (space.is_beside) {
        const row_place place(a, pair % a.n_head_kv, row);
        return a.lse[size_t(pair / a.n_head_kv * a.n_head + place.head) * a.n_tokens + place.token];
    }

    const part_sums sums(a, llama_h2o_cuda_workspace(a), pair, row);

    return sums.max + logf(sums.sum);
}

// What a query asks with. grid [n_rows/N_WARPS, n_pairs], a warp for each query
__global__ void ask(const llama_h2o_attention a, const device_search s, const llama_h2o_cuda_search_space space) {
    __shared__ float of_warps[N_WARPS * MAX_EMBD];

    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t lane   = threadIdx.x % N_WARP;
    const uint32_t warp   = threadIdx.x / N_WARP;
    const uint32_t pair   = blockIdx.y;
    const uint32_t row    = blockIdx.x * N_WARPS + warp;

    ggml_cuda_pdl_sync();
    if (row >= a.n_rows()) {
        return;
    }

    const size_t i_query = size_t(pair) * a.n_rows() + row;
    const row_place place(a, pair % a.n_head_kv, row);

    float * x      = of_warps + warp * MAX_EMBD;
    const auto * q = reinterpret_cast<const float *>(at(a.q, pair / a.n_head_kv, place.head, place.token));
    for (uint32_t i = lane; i < MAX_EMBD; i += N_WARP) {
        x[i] = i < n_embd ? q[i] : 0.0f;
    }
    __syncwarp();
    if (s.n_query_mix > 0) {
        mix_row(x, n_embd, s.n_query_mix);
    }
    for (uint32_t i = lane; i < n_embd; i += N_WARP) {
        a.work[space.queries + i_query * n_embd + i] = x[i];
    }
    mix_row(x, n_embd, llama_h2o_code_layout { n_embd }.n_mix());

    float most = 0.0f;
    for (uint32_t i = lane; i < n_embd; i += N_WARP) {
        most = fmaxf(most, fabsf(x[i]));
    }
    most = warp_max(most);

    const float by = most > 0.0f ? 127.0f / most : 0.0f;
    float total    = 0.0f;
    for (uint32_t i = lane; i < space.n_words; i += N_WARP) {
        uint32_t word = 0;
        for (uint32_t k = 0; k < 4; ++k) {
            const int byte  = __float2int_rn(x[4 * i + k] * by);
            word           |= uint32_t(byte & 255) << 8 * k;
            total          += float(byte);
        }
        reinterpret_cast<uint32_t *>(a.work + space.words)[i_query * space.n_words + i] = word;
    }
    total = team_sum<N_WARP>(total);

    const float lse = cells_lse(a, space, pair, row);
    if (lane == 0) {
        float * asks = a.work + space.asks + i_query * llama_h2o_cuda_search_space::N_ASK;
        asks[0]      = most / 127.0f * a.scale;
        asks[1]      = total;
        asks[2]      = lse;
    }
}

// What a block looks with, in shared memory.
template <uint32_t N_WORDS>
struct looking {
    uint32_t words[MAX_ASKING][N_WORDS];
    float steps[MAX_ASKING];
    float totals[MAX_ASKING];
    float lse[MAX_ASKING];
    float centres[MAX_ASKING]; // products with the centre of a page
};

// Four bits as four bytes.
__device__ inline uint32_t spread(uint32_t bits) {
    return bits * 0x00204081 & 0x01010101;
}

// How much a key is looked at by the query that does so most.
template <uint32_t N_WORDS>
__device__ float look_at(const looking<N_WORDS> & look,
        const asking_place & own,
        const llama_h2o_code_layout & layout,
        const char * codes,
        float cap) {
    const uint32_t shift = threadIdx.x / (PAGE / 2) * 4;

    uint32_t signs[N_WORDS];
#pragma unroll
    for (uint32_t g = 0; g < N_WORDS; ++g) {
        const uint32_t byte = g < layout.n_groups() ? uint8_t(codes[g * (PAGE / 2) + threadIdx.x % (PAGE / 2)]) : 0;

        signs[g] = spread(byte >> shift & 15);
    }
    const float factor = to_float(reinterpret_cast<const uint16_t *>(codes + layout.scales())[threadIdx.x]);

    float top = MINUS_INF;
    for (uint32_t row = 0; row < own.n; ++row) {
        int product = 0;
#pragma unroll
        for (uint32_t g = 0; g < N_WORDS; ++g) {
            product = ggml_cuda_dp4a(int(signs[g]), int(look.words[row][g]), product);
        }
        float logit = factor * look.steps[row] * (2.0f * float(product) - look.totals[row]) + look.centres[row];
        if (cap > 0.0f) {
            logit = cap * tanhf(logit / cap);
        }
        top = fmaxf(top, logit - look.lse[row]);
    }

    return top;
}

// Looks through a part of the pages. grid [n_parts, n_blocks], N_THREADS threads
template <uint32_t N_WORDS>
__global__ void look(const llama_h2o_attention a, const device_search s, const llama_h2o_cuda_search_space space) {
    __shared__ looking<N_WORDS> work;
    __shared__ best_candidates best;

    ggml_cuda_pdl_sync();

    const asking_place own(a, space, blockIdx.y);
    const llama_h2o_device_text & text = s.texts[own.stream * s.stride];
    const uint32_t n_find              = n_to_find(a, text, own);
    if (n_find == 0) {
        return;
    }

    const uint32_t n_embd = a.n_embd_head_k;
    const llama_h2o_code_layout layout { n_embd };
    const float * queries = a.work + space.queries + size_t(own.first) * n_embd;

    for (uint32_t i = threadIdx.x; i < own.n * N_WORDS; i += N_THREADS) {
        const auto * words = reinterpret_cast<const uint32_t *>(a.work + space.words);
        const uint32_t row = i / N_WORDS;

        work.words[row][i % N_WORDS] =
                i % N_WORDS < space.n_words ? words[size_t(own.first + row) * space.n_words + i % N_WORDS] : 0;
    }
    for (uint32_t row = threadIdx.x; row < own.n; row += N_THREADS) {
        const float * asks = a.work + space.asks + size_t(own.first + row) * llama_h2o_cuda_search_space::N_ASK;
        work.steps[row]    = asks[0];
        work.totals[row]   = asks[1];
        work.lse[row]      = asks[2];
    }
    best.start();

    const auto * hidden = text.hidden + size_t(own.head_kv) * text.n_pages * (PAGE / 64);
    const char * codes  = text.codes + size_t(text.heads[own.head_kv].codes) * text.max_pages * layout.size();

    const uint32_t end = uint32_t(uint64_t(blockIdx.x + 1) * text.n_pages / gridDim.x);

    uint32_t n = 0;
    for (uint32_t page = uint32_t(uint64_t(blockIdx.x) * text.n_pages / gridDim.x); page < end; ++page) {
        uint64_t wanted = hidden[page * (PAGE / 64) + threadIdx.x / 64] >> threadIdx.x % 64 & 1;
        if (text.focus != llama_h2o_search_text::NO_FOCUS &&
                (page * PAGE + threadIdx.x) / LLAMA_H2O_PASSAGE == text.focus / LLAMA_H2O_PASSAGE) {
            wanted = 0; // all heads read it as it is
        }

        const char * of_page = codes + (text.first_slot + page) % text.max_pages * layout.size();
        const auto * centre  = reinterpret_cast<const uint16_t *>(of_page + layout.centre());
        for (uint32_t row = threadIdx.x / N_WARP; row < own.n; row += N_WARPS) {
            float sum = 0.0f;
            for (uint32_t i = threadIdx.x % N_WARP; i < n_embd; i += N_WARP) {
                sum += queries[row * n_embd + i] * to_float(centre[i]);
            }
            sum = team_sum<N_WARP>(sum);
            if (threadIdx.x % N_WARP == 0) {
                work.centres[row] = sum * a.scale;
            }
        }
        __syncthreads();

        const float score = look_at(work, own, layout, of_page, s.cap);
        best.add(wanted ? make_candidate(score, page * PAGE + threadIdx.x) : 0, n, n_find);
    }
    best.keep_best(n, n_find);

    auto * candidates = reinterpret_cast<candidate *>(a.work + space.candidates) +
                        (size_t(blockIdx.y) * space.n_parts + blockIdx.x) * s.n_find;
    for (uint32_t i = threadIdx.x; i < n_find; i += N_THREADS) {
        candidates[i] = i < n ? best.list[i] : 0;
    }
}

} // namespace
