// Pinned rows that were evicted come back from the archive, at a compaction, in the places of rows that leave.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"

#include <cstdint>
#include <vector>

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
