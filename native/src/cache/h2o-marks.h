// Marks: what the policy has collected when a text ended at a position. A tail that is removed down to a mark leaves
// nothing behind: the text goes on as if it had never been there, bit for bit.

#pragma once

#include "cache/h2o-query-ring.h"
#include "recall/h2o-index.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct llama_h2o_parts;

// the oldest one goes
constexpr size_t LLAMA_H2O_MAX_MARKS = 8;

struct llama_h2o_text_mark {
    int32_t pos; // of the next token
    int32_t pos_decayed;

    uint32_t v_head; // where the search for free cells begins
    uint32_t n_span; // cells up to the last one in use

    llama_h2o_query_ring queries;

    std::vector<uint8_t> collected; // of the layers, one after the other

    llama_h2o_gains gains; // of the index, if there is one
};

// At the present end of a stream. Throws std::bad_alloc.
void llama_h2o_set_mark(llama_h2o_parts & parts, uint32_t s);

// The same before tokens from p_first on are decoded, for llama_h2o_go_back_to_mark() alone: they may be broken off. Not
// where there is a mark.
void llama_h2o_keep_before(llama_h2o_parts & parts, uint32_t s, int32_t p_first);

// The last mark up to a position, or 0.
int32_t llama_h2o_last_mark(const llama_h2o_parts & parts, uint32_t s, int32_t pos);

// Before the tail from p0 on is removed.
void llama_h2o_go_back_to_mark(llama_h2o_parts & parts, uint32_t s, int32_t p0);
