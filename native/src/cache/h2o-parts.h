// The data of an eviction, shared by the code that compacts, rotates, saves and restores rows.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-cache-graph.h"
#include "cache/h2o-cells.h"
#include "cache/h2o-layer.h"
#include "cache/h2o-stream.h"
#include "graph/h2o-threads.h"
#include "policies/h2o-policy.h"

#include <algorithm>
#include <memory>
#include <vector>

class llama_h2o_window;
class llama_memory_recurrent;
struct llama_context;

struct llama_h2o_parts {
    // Throws llama_h2o_policy_error if the policy in the params is invalid.
    llama_h2o_parts(llama_context & ctx,
            const llama_h2o_params & params,
            std::vector<llama_h2o_layer> layers,
            llama_h2o_cells cells,
            llama_h2o_graph_runner graphs);

    llama_context & ctx;

    const std::unique_ptr<const llama_h2o_policy> policy;
    const llama_h2o_params params; // policy and scorer point into the object above

    std::vector<llama_h2o_layer> layers;
    std::vector<std::unique_ptr<llama_h2o_device_texts>> device_texts; // of devices that search for archived rows
    std::vector<llama_h2o_stream> streams;

    llama_h2o_cells cells;
    llama_h2o_graph_runner graphs;

    const uint32_t n_cells; // per stream

    // the other parts of the memory
    std::shared_ptr<llama_h2o_window> window;     // may be null
    llama_memory_recurrent * recurrent = nullptr; // may be null

    llama_h2o_threads threads; // number of threads of the graphs

    llama_h2o_breaker * breaker = nullptr; // abort callback; may be null

    bool refused = false; // after an operation that cannot be exact: decoding fails until the cache is cleared

    // of all layers
    uint32_t n_heads() const;
    uint32_t n_query_heads() const;

    // Whether a layer of the model is the first one with eviction.
    bool is_first(int32_t il) const { return il == int32_t(layers.front().shape.il); }

    // Start of the tail that can be removed: every head has all of its rows, and windowed and recurrent layers can go back.
    llama_pos pos_removable(uint32_t s) const;

    // maximum number of pinned positions
    uint64_t max_pinned() const { return uint64_t(params.pinned) + params.heavy; }

    uint64_t n_budget() const { return llama_h2o_n_budget(params); }
    uint64_t n_capacity() const { return llama_h2o_n_capacity(params); }

    // maximum rows per head that a compaction moves
    uint64_t max_moves() const { return std::min(n_cells - n_budget(), n_budget()); }

    // Waits for the devices first, because queued graphs may read archived rows that this frees.
    void reset_stream(uint32_t s);

    // Whether devices search for archived rows in all streams. If they cannot read these rows, the CPU searches.
    bool search_on_devices() const;

    // Calls fn(), which changes rows in place. If it throws, the stream stays marked as broken.
    template <typename F>
    void change_rows(uint32_t s, F fn) {
        const bool was_broken = streams[s].broken;

        streams[s].broken = true;
        fn();
        streams[s].broken = was_broken;
    }
};
