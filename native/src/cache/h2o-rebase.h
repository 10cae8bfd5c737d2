// Re-bases: when the text exceeds the trained context length, the kept rows get lower RoPE positions.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

bool llama_h2o_can_rebase(const llama_h2o_parts & parts);

// First position that a text cannot reach.
llama_pos llama_h2o_pos_limit(const llama_h2o_parts & parts);

// Lowers the RoPE positions of all rows of a stream, so that the n_new tokens from p_next on fit. Distances between rows do
// not change, except for rows that would get a negative position: these are packed at the start, in text order. Each key is
// rotated once. Throws std::exception.
void llama_h2o_rebase(llama_h2o_parts & parts, uint32_t s, llama_pos p_next, llama_pos n_new);

// Rotates the keys of a stream to the positions from rotate_back(). All cells must be listed. Restored keys are read from the
// archive.
//   next       RoPE position of the next token afterwards
//   restored   [n_heads]; may be empty
void llama_h2o_rotate_rows(llama_h2o_parts & parts,
        uint32_t s,
        llama_pos back,
        llama_pos next,
        const std::vector<std::vector<llama_h2o_restored>> & restored);
