// Marks: what the policy has collected when a text ended at a position. A tail that is removed down to a mark leaves
// nothing behind: the text goes on as if it had never been there, bit for bit.

#pragma once

#include "graph/h2o-queries.h"

#include "llama.h"

#include <cstdint>
#include <vector>

// the oldest one goes
constexpr size_t LLAMA_H2O_MAX_MARKS = 8;

struct llama_h2o_text_mark {
    llama_pos pos; // of the next token
    llama_pos pos_forgotten;

    uint32_t v_head; // where the search for free cells begins
    uint32_t n_span; // cells up to the last one in use

    std::vector<llama_h2o_query_slot> queries;

    std::vector<uint8_t> collected; // of the layers, one after the other
};
