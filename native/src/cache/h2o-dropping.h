// Dropped spans of a text: their rows are removed from the cells, and the archive's copies are no longer retrieved.
//
// If a dropped token is in its own cell, the cell is freed for all heads. Older rows are in cells shared by rows of different
// positions, and each head has evicted different ones. Every head has one row per cell, so only as many of these cells can be
// freed as the head with the fewest dropped rows has. The other heads keep their oldest dropped rows until the next
// compactions, which evict them first. Rows that were not dropped always stay.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-parts.h"

#include <cstdint>
#include <vector>

// Returns LLAMA_H2O_OK, or an error if the spans cannot be dropped; nothing is changed then. Throws std::exception.
int32_t llama_h2o_drop_spans(llama_h2o_parts & parts, uint32_t s, const std::vector<llama_h2o_span> & spans);

// Whether a head still holds dropped rows.
bool llama_h2o_holds_dropped(const llama_h2o_parts & parts, uint32_t s);
