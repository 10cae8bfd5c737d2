// A graph separate from the model's. It runs between two ubatches on the backends that hold the rows, so that the rows need
// not be copied to the host.

#pragma once

#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
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
    // maximum nodes of a layer, including views and inputs
    static constexpr size_t MAX_NODES = 160;

    explicit llama_h2o_cache_graph(size_t n_layer) : n_nodes(n_layer * MAX_NODES) {}

    // The context for new nodes. Throws std::bad_alloc.
    ggml_context * get_ctx();

    // An input tensor; run() copies the data to it.
    ggml_tensor * add_input(std::vector<float> data, int64_t ne0, int64_t ne1, int64_t ne2);

    // Adds a node that is computed for its side effects.
    void add(ggml_tensor * cur);

    // Adds a node whose values run() returns.
    void add_result(ggml_tensor * cur);

    bool empty() const { return !ctx; }

    // Whether the device that holds a tensor supports all ops of the graph.
    bool runs_next_to(const ggml_tensor * tensor) const;

    // Content of index tensors; run() copies it.
    std::map<ggml_tensor *, std::vector<int32_t>> lists;

private:
    friend class llama_h2o_graph_runner;

    size_t n_nodes;

    ggml_context_ptr ctx; // null until it is needed, like gf
    ggml_cgraph * gf = nullptr;

    std::vector<std::pair<ggml_tensor *, std::vector<float>>> inputs;
    std::vector<ggml_tensor *> results; // F32
};

// Runs cache graphs on the backends of a context, with all of its threads.
class llama_h2o_graph_runner {
public:
    using thread_setters = std::vector<std::pair<ggml_backend_t, ggml_backend_set_n_threads_t>>;

    // All arguments are owned by the context.
    llama_h2o_graph_runner(const llama_context & ctx,
            const std::vector<ggml_backend_t> & backends,
            const std::vector<ggml_backend_buffer_type_t> & bufts,
            const thread_setters & set_n_threads) :
        ctx(ctx), backends(backends), bufts(bufts), set_n_threads(set_n_threads) {}

    // Reserves memory for this graph and smaller ones; without it only empty graphs can run. Throws std::bad_alloc.
    void reserve(size_t n_layer, const llama_h2o_cache_graph & graph);

    // Returns the results. Calls from several threads run one after another. Throws std::exception if memory is short or
    // the graph fails.
    std::vector<std::vector<float>> run(const llama_h2o_cache_graph & graph) const;

    // the backend of buffers of this type
    ggml_backend_t backend_of(ggml_backend_buffer_type_t buft) const {
        return backends[std::find(bufts.begin(), bufts.end(), buft) - bufts.begin()];
    }

    // in bytes
    size_t size_on_devices() const;

private:
    const llama_context & ctx;
    const std::vector<ggml_backend_t> & backends;
    const std::vector<ggml_backend_buffer_type_t> & bufts;
    const thread_setters & set_n_threads;

    ggml_backend_sched_ptr sched; // null if there are no graphs
    std::unique_ptr<std::mutex> mutex = std::make_unique<std::mutex>();
};
