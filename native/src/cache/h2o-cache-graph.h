// A graph of our own, apart from the model's: run between two ubatches on the backends that hold the rows, so that
// these stay where they are.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

struct llama_context;

class llama_h2o_cache_graph {
public:
    // nodes of one layer at most, views and inputs included
    static constexpr size_t MAX_NODES = 160;

    explicit llama_h2o_cache_graph(size_t n_layer) : n_nodes(n_layer * MAX_NODES) {}

    // For new nodes. Throws std::bad_alloc.
    ggml_context * get_ctx();

    // What the data is copied to when the graph runs.
    ggml_tensor * add_input(std::vector<float> data, int64_t ne0, int64_t ne1, int64_t ne2);

    // A node that is computed for what it writes.
    void add(ggml_tensor * cur);

    // A node that run() returns.
    void add_result(ggml_tensor * cur);

    bool empty() const { return !ctx; }

    // Whether a device has all of its ops, that of a tensor's memory.
    bool runs_next_to(const ggml_tensor * tensor) const;

    // What tensors of indices hold when the graph runs.
    std::map<ggml_tensor *, std::vector<int32_t>> lists;

private:
    friend class llama_h2o_graph_runner;

    size_t n_nodes;

    ggml_context_ptr ctx;       // null until it is needed
    ggml_cgraph * gf = nullptr; // likewise

    std::vector<std::pair<ggml_tensor *, std::vector<float>>> inputs;
    std::vector<ggml_tensor *> results; // F32
};

// Runs such graphs on the backends of a context, on all of its threads.
class llama_h2o_graph_runner {
public:
    using thread_setters = std::vector<std::pair<ggml_backend_t, ggml_backend_set_n_threads_t>>;

    // All of them belong to the context.
    llama_h2o_graph_runner(const llama_context & ctx,
            const std::vector<ggml_backend_t> & backends,
            const std::vector<ggml_backend_buffer_type_t> & bufts,
            const thread_setters & set_n_threads) :
        ctx(ctx), backends(backends), bufts(bufts), set_n_threads(set_n_threads) {}

    // Takes memory for this graph and smaller ones; without this, only empty graphs can run. Throws std::bad_alloc.
    void reserve(size_t n_layer, const llama_h2o_cache_graph & graph);

    // Returns the results. From several threads it is one after the other. Throws std::exception if there is too little
    // memory, or if the graph fails.
    std::vector<std::vector<float>> run(const llama_h2o_cache_graph & graph) const;

    // bytes
    size_t size_on_devices() const;

private:
    const llama_context & ctx;
    const std::vector<ggml_backend_t> & backends;
    const std::vector<ggml_backend_buffer_type_t> & bufts;
    const thread_setters & set_n_threads;

    ggml_backend_sched_ptr sched; // null if there are no graphs
    std::unique_ptr<std::mutex> mutex = std::make_unique<std::mutex>();
};
