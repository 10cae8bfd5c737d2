// Compactions: the policy scores the rows of every head, the best are chosen, moved into the cells that stay, and the
// other cells are freed.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

// Leaves the budget of a stream. Throws std::exception.
void llama_h2o_compact(llama_h2o_parts & parts, uint32_t s);

// Leaves these rows of a stream, whose cells in use are all listed; what is collected follows them. Throws std::exception.
void llama_h2o_leave(llama_h2o_parts & parts, uint32_t s, const llama_h2o_keep & keep);

// Moves as many rows on devices as a compaction can, from cell 0 to itself: takes the memory for that, and shows whether bits
// stay. Rows are given to devices as floats, whatever they are. One that takes tiny floats for zero would damage them, so
// from then on the host moves the rows of its layers. Throws std::exception.
void llama_h2o_try_moves(llama_h2o_parts & parts);
