// What a policy sees of the rows at a compaction.

#pragma once

#include "cache/h2o-parts.h"
#include "policies/h2o-selection.h"

#include <optional>
#include <vector>

// Computes the attention that the last queries pay. It is a graph of ggml ops of its own, so that it runs where the rows
// lie, on all threads, and only one number per row comes back. Its results are of the layers, each [n_cells, 1, n_head_kv];
// empty if the policy does not ask for it.
llama_h2o_cache_graph llama_h2o_build_probe(const llama_h2o_parts & parts, uint32_t s);

// Gathers what there is to see of one head after the other. Keeps its work space in between.
class llama_h2o_sight {
public:
    //   used    the cells whose rows are seen
    //   probed  what the graph above has computed
    llama_h2o_sight(const llama_h2o_parts & parts,
            uint32_t s,
            const std::vector<uint32_t> & used,
            const std::vector<std::vector<float>> & probed);

    // The rows of the next head, which the selection has. Valid until the next call. Throws std::runtime_error if what was
    // collected, [n_cells], or computed of them is no number.
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

    std::vector<uint32_t> slots; // of the queries, in the order of the text
    std::vector<int32_t> query_pos;
    std::vector<float> queries;

    // of the layer that was looked at last
    size_t ikv_last = SIZE_MAX;
    std::optional<llama_h2o_cell_rows> k;
    std::optional<llama_h2o_cell_rows> v;

    void see_vectors(const llama_h2o_layer & layer, size_t ikv, uint32_t head);
    void read_keys(const llama_h2o_layer & layer, uint32_t head);
    void read_queries(const llama_h2o_layer & layer, uint32_t head);
    void read_value_norms(const llama_h2o_layer & layer, uint32_t head);
};
