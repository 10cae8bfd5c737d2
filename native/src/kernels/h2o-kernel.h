// Attention over the rows of a cache and the update of their scores, in one pass on the CPU: what the
// kernels read and write, and which of them this machine can run. They also scan keys, see h2o-scan.h.
//
// Attention works in two steps with a barrier between them, each in n_slots parts that threads share. Each step is
// called once by every thread. Few queries are split by ranges of cells, and the second step puts the parts
// together; many queries are split by queries, in blocks that stay in the L2 cache.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// One layer. Strides are in bytes.
struct llama_h2o_attention {
    struct operand {
        const char * data;
        ggml_type type;
        size_t nb_row;    // from token to token, or from cell to cell
        size_t nb_head;   // from head to head
        size_t nb_stream; // from stream to stream
    };

    uint32_t n_embd_head_k;
    uint32_t n_embd_head_v;
    uint32_t n_head;
    uint32_t n_head_kv;
    uint32_t n_kv;     // cells that are attended to, a multiple of LLAMA_H2O_TILE
    uint32_t n_tokens; // queries per stream
    uint32_t n_stream;

    float scale;

    operand q;    // F32
    operand k;    // F32, F16, Q8_0 or Q4_0
    operand v;    // likewise, in rows
    operand mask; // F16, added to the logits

    operand credit; // F32, multiplied with the probabilities before they are added to the scores; may be null

    float * scores;  // probabilities are added to it; may be null
    float * squares; // squared probabilities are added to it; null without scores
    size_t nb_score_head;
    size_t nb_score_stream;

    float * out;  // F32 [n_embd_head_v, n_head, n_tokens, n_stream]
    float * work; // llama_h2o_work_size() floats

    uint32_t n_slots; // parts that the work is split into: threads that can take part

    constexpr uint32_t n_group() const { return n_head / n_head_kv; }   // query heads of a KV group
    constexpr uint32_t n_rows() const { return n_group() * n_tokens; }  // queries of a KV head
    constexpr uint32_t n_pairs() const { return n_stream * n_head_kv; } // (stream, KV head)
    constexpr uint32_t n_sums() const { return squares ? 2 : scores ? 1 : 0; }
    // floats of the result, in whole cache lines
    constexpr size_t n_out() const { return (size_t(n_embd_head_v) * n_head * n_tokens * n_stream + 15) / 16 * 16; }

    constexpr bool is_few() const { return n_rows() <= MAX_FEW_ROWS; }

    static constexpr uint32_t MAX_FEW_ROWS = 16;
};

// cells that are handled at once
constexpr uint32_t LLAMA_H2O_TILE = 64;
// queries that are handled at once, of many
constexpr uint32_t LLAMA_H2O_BLOCK = 64;

// Floats of work space. Grows with the number of queries, so that space reserved for the largest batch
// is enough for every batch.
size_t llama_h2o_work_size(const llama_h2o_attention & attn);

struct llama_h2o_scan;

struct llama_h2o_kernel {
    const char * name;
    uint32_t n_lanes; // elements of a row have to be a multiple of this
    bool is_exact;    // nothing is rounded before it is multiplied

    void (*attend)(const llama_h2o_attention & attn, uint32_t ith, uint32_t nth);
    void (*combine)(const llama_h2o_attention & attn, uint32_t ith, uint32_t nth);

    void (*scan)(const llama_h2o_scan & scan);
};

// The kernel of that name, or null if this build or this machine does not have it.
const llama_h2o_kernel * llama_h2o_find_kernel(const char * name);

// The fastest exact kernel for rows of so many elements, or null if there is none.
const llama_h2o_kernel * llama_h2o_best_kernel(uint32_t n_embd_head_k, uint32_t n_embd_head_v);

// one per instruction set; null where the compiler has no such instructions
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx2;
extern const llama_h2o_kernel * const llama_h2o_kernel_neon;
extern const llama_h2o_kernel * const llama_h2o_kernel_portable;
