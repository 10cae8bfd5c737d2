// Spans of a text that are forgotten: their rows leave the cells, and what the archive has of them is not found any more.
//
// A row that is forgotten while it lies in a cell of its own goes with that cell, for all heads. Older rows lie in cells that
// heads share, and each head has evicted others of them. As every head has as many rows as there are cells, only so many cells
// can go as the head with the fewest forgotten rows has of them. The others keep their oldest ones: what is not forgotten
// stays in any case, and the next compactions take these rows first.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-parts.h"

#include <cstdint>
#include <vector>

// LLAMA_H2O_OK, or why they cannot be forgotten; nothing is changed then. Throws std::exception.
int32_t llama_h2o_drop_spans(llama_h2o_parts & parts, uint32_t s, const std::vector<llama_h2o_span> & spans);

// Whether a head holds rows that are forgotten.
bool llama_h2o_holds_dropped(const llama_h2o_parts & parts, uint32_t s);
