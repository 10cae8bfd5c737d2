// Marks: copies of the collected scores at a position. After the tail is removed back to a mark, the text continues bit for bit
// as if the tail had never been decoded.

#pragma once

#include "cache/h2o-query-ring.h"
#include "recall/h2o-index.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_h2o_parts;

// setting another mark drops the oldest one
constexpr size_t LLAMA_H2O_MAX_MARKS = 8;

struct llama_h2o_text_mark {
    int32_t pos; // position of the next token
    int32_t pos_decayed;

    uint32_t v_head; // where the search for free cells begins
    uint32_t n_span; // cells up to the last one in use

    llama_h2o_query_ring queries;

    std::vector<uint8_t> collected; // of all layers, concatenated

    llama_h2o_gains gains; // of the index, if there is an archive
};

// Sets a mark at the end of a stream. Throws std::bad_alloc.
void llama_h2o_set_mark(llama_h2o_parts & parts, uint32_t s);

// Sets a temporary mark before a batch that starts at p_first, in case the batch is aborted. Does nothing if there is a mark
// at this position. Only llama_h2o_go_back_to_mark() uses it.
void llama_h2o_keep_before(llama_h2o_parts & parts, uint32_t s, int32_t p_first);

// The position of the last mark that is not after pos, or 0.
int32_t llama_h2o_last_mark(const llama_h2o_parts & parts, uint32_t s, int32_t pos);

// Restores the mark at p0, if there is one. Call before the tail from p0 on is removed.
void llama_h2o_go_back_to_mark(llama_h2o_parts & parts, uint32_t s, int32_t p0);
