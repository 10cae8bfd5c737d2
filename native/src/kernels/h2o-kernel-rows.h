// Reading the rows of the cache in vectors of any width, and splitting work over threads.

#pragma once

#include "kernels/h2o-kernel.h"
#include "kernels/h2o-row-types.h"
#include "kernels/h2o-simd.h"

namespace {

constexpr uint32_t W     = vec::n;
constexpr uint32_t TILE  = LLAMA_H2O_TILE;
constexpr uint32_t BLOCK = llama_h2o_attention::BLOCK;

// accumulators used in parallel, limited by the registers
constexpr int SIDE_BY_SIDE = W == 8 ? 2 : 4;

constexpr float MINUS_INF        = -INFINITY;
constexpr uint16_t F16_MINUS_INF = 0xfc00;

inline uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}
inline uint32_t max_u32(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}
inline void fill(float * x, uint32_t n, float value) {
    for (uint32_t i = 0; i < n; ++i) {
        x[i] = value;
    }
}

//
// row types: load(row, i) reads the elements from i on, i a multiple of W
//

struct rows_f32 {
    static vec load(const char * row, uint32_t i) { return v_load(reinterpret_cast<const float *>(row) + i); }
};

struct rows_f16 {
    static vec load(const char * row, uint32_t i) { return v_load_f16(row + i * sizeof(ggml_fp16_t)); }
};

inline float load_f16(const char * p) {
    ggml_fp16_t x;
    std::memcpy(&x, p, sizeof(x));
#if !defined(H2O_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
    return _cvtsh_ss(x);
#else
    return ggml_fp16_to_fp32(x);
#endif
}

// blocks of 32 elements: the scale, then the elements
struct rows_q8_0 {
    static vec load(const char * row, uint32_t i) {
        const char * block = row + i / 32 * (2 + 32);
        return v_mul(v_set(load_f16(block)), v_load_i8(block + 2 + i % 32));
    }
};

// the same; byte i has elements i and i + 16
struct rows_q4_0 {
    static vec load(const char * row, uint32_t i) {
        const char * block = row + i / 32 * (2 + 16);
        return v_mul(v_set(load_f16(block)), v_load_i4(block + 2 + i % 16, i % 32 >= 16));
    }
};

using row_types = llama_h2o_row_types<rows_f32, rows_f16, rows_q8_0, rows_q4_0>;

//
// addresses
//

// the queries of a KV head, by token, then by head of the group
inline const float * query(const llama_h2o_attention & a, uint32_t s, uint32_t head_kv, uint32_t row) {
    const uint32_t token = row / a.n_group();
    const uint32_t head  = head_kv * a.n_group() + row % a.n_group();
    return reinterpret_cast<const float *>(a.q.data + s * a.q.nb_stream + head * a.q.nb_head + token * a.q.nb_row);
}

// The logit of the attention sink of a query; -inf without sinks.
inline float sink_of(const llama_h2o_attention & a, uint32_t head_kv, uint32_t row) {
    return a.sinks ? a.sinks[head_kv * a.n_group() + row % a.n_group()] : MINUS_INF;
}

inline float * output(const llama_h2o_attention & a, uint32_t s, uint32_t head_kv, uint32_t row) {
    const uint32_t token = row / a.n_group();
    const uint32_t head  = head_kv * a.n_group() + row % a.n_group();
    return a.out + (size_t(s * a.n_tokens + token) * a.n_head + head) * a.n_embd_head_v;
}

inline const char * rows_of(const llama_h2o_attention::operand & x, uint32_t s, uint32_t head_kv, uint32_t cell) {
    return x.data + s * x.nb_stream + head_kv * x.nb_head + cell * x.nb_row;
}

inline const char * mask_of(const llama_h2o_attention & a, uint32_t s, uint32_t row) {
    return a.mask.data + s * a.mask.nb_stream + row / a.n_group() * a.mask.nb_row;
}

// credit of a query for all cells; may be null
inline const float * credit_of(const llama_h2o_attention & a, uint32_t s, uint32_t row) {
    if (!a.credit.data) {
        return nullptr;
    }
    return reinterpret_cast<const float *>(
            a.credit.data + s * a.credit.nb_stream + row / a.n_group() * a.credit.nb_row);
}

// scores or squares of a KV head
inline float * of_head(const llama_h2o_attention & a, float * collected, uint32_t s, uint32_t head_kv) {
    return reinterpret_cast<float *>(
            reinterpret_cast<char *>(collected) + s * a.nb_score_stream + head_kv * a.nb_score_head);
}

struct range {
    uint32_t begin;
    uint32_t end;
};

// the share of a thread in n items
inline range share(uint32_t n, uint32_t ith, uint32_t nth) {
    return { uint32_t(uint64_t(n) * ith / nth), uint32_t(uint64_t(n) * (ith + 1) / nth) };
}

// the share of a thread in the first n_cells, in whole cache lines of scores
inline range share_cells(uint32_t n_cells, uint32_t ith, uint32_t nth) {
    constexpr uint32_t LINE = 16;

    const range r = share((n_cells + LINE - 1) / LINE, ith, nth);
    return { r.begin * LINE, r.end * LINE };
}

} // namespace
