// Many keys looked at by a few queries, without values: how large the logits of each block of keys are. What the kernels
// read and write; llama_h2o_kernel::scan does it. A call is the work of one thread, and reads every key once, whatever
// the number of queries.

#pragma once

#include "ggml.h"

#include <cstddef>
#include <cstdint>

// keys of a block
constexpr uint32_t LLAMA_H2O_SCAN_BLOCK = 16;

// Queries of one KV head, in the order that the kernels read them in. Rows are in the order of the text: token by token,
// the heads of the group side by side.
//   queries   [n_rows][n_embd]
//   scale     of the logits
//   res       llama_h2o_arranged_size() floats
void llama_h2o_arrange_queries(const float * queries, uint32_t n_rows, uint32_t n_embd, float scale, float * res);

size_t llama_h2o_arranged_size(uint32_t n_rows, uint32_t n_embd);

// One KV head of a layer. Strides are in bytes.
struct llama_h2o_scan {
    uint32_t n_embd; // elements of a row, a multiple of the kernel's n_lanes
    uint32_t n_rows; // queries

    const float * queries; // of llama_h2o_arrange_queries()
    float cap;             // soft cap of the logits; 0: none

    ggml_type type; // F32, F16, Q8_0 or Q4_0
    const char * keys;
    size_t nb_row; // from key to key
    uint32_t n_keys;

    // [n_keys] the first row of the queries that a key counts for, it counts for all after that, too; n_rows: for none.
    // Null: every key counts for all.
    const uint32_t * first_row;

    // Keys are looked at as if they were turned on to another position: pairs of elements by these factors, pair by
    // pair cosine and sine. Null: as they are.
    const float * turn;   // [n_dims/2][2]
    uint32_t n_turn_dims; // n_dims
    uint32_t first_turn;  // element of a row that they begin at
    bool turn_neox;       // pairs are (i, i + n_dims/2), not (2*i, 2*i + 1)

    // Keys that are stored mixed, after they were turned: block by block of n_mix elements, by this matrix, its own
    // inverse. The queries are not mixed, then. Null: queries are as keys are.
    const float * mix; // [n_mix][n_mix]
    uint32_t n_mix;    // a multiple of 4

    // Of the keys of a block that count for a row: the largest logit, and the sum of exp(logit - that). Minus infinity
    // and 0 if there is none.
    float * max; // [n_blocks()][n_rows]
    float * sum; // [n_blocks()][n_rows]

    float * work; // llama_h2o_scan_work_size() floats

    constexpr uint32_t n_blocks() const { return (n_keys + LLAMA_H2O_SCAN_BLOCK - 1) / LLAMA_H2O_SCAN_BLOCK; }
};

size_t llama_h2o_scan_work_size(uint32_t n_rows, uint32_t n_embd);
