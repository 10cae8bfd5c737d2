// Rows in the memory of a device: moved from cell to cell by nodes of a graph, without a copy to the host.

#pragma once

#include "cache/h2o-cache-graph.h"
#include "cache/h2o-host-rows.h"
#include "cache/h2o-plan.h"

#include <cstdint>
#include <vector>

// A tensor of rows: K or V.
struct llama_h2o_device_rows {
    ggml_tensor * tensor;
    llama_h2o_row_layout layout;
    size_t offset; // bytes, of the stream
};

// Copies the rows of the KV heads of a layer, in K or in V, as llama_h2o_move_rows() does.
//   moves   [n_head_kv]
void llama_h2o_build_moves(llama_h2o_cache_graph & graph,
        const llama_h2o_device_rows & rows,
        uint32_t n_head_kv,
        const std::vector<llama_h2o_move> * moves);
