// What a state must meet that is about to be restored.

#pragma once

#include "cache/h2o-query-ring.h"

#include <cstdint>
#include <vector>

// Throws std::runtime_error that names what the state has.
void llama_h2o_expect(bool fits, const char * what);

// The slots of a ring of last queries, of a text up to the newest position.
void llama_h2o_expect_queries(const std::vector<llama_h2o_query_slot> & slots, int32_t newest, int32_t shift);
