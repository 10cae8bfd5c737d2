// Attention over the rows of a cache and the update of their scores, in one pass on the CPU: what the
// kernels read and write, and which of them this machine can run.
//
// Attention works in steps with a barrier between them. Each step is called once by every thread. Few queries are split by
// ranges of cells, and the last step puts the parts together; many queries are split by queries, in blocks that stay in the
// L2 cache. Where there are rows beside the cells (h2o-search.h), few queries look for them in a step between, and attend to
// what was found in another; many do so block by block.
//
// Parts and blocks are cut by the text alone, and sums go over them in their order: results have the same bits whatever
// number of threads share them.

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
    uint32_t n_kv;     // cells that are attended to, a multiple of LLAMA_H2O_TILE
    uint32_t n_tokens; // queries per stream
    uint32_t n_stream;

    float scale;

    operand q;    // F32
    operand k;    // F32, F16, Q8_0 or Q4_0
    operand v;    // likewise, in rows
    operand mask; // F16, added to the logits

    operand credit; // F32, multiplied with the probabilities before they are added to the scores; may be null
    operand kept;   // F32, multiplied with them before that: what found rows leave, see h2o-retrieved.h; may be null

    const float * sinks; // [n_head] a logit in each query's softmax that has no key and no value; may be null

    float * scores;  // probabilities are added to it; may be null
    float * squares; // squared probabilities are added to it; null without scores
    size_t nb_score_head;
    size_t nb_score_stream;

    float * out;  // F32 [n_embd_head_v, n_head, n_tokens, n_stream]
    float * work; // llama_h2o_work_size() floats

    uint32_t n_slots; // threads, on a GPU blocks, that there is work space for; others do nothing

    const llama_h2o_search * search; // rows beside the cells; null: there are none

    const float * lse; // where it is known: of the exponentials of the cells' logits, [n_stream][n_head][n_tokens]

    constexpr uint32_t n_group() const { return n_head / n_head_kv; }   // query heads of a KV group
    constexpr uint32_t n_rows() const { return n_group() * n_tokens; }  // queries of a KV head
    constexpr uint32_t n_pairs() const { return n_stream * n_head_kv; } // (stream, KV head)
    constexpr uint32_t n_sums() const { return squares ? 2 : scores ? 1 : 0; }
    // floats of the result, in whole cache lines
    constexpr size_t n_out() const { return (size_t(n_embd_head_v) * n_head * n_tokens * n_stream + 15) / 16 * 16; }

    constexpr bool is_few() const { return n_rows() <= MAX_FEW_ROWS; }

    static constexpr uint32_t MAX_FEW_ROWS = 16;

    // Tokens of many that look for rows together.
    constexpr uint32_t n_together() const { return n_group() < BLOCK ? BLOCK / n_group() : 1; }

    // queries that ask together
    constexpr uint32_t max_asking() const { return n_group() > BLOCK ? n_group() : BLOCK; }

    // queries that are handled at once, of many
    static constexpr uint32_t BLOCK = 64;
};

// cells that are handled at once
constexpr uint32_t LLAMA_H2O_TILE = 64;

// Floats of work space. Grows with the number of queries, so that space reserved for the largest batch
// is enough for every batch. The same for all kernels.
size_t llama_h2o_work_size(const llama_h2o_attention & attn);

// the same for beside()
size_t llama_h2o_alongside_size(const llama_h2o_attention & attn);

struct llama_h2o_kernel {
    const char * name;
    bool (*can_run)(); // whether this machine has its instructions; null: all that this build is for have them
    uint32_t n_lanes;  // elements of a row have to be a multiple of this
    bool is_exact;     // nothing is rounded before it is multiplied

    using step = void (*)(const llama_h2o_attention & attn, uint32_t ith, uint32_t nth);

    step attend;
    step search;    // of few queries, if there is something to search
    step retrieved; // likewise, behind it
    step combine;

    // Where others attend to the cells: F32 [n_embd_head_v + 1, n_head, n_tokens, n_stream], what found rows add to the
    // result of a query, and behind it the share of attention that is left to the cells. In one step.
    step alongside;

    // The codes of the keys i0 <= i < i1 of a page, see h2o-search.h. The rest of it is 0, and no key can be found yet.
    //   keys    [i1][n_embd]
    //   space   [2*n_embd]
    void (*encode)(const float * keys, uint32_t i0, uint32_t i1, uint32_t n_embd, char * codes, float * space);

    // A key of any number of elements, turned on: with one rounding, as it is to be stored, which may be in its own place.
    //   factors  see h2o-rotation.h; null: it is not turned
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

// The kernel of that name, or null if this build or this machine does not have it.
const llama_h2o_kernel * llama_h2o_find_kernel(const char * name);

// The fastest exact kernel for rows of so many elements, or null if there is none. For none there is one.
const llama_h2o_kernel * llama_h2o_best_kernel(uint32_t n_embd_head_k, uint32_t n_embd_head_v);

// one per instruction set; null where the compiler has no such instructions
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx512;
extern const llama_h2o_kernel * const llama_h2o_kernel_avx2;
extern const llama_h2o_kernel * const llama_h2o_kernel_neon;
extern const llama_h2o_kernel * const llama_h2o_kernel_portable;
