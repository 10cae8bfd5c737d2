#include "cache/h2o-cache-graph.h"

#include "cache/h2o-layer.h"

#include "llama-context.h"

#include <new>
#include <stdexcept>

ggml_context * llama_h2o_cache_graph::get_ctx() {
    if (!ctx) {
        const size_t size = n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false);
        ctx.reset(ggml_init({ size, nullptr, true }));
        if (!ctx) {
            throw std::bad_alloc();
        }
        gf = ggml_new_graph_custom(ctx.get(), n_nodes, false);
    }

    return ctx.get();
}

ggml_tensor * llama_h2o_cache_graph::add_input(std::vector<float> data, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * res = ggml_new_tensor_3d(get_ctx(), GGML_TYPE_F32, ne0, ne1, ne2);
    ggml_set_input(res);
    inputs.emplace_back(res, std::move(data));

    return res;
}

void llama_h2o_cache_graph::add(ggml_tensor * cur) {
    ggml_build_forward_expand(gf, cur);
}

void llama_h2o_cache_graph::add_result(ggml_tensor * cur) {
    cur = ggml_cont(ctx.get(), cur);
    ggml_set_output(cur);
    add(cur);

    results.push_back(cur);
}

bool llama_h2o_cache_graph::runs_next_to(const ggml_tensor * tensor) const {
    bool res = true;
    for (int i = 0; gf && i < ggml_graph_n_nodes(gf); ++i) {
        res = res && llama_h2o_has_op(tensor, ggml_graph_node(gf, i));
    }

    return res;
}

//
// running graphs
//

void llama_h2o_graph_runner::reserve(size_t n_layer, const llama_h2o_cache_graph & graph) {
    // copies, because ggml takes non-const pointers
    std::vector<ggml_backend_t> all                   = backends;
    std::vector<ggml_backend_buffer_type_t> all_bufts = bufts;

    sched.reset(ggml_backend_sched_new(all.data(), all_bufts.data(), all.size(),
            n_layer * llama_h2o_cache_graph::MAX_NODES, false, ctx.get_cparams().op_offload));

    if (graph.gf && !ggml_backend_sched_reserve(sched.get(), graph.gf)) {
        throw std::bad_alloc();
    }
}

std::vector<std::vector<float>> llama_h2o_graph_runner::run(const llama_h2o_cache_graph & graph) const {
    std::vector<std::vector<float>> res;
    if (graph.empty()) {
        return res;
    }

    const std::lock_guard<std::mutex> lock(*mutex);

    for (const auto & [backend, set] : set_n_threads) {
        set(backend, ctx.get_cparams().n_threads_batch);
    }
    ggml_backend_sched_reset(sched.get());
    if (!ggml_backend_sched_alloc_graph(sched.get(), graph.gf)) {
        throw std::bad_alloc();
    }
    for (const auto & [tensor, data] : graph.inputs) {
        ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
    }
    for (const auto & [tensor, list] : graph.lists) {
        ggml_backend_tensor_set(tensor, list.data(), 0, list.size() * sizeof(int32_t));
    }
    if (ggml_backend_sched_graph_compute(sched.get(), graph.gf) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("a graph over the rows of the cache failed");
    }
    for (const ggml_tensor * result : graph.results) {
        std::vector<float> & data = res.emplace_back(ggml_nelements(result));
        ggml_backend_tensor_get(result, data.data(), 0, ggml_nbytes(result));
    }

    return res;
}

size_t llama_h2o_graph_runner::size_on_devices() const {
    size_t res = 0;
    for (size_t i = 0; i < backends.size() && sched; ++i) {
        if (llama_h2o_is_on_device(bufts[i])) {
            res += ggml_backend_sched_get_buffer_size(sched.get(), backends[i]);
        }
    }

    return res;
}
