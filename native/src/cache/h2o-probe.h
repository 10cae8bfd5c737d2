// What a policy measures of the rows at a compaction. It is a graph of ggml ops of its own, so that it runs where the
// rows lie, on all threads, and only one number per row comes back.

#pragma once

#include "cache/h2o-parts.h"

// Its results are of the layers, each [n_cells, n_probed, n_head_kv]; empty if the policy measures nothing.
llama_h2o_cache_graph llama_h2o_build_probe(const llama_h2o_parts & parts, uint32_t s);
