#include "cache/h2o-cache-graph.h"

#include "cache/h2o-layer.h"

#include "llama-context.h"

#include <new>

ggml_context * llama_h2o_cache_graph::get_ctx() {
    if (!ctx) {
        const ggml_init_params init = {
            /*.mem_size   =*/n_nodes * ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false),
            /*.mem_buffer =*/nullptr,
            /*.no_alloc   =*/true,
        };

        ctx.reset(ggml_init(init));
        if (!ctx) {
            throw std::bad_alloc();
        }
        gf = ggml_new_graph_custom(ctx.get(), n_nodes, false);
    }

    return ctx.get();
}

ggml_tensor * llama_h2o_cache_graph::new_input(
        ggml_type type, const void * data, int64_t ne0, int64_t ne1, int64_t ne2) {
    ggml_tensor * res = ggml_new_tensor_3d(get_ctx(), type, ne0, ne1, ne2);
    ggml_set_input(res);

    const auto * bytes = static_cast<const uint8_t *>(data);
    inputs.emplace_back(res, std::vector<uint8_t>(bytes, bytes + ggml_nbytes(res)));

    return res;
}

ggml_tensor * llama_h2o_cache_graph::add_input(const std::vector<float> & data, int64_t ne0, int64_t ne1, int64_t ne2) {
    return new_input(GGML_TYPE_F32, data.data(), ne0, ne1, ne2);
}

ggml_tensor * llama_h2o_cache_graph::add_input(const std::vector<int32_t> & data) {
    return new_input(GGML_TYPE_I32, data.data(), int64_t(data.size()), 1, 1);
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

// The scheduler gives an op that a device lacks to the CPU, but would end the process where the op writes what lies there.
static void expect_ops(ggml_cgraph * gf) {
    for (int i = 0; i < ggml_graph_n_nodes(gf); ++i) {
        const ggml_tensor * node = ggml_graph_node(gf, i);
        if (!node->view_src || !node->view_src->buffer) {
            continue;
        }

        ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(node->view_src->buffer));
        if (dev && !ggml_backend_dev_supports_op(dev, node)) {
            throw llama_h2o_cache_graph::device_error(ggml_op_name(node->op));
        }
    }
}

void llama_h2o_cache_graph::reserve(ggml_backend_sched_t sched) const {
    expect_ops(gf);
    if (!ggml_backend_sched_reserve(sched, gf)) {
        throw std::bad_alloc();
    }
}

std::vector<std::vector<float>> llama_h2o_cache_graph::run(ggml_backend_sched_t sched) const {
    ggml_backend_sched_reset(sched);
    if (!ggml_backend_sched_alloc_graph(sched, gf)) {
        throw std::bad_alloc();
    }
    for (const auto & [tensor, data] : inputs) {
        ggml_backend_tensor_set(tensor, data.data(), 0, data.size());
    }
    if (ggml_backend_sched_graph_compute(sched, gf) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("a graph over the rows of the cache failed");
    }

    std::vector<std::vector<float>> res;
    for (const ggml_tensor * result : results) {
        std::vector<float> & data = res.emplace_back(ggml_nelements(result));
        ggml_backend_tensor_get(result, data.data(), 0, ggml_nbytes(result));
    }

    return res;
}

//
// running them
//

void llama_h2o_graph_runner::reserve(size_t n_layer, const std::vector<const llama_h2o_cache_graph *> & graphs) {
    // copies, because ggml takes pointers to what it may write
    std::vector<ggml_backend_t> all                   = backends;
    std::vector<ggml_backend_buffer_type_t> all_bufts = bufts;

    sched.reset(ggml_backend_sched_new(all.data(), all_bufts.data(), all.size(),
            n_layer * llama_h2o_cache_graph::MAX_NODES, false, ctx.get_cparams().op_offload));

    for (const auto * graph : graphs) {
        if (!graph->empty()) {
            graph->reserve(sched.get());
        }
    }
}

std::vector<std::vector<float>> llama_h2o_graph_runner::run(const llama_h2o_cache_graph & graph) {
    if (graph.empty()) {
        return {};
    }

    for (const auto & [backend, set] : set_n_threads) {
        set(backend, ctx.get_cparams().n_threads_batch);
    }

    return graph.run(sched.get());
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
