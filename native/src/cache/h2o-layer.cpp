#include "cache/h2o-layer.h"

#include "policies/h2o-policy.h"

#include <algorithm>
#include <map>
#include <new>

static ggml_context_ptr new_tensor_context(size_t n_tensors) {
    const ggml_init_params init = {
        /*.mem_size   =*/n_tensors * ggml_tensor_overhead(),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    ggml_context_ptr res { ggml_init(init) };
    if (!res) {
        throw std::bad_alloc();
    }

    return res;
}

// The last queries of all heads and streams; null if none are needed.
static ggml_tensor * new_ring(ggml_context * ctx, const llama_h2o_layer_shape & shape, uint32_t n, uint32_t n_stream) {
    return n == 0 ? nullptr : ggml_new_tensor_4d(ctx, GGML_TYPE_F32, shape.k.n_embd_head, n, shape.n_head, n_stream);
}

static ggml_backend_buffer_ptr alloc_buffer(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft) };
    if (!buf) {
        throw std::bad_alloc();
    }

    return buf;
}

void llama_h2o_alloc_tensors(std::vector<llama_h2o_layer> & layers,
        const llama_h2o_policy & policy,
        uint32_t n_stream,
        uint32_t n_tokens,
        std::vector<llama_h2o_memory> & collected,
        std::vector<llama_h2o_memory> & weights) {
    // what the policy collects of a layer lies where its K lies, so that no step copies anything between devices
    std::map<ggml_backend_buffer_type_t, std::vector<llama_h2o_layer *>> layers_of_buft;
    for (auto & layer : layers) {
        layers_of_buft[ggml_backend_buffer_get_type(layer.tensors.k->buffer)].push_back(&layer);
    }

    for (const auto & [buft, some] : layers_of_buft) {
        ggml_context_ptr ctx_collected = new_tensor_context(3 * some.size());
        ggml_context_ptr ctx_weights   = new_tensor_context(some.size());

        std::map<std::pair<uint32_t, uint32_t>, ggml_tensor *> shared; // weights by n_head and n_head_kv

        for (llama_h2o_layer * layer : some) {
            const auto & shape = layer->shape;
            auto & tensors     = layer->tensors;

            tensors.scores =
                    ggml_new_tensor_3d(ctx_collected.get(), GGML_TYPE_F32, shape.k.n_cells, shape.n_head_kv, n_stream);
            ggml_format_name(tensors.scores, "cache_scores_l%d", shape.il);
            if (policy.has_need(LLAMA_H2O_NEEDS_SQUARES)) {
                tensors.squares = ggml_dup_tensor(ctx_collected.get(), tensors.scores);
                ggml_format_name(tensors.squares, "cache_squares_l%d", shape.il);
            }
            tensors.queries = new_ring(ctx_collected.get(), shape, policy.n_queries, n_stream);

            auto & one = shared[{ shape.n_head, shape.n_head_kv }];
            if (!one) {
                one = ggml_new_tensor_1d(ctx_weights.get(), GGML_TYPE_F32, int64_t(n_tokens) * shape.n_head);
            }
            tensors.weights = one;
        }

        ggml_backend_buffer_ptr buf_collected = alloc_buffer(ctx_collected.get(), buft);
        ggml_backend_buffer_ptr buf_weights   = alloc_buffer(ctx_weights.get(), buft);

        for (const auto & [heads, tensor] : shared) {
            const std::vector<float> data(ggml_nelements(tensor), float(heads.second) / float(heads.first));
            ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
        }

        ggml_backend_buffer_clear(buf_collected.get(), 0);
        collected.emplace_back(std::move(ctx_collected), std::move(buf_collected));
        weights.emplace_back(std::move(ctx_weights), std::move(buf_weights));
    }
}

std::vector<std::pair<ggml_tensor *, llama_h2o_row_layout>> llama_h2o_layer::rows() const {
    if (!tensors.v) {
        return { { tensors.k, shape.k } };
    }
    return { { tensors.k, shape.k }, { tensors.v, shape.v } };
}

ggml_tensor * llama_h2o_layer::build_sum(ggml_context * ctx, ggml_tensor * values, ggml_tensor * weights) const {
    // unlike a row sum, the outer product reads the values as they lie
    ggml_tensor * sum = ggml_out_prod(ctx, values, weights);

    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensors.scores->buffer));
    if (!dev || ggml_backend_dev_supports_op(dev, sum)) {
        return sum;
    }

    // Metal has none
    weights = ggml_reshape_4d(ctx, weights, weights->ne[1], 1, weights->ne[2], weights->ne[3]);
    sum     = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, values)), weights);
    ggml_prec_set_acc(sum, GGML_PREC_F32);

    return sum;
}

size_t llama_h2o_layer_tensors::size_of_collected() const {
    size_t res = 0;
    for (const ggml_tensor * tensor : { scores, squares, queries }) {
        res += tensor ? ggml_nbytes(tensor) : 0;
    }

    return res;
}

bool llama_h2o_is_on_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);

    return !ggml_backend_buft_is_host(buft) && dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

ggml_tensor * llama_h2o_layer_attention::build_probs(
        ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask) const {
    ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    if (kq_cap > 0.0f) {
        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, 1.0f / kq_cap)), kq_cap);
    }

    kq = ggml_soft_max_ext(ctx, kq, kq_mask, kq_scale, 0.0f);
    ggml_soft_max_add_sinks(kq, sinks);

    return kq;
}
