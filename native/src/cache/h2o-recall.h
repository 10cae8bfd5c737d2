// Recall: rows of the archive back in the cache, those that the last queries of a text attend to most.

#pragma once

#include <cstdint>

struct llama_h2o_parts;

// Chooses up to n_rows rows for every head, which the last n_asking tokens look for, and puts them in the place of those
// recalled before. Returns how many every head has.
uint32_t llama_h2o_recall_rows(llama_h2o_parts & parts, uint32_t s, uint32_t n_rows, uint32_t n_asking);

// Drops them.
void llama_h2o_drop_rows(llama_h2o_parts & parts, uint32_t s);

// Drops them if the archive has not all of them any more: placed anew, they are copied from it.
void llama_h2o_drop_lost_rows(llama_h2o_parts & parts, uint32_t s);

// So many tokens are not in the archive any more, because pages of its file are missing or damaged.
void llama_h2o_note_lost_rows(llama_h2o_parts & parts, uint32_t s, int32_t n_tokens);

// Takes an empty cell for recalled rows.
void llama_h2o_take_recalled_cell(llama_h2o_parts & parts, uint32_t s, uint32_t cell);

// Copies them from the archive once more, rotated for today's positions: after a re-base. Where a page is damaged that they
// lie in, they are dropped, and the archive begins behind it.
void llama_h2o_place_rows(llama_h2o_parts & parts, uint32_t s);
