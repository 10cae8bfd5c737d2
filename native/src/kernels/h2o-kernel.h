// CPU kernels that compute attention over the rows of a cache and update their scores in one pass: their arguments, and the
// choice of a kernel for this processor.
//
// Attention is a sequence of steps with a barrier in between. Every thread calls each step once. For few queries, the cells are
// split into parts, and the last step merges the parts. For many queries, the queries are split into blocks that fit the L2
// cache. If there is an archive (h2o-search.h), few queries search it in a second step and attend to the retrieved rows in a
// third; for many queries this happens block by block.
//
// Parts and blocks depend only on the text, and sums have a fixed order, so results do not depend on the number of threads.

#pragma once

#include "kernels/h2o-rotation.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>

struct llama_h2o_search;

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
    uint32_t n_kv;     // cells, a multiple of LLAMA_H2O_TILE
    uint32_t n_tokens; // queries per stream
    uint32_t n_stream;

    float scale;

    operand q;    // F32
    operand k;    // F32, F16, Q8_0 or Q4_0
    operand v;    // the same types, not transposed
    operand mask; // F16, added to the logits

    operand credit; // F32 weights of the probabilities in the scores; may be null
    operand kept;   // F32 share of attention that retrieved rows leave to the cells, see h2o-retrieved.h; may be null

    const float * sinks; // [n_head] attention sinks: a logit in each query's softmax without key and value; may be null

    float * scores;  // probabilities are added to it; may be null
    float * squares; // squared probabilities are added to it; null without scores
    size_t nb_score_head;
    size_t nb_score_stream;

    float * out;  // F32 [n_embd_head_v, n_head, n_tokens, n_stream]
    float * work; // llama_h2o_work_size() floats

    uint32_t n_slots; // threads (on a GPU: blocks) with work space; others do nothing

    const llama_h2o_search * search; // null: no archive

    const float * lse; // log-sum-exp of the cells' logits if known, [n_stream][n_head][n_tokens]

    constexpr uint32_t n_group() const { return n_head / n_head_kv; }   // query heads of a KV group
    constexpr uint32_t n_rows() const { return n_group() * n_tokens; }  // queries of a KV head
    constexpr uint32_t n_pairs() const { return n_stream * n_head_kv; } // (stream, KV head)
    constexpr uint32_t n_sums() const { return squares ? 2 : scores ? 1 : 0; }
    // floats of the result, padded to cache lines
    constexpr size_t n_out() const { return (size_t(n_embd_head_v) * n_head * n_tokens * n_stream + 15) / 16 * 16; }

    constexpr bool is_few() const { return n_rows() <= MAX_FEW_ROWS; }

    static constexpr uint32_t MAX_FEW_ROWS = 16;

    // tokens of a prompt that search together
    constexpr uint32_t n_together() const { return n_group() < BLOCK ? BLOCK / n_group() : 1; }

    // maximum queries that search together
    constexpr uint32_t max_asking() const { return n_group() > BLOCK ? n_group() : BLOCK; }

    // queries per block
    static constexpr uint32_t BLOCK = 64;
};

// cells per tile
constexpr uint32_t LLAMA_H2O_TILE = 64;

// Floats of work space. Grows with the number of queries, so that space reserved for the largest batch is enough for every
// batch. The same for all kernels.
size_t llama_h2o_work_size(const llama_h2o_attention & attn);

// the same for alongside()
size_t llama_h2o_alongside_size(const llama_h2o_attention & attn);

struct llama_h2o_kernel {
    const char * name;
    bool (*can_run)(); // whether this processor has its instructions; null: always
    uint32_t n_lanes;  // row sizes must be a multiple of this
    bool is_exact;     // factors of products are not rounded

    using step = void (*)(const llama_h2o_attention & attn, uint32_t ith, uint32_t nth);

    step attend;
    step search;    // for few queries with an archive
    step retrieved; // for few queries with an archive, after the search
    step combine;

    // Retrieved rows only, in one step, if another op attends to the cells: F32 [n_embd_head_v + 1, n_head, n_tokens, n_stream],
    // the contribution of retrieved rows to the result of a query, and the share of attention left to the cells.
    step alongside;

    // Computes the codes of the keys i0 <= i < i1 of a page, see h2o-search.h. The other codes are 0: never retrieved.
    //   keys    [i1][n_embd]
    //   space   [2*n_embd]
    void (*encode)(const float * keys, uint32_t i0, uint32_t i1, uint32_t n_embd, char * codes, float * space);

    // Rotates a key of any size and converts it, with one rounding. from == to is allowed.
    //   factors  see h2o-rotation.h; null: no rotation
    //   space    [n_embd]
    void (*rotate)(const llama_h2o_rotation & how,
            const float * factors,
            uint32_t n_embd,
            llama_h2o_key_form from_form,
            const void * from,
            llama_h2o_key_form to_form,
            void * to,
            float * space);
};

// The kernel with this name, or null if this build or this processor does not have it.
const llama_h2o_kernel * llama_h2o_find_kernel(const char * name);

// The fastest exact kernel for these row sizes, or null. For (0, 0) there always is one.
const llama_h2o_kernel * llama_h2o_best_kernel(uint32_t n_embd_head_k, uint32_t n_embd_head_v);

// one per instruction set; null if the compiler does not support it
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx2;
extern const llama_h2o_kernel * const llama_h2o_kernel_neon;
extern const llama_h2o_kernel * const llama_h2o_kernel_portable;
