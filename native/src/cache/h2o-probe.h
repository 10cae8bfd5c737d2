// The input of a policy at a compaction.

#pragma once

#include "cache/h2o-parts.h"
#include "policies/h2o-selection.h"

#include <optional>
#include <vector>

// Builds a graph that computes the attention of the last queries. It runs on the device of the rows, on all threads, and returns
// one number per row. One result per layer, each [n_cells, 1, n_head_kv]; empty if the policy does not need it.
llama_h2o_cache_graph llama_h2o_build_probe(const llama_h2o_parts & parts, uint32_t s);

// Collects the input for one head after another. Reuses its work space.
class llama_h2o_sight {
public:
    //   used    the cells in use
    //   probed  results of the graph above
    llama_h2o_sight(const llama_h2o_parts & parts,
            uint32_t s,
            const std::vector<uint32_t> & used,
            const std::vector<std::vector<float>> & probed);

    // The rows of the next head, with the positions of the selection. Valid until the next call. Throws std::runtime_error if a
    // collected value, [n_cells], or a computed one is NaN or infinite.
    const llama_h2o_head_rows & read(size_t ikv,
            uint32_t head,
            const llama_h2o_selection & selection,
            const float * sums,
            const float * squares);

private:
    const llama_h2o_parts & parts;
    const uint32_t s;
    const std::vector<uint32_t> & used;
    const std::vector<std::vector<float>> & probed;

    llama_h2o_head_rows rows = {};

    std::vector<float> attention;
    std::vector<float> squares;
    std::vector<float> query_attention;
    std::vector<float> value_norms;
    std::vector<float> keys;

    std::vector<uint32_t> slots; // of the queries, in text order
    std::vector<int32_t> query_pos;
    std::vector<float> queries;

    // of the last layer
    size_t ikv_last = SIZE_MAX;
    std::optional<llama_h2o_cell_rows> k;
    std::optional<llama_h2o_cell_rows> v;

    void see_vectors(const llama_h2o_layer & layer, size_t ikv, uint32_t head);
    void read_keys(const llama_h2o_layer & layer, uint32_t head);
    void read_queries(const llama_h2o_layer & layer, uint32_t head);
    void read_value_norms(const llama_h2o_layer & layer, uint32_t head);
};
