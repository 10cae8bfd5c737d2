// The archive of a stream: which rows are archived, when, and which are restored from it.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

#include <cstdint>
#include <vector>

ggml_type llama_h2o_type_of(llama_h2o_archive_type type);

// Creates the archive and the index of a stream, if the params have recall > 0.
void llama_h2o_make_archive(llama_h2o_parts & parts, uint32_t s);

// Lets devices search for rows of their layers where they can. Call after the first graph, which shows how each layer
// attends. Throws std::bad_alloc.
void llama_h2o_share_archives(llama_h2o_parts & parts);

// Notes for the user: bits of llama_h2o_note.
uint32_t llama_h2o_notes(const llama_h2o_parts & parts, uint32_t s);

// The first position to archive. If the archive ends before the rows that all heads have, the rows in between are lost, and
// a new archive starts after them.
int32_t llama_h2o_next_to_archive(const llama_h2o_stream & st);

// Records a token that is about to be decoded; -1 if it has no id.
void llama_h2o_note_token(llama_h2o_parts & parts, uint32_t s, int32_t pos, int32_t token);

// Removes the recorded tokens at positions p0 <= p < p1.
void llama_h2o_drop_tokens(llama_h2o_parts & parts, uint32_t s, int32_t p0, int32_t p1);

// Archives the rows of the tokens that are no longer recent. Must run before a compaction chooses, while every head still
// has all of them.
void llama_h2o_archive_rows(llama_h2o_parts & parts, uint32_t s);

// Updates the index after any change of the archive or of the rows in the cells: queries retrieve archived rows that their
// head does not hold.
void llama_h2o_update_index(llama_h2o_parts & parts, uint32_t s);

// Pinned positions whose rows are in the archive, ascending.
std::vector<int32_t> llama_h2o_restorable(const llama_h2o_stream & st);

// The restorable positions that a head lacks.
//   held   positions of its rows
std::vector<int32_t> llama_h2o_missing(const std::vector<int32_t> & restorable, const std::vector<int32_t> & held);

// Whether a compaction would restore rows.
bool llama_h2o_has_missing(const llama_h2o_parts & parts, uint32_t s);

// Writes archived rows over unchosen rows. Throws std::exception.
//   restored   [n_heads]
void llama_h2o_restore(
        llama_h2o_parts & parts, uint32_t s, const std::vector<std::vector<llama_h2o_restored>> & restored);
