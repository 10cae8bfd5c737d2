// Compactions: the policy scores the rows of every head, the best are chosen, moved into the cells that stay, and the
// other cells are freed.

#pragma once

#include "cache/h2o-parts.h"

// Leaves the budget of a stream. Throws std::exception.
void llama_h2o_compact(llama_h2o_parts & parts, uint32_t s);

// A graph with as many moves on devices as a compaction can make.
llama_h2o_cache_graph llama_h2o_build_most_moves(const llama_h2o_parts & parts);
