// What an eviction consists of, for those who compact, rotate, save and restore rows.

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
    // Throws llama_h2o_policy_error if no policy can be made of the params.
    llama_h2o_parts(llama_context & ctx,
            const llama_h2o_params & params,
            std::vector<llama_h2o_layer> layers,
            llama_h2o_cells cells,
            llama_h2o_graph_runner graphs);

    llama_context & ctx;

    const std::unique_ptr<const llama_h2o_policy> policy;
    const llama_h2o_params params; // with the text and the scorer of the policy above

    std::vector<llama_h2o_layer> layers;
    std::vector<std::unique_ptr<llama_h2o_device_texts>> device_texts; // of devices that look for archived rows
    std::vector<llama_h2o_stream> streams;

    llama_h2o_cells cells;
    llama_h2o_graph_runner graphs;

    const uint32_t n_cells; // of a stream

    // what there is beside the cache that is evicted
    std::shared_ptr<llama_h2o_window> window;     // or null
    llama_memory_recurrent * recurrent = nullptr; // or null

    llama_h2o_threads threads; // that compute the graphs

    llama_h2o_breaker * breaker = nullptr; // who may break off a batch; null: nobody

    bool refused = false; // something that cannot be undone: decode nothing until the cache is cleared

    // KV heads of all layers, and query heads
    uint32_t n_heads() const;
    uint32_t n_query_heads() const;

    // Whether a layer of the model is the first one of a graph that is evicted.
    bool is_first(int32_t il) const { return il == int32_t(layers.front().shape.il); }

    // From here on a tail can be removed: every head has all its rows, and a window or a state is still known.
    llama_pos pos_removable(uint32_t s) const;

    // positions of a text
    uint64_t max_pinned() const { return uint64_t(params.pinned) + params.heavy; }

    uint64_t n_budget() const { return llama_h2o_n_budget(params); }
    uint64_t n_capacity() const { return llama_h2o_n_capacity(params); }

    // rows of a head that a compaction moves
    uint64_t max_moves() const { return std::min(n_cells - n_budget(), n_budget()); }

    // Waits for the devices first: queued graphs may read archived rows, which this frees.
    void reset_stream(uint32_t s);

    // Whether devices look for archived rows of their layers, of all streams: the CPU does where they cannot read these.
    bool search_on_devices() const;

    // Calls fn(), which changes rows where they lie. If it throws, nobody knows which.
    template <typename F>
    void change_rows(uint32_t s, F fn) {
        const bool was_broken = streams[s].broken;

        streams[s].broken = true;
        fn();
        streams[s].broken = was_broken;
    }
};
