// Re-bases: when the text outgrows the positions that the model was trained on, the kept rows go back to earlier ones.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

bool llama_h2o_can_rebase(const llama_h2o_parts & parts);

// First position that a text cannot reach.
llama_pos llama_h2o_pos_limit(const llama_h2o_parts & parts);

// Rotates all rows of a stream back, by as much as the n_new tokens from p_next on have to go back. Distances stay, but for
// rows that would get a position below zero: those are packed at the start, in the order of the text. Each row goes from
// the position it has to the new one in a single step. Throws std::exception.
void llama_h2o_rebase(llama_h2o_parts & parts, uint32_t s, llama_pos p_next, llama_pos n_new);

// Gives the keys of a stream, all of whose cells are listed, the positions that rotate_back() says. Those that are restored
// are read from the archive.
//   next       rotary position of the next token then
//   restored   [n_heads]; or empty
void llama_h2o_rotate_rows(llama_h2o_parts & parts,
        uint32_t s,
        llama_pos back,
        llama_pos next,
        const std::vector<std::vector<llama_h2o_restored>> & restored);
