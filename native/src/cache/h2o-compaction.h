// Compactions: the policy scores the rows of every head; the rows with the highest scores are moved into the cells that
// stay, and the other cells are freed.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

// Reduces a stream to its budget. Throws std::exception.
void llama_h2o_compact(llama_h2o_parts & parts, uint32_t s);

// Keeps only these rows of a stream and moves their scores along. All cells in use must be listed. Throws std::exception.
void llama_h2o_leave(llama_h2o_parts & parts, uint32_t s, const llama_h2o_keep & keep);

// Moves as many rows on devices as a compaction can, from cell 0 to itself: this reserves the memory, and tests whether the
// bits survive. Rows are passed to devices as floats, whatever their type. A device that flushes denormals to zero would
// corrupt them, so the host moves the rows of its layers instead. Throws std::exception.
void llama_h2o_try_moves(llama_h2o_parts & parts);
