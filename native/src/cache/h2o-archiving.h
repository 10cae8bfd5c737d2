// The archive of a stream: what goes into it, when, and what comes back from it.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

#include <cstdint>
#include <vector>

ggml_type llama_h2o_type_of(llama_h2o_archive_type type);

// For one stream, and its index; none if the params ask for none.
void llama_h2o_make_archive(llama_h2o_parts & parts, uint32_t s);

// Devices look for rows of their layers, where they can: once it is known what attends there. Throws std::bad_alloc.
void llama_h2o_share_archives(llama_h2o_parts & parts);

// What the user should know, as bits of llama_h2o_note.
uint32_t llama_h2o_notes(const llama_h2o_parts & parts, uint32_t s);

// The first position to archive. Where the archive does not reach the rows that all heads have, those between are lost, and
// it begins anew behind them.
int32_t llama_h2o_next_to_archive(const llama_h2o_stream & st);

// The token at a position is about to be decoded; -1 if it has no id.
void llama_h2o_note_token(llama_h2o_parts & parts, uint32_t s, int32_t pos, int32_t token);

// The tokens at positions p0 <= p < p1 are gone.
void llama_h2o_drop_tokens(llama_h2o_parts & parts, uint32_t s, int32_t p0, int32_t p1);

// Copies the rows of the tokens that are not recent any more. Comes before a compaction chooses, while every head has all
// of them.
void llama_h2o_archive_rows(llama_h2o_parts & parts, uint32_t s);

// After whatever changes the archive, or what the heads hold: queries find the rows that are archived and that their head
// does not hold.
void llama_h2o_update_index(llama_h2o_parts & parts, uint32_t s);

// Pinned positions whose rows the archive has, ascending.
std::vector<int32_t> llama_h2o_restorable(const llama_h2o_stream & st);

// Those whose rows a head lacks.
//   held   positions of its rows
std::vector<int32_t> llama_h2o_missing(const std::vector<int32_t> & restorable, const std::vector<int32_t> & held);

// Whether a compaction brings rows back.
bool llama_h2o_has_missing(const llama_h2o_parts & parts, uint32_t s);

// Puts rows into cells whose rows nobody keeps. Throws std::exception.
//   restored   [n_heads]
void llama_h2o_restore(
        llama_h2o_parts & parts, uint32_t s, const std::vector<std::vector<llama_h2o_restored>> & restored);
