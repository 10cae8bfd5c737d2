#include "cache/h2o-layer.h"

#include "policies/h2o-policy.h"

#include <algorithm>
#include <map>
#include <new>

static ggml_context_ptr new_tensor_context(size_t n_tensors) {
    ggml_context_ptr res { ggml_init({ n_tensors * ggml_tensor_overhead(), nullptr, true }) };
    if (!res) {
        throw std::bad_alloc();
    }

    return res;
}

static ggml_backend_buffer_ptr checked(ggml_backend_buffer_t buf) {
    if (!buf) {
        throw std::bad_alloc();
    }

    return ggml_backend_buffer_ptr(buf);
}

// Pinned host memory, which a device copies from and to at full speed; null if it has no such memory.
static ggml_backend_buffer_ptr alloc_space(ggml_backend_buffer_type_t buft, size_t size) {
    ggml_backend_buffer_type_t on_host = ggml_backend_dev_host_buffer_type(ggml_backend_buft_get_device(buft));

    return checked(ggml_backend_buft_alloc_buffer(on_host ? on_host : ggml_backend_cpu_buffer_type(), size));
}

// The divisors of a policy by age, up to the age from which on they are constant, or to a limit.
static std::vector<double> divisors_of(const llama_h2o_policy & policy) {
    std::vector<double> res(1 << 19);
    for (size_t n = 0; n < res.size(); ++n) {
        res[n] = policy.divisor(double(n));
    }
    while (res.size() > 1 && res[res.size() - 2] == res.back()) {
        res.pop_back();
    }

    return res;
}

void llama_h2o_alloc_tensors(std::vector<llama_h2o_layer> & layers,
        const llama_h2o_policy & policy,
        uint32_t n_stream,
        uint32_t n_tokens,
        uint32_t n_moves,
        std::vector<llama_h2o_memory> & collected,
        std::vector<llama_h2o_memory> & weights) {
    // the scores of a layer are on the same device as its K, so that no step copies between devices
    std::map<ggml_backend_buffer_type_t, std::vector<llama_h2o_layer *>> layers_of_buft;
    std::map<ggml_backend_buffer_type_t, uint32_t> n_heads_of;
    for (auto & layer : layers) {
        const auto buft = ggml_backend_buffer_get_type(layer.tensors.k->buffer);
        layers_of_buft[buft].push_back(&layer);
        n_heads_of[buft] += layer.shape.n_head_kv;
    }

    for (const auto & [buft, some] : layers_of_buft) {
        ggml_context_ptr ctx_collected = new_tensor_context(3 * some.size() + 5);
        ggml_context_ptr ctx_weights   = new_tensor_context(some.size());

        const bool has_squares = policy.has_need(LLAMA_H2O_NEEDS_SQUARES);
        const uint32_t n_heads = n_heads_of[buft];
        ggml_tensor * sums     = ggml_new_tensor_3d(ctx_collected.get(), GGML_TYPE_F32, some.front()->shape.k.n_cells,
                has_squares ? 2 * n_heads : n_heads, n_stream);

        uint32_t n_viewed    = 0; // heads
        const auto view_next = [&](uint32_t n_head_kv) {
            n_viewed += n_head_kv;
            return ggml_view_3d(ctx_collected.get(), sums, sums->ne[0], n_head_kv, n_stream, sums->nb[1], sums->nb[2],
                    sums->nb[1] * (n_viewed - n_head_kv));
        };

        ggml_tensor * moves = nullptr;
        void * space        = nullptr;
        llama_h2o_choice_tensors choice;
        std::vector<double> divisors;
        if (!ggml_backend_buft_is_host(buft)) {
            const bool has_kernels =
                    std::all_of(some.begin(), some.end(), [](const auto * layer) { return layer->attention.on_cuda; });
            if (has_kernels && policy.divisor(1.0) != 0.0) {
                ggml_context * ctx    = ctx_collected.get();
                const int64_t n_cells = sums->ne[0];

                divisors        = divisors_of(policy);
                choice.divisors = ggml_new_tensor_1d(ctx, GGML_TYPE_F64, int64_t(divisors.size()));
                choice.pos      = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_heads * n_cells + 2);
                choice.bits     = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, (n_cells + 31) / 32 + 1, n_heads);
            }

            moves = ggml_new_tensor_1d(
                    ctx_collected.get(), GGML_TYPE_I32, int64_t(4) * n_heads * n_moves); // of K and V
            collected.emplace_back(
                    nullptr, alloc_space(buft, std::max(sums->nb[2], choice.pos ? ggml_nbytes(choice.pos) : 0)));
            space = ggml_backend_buffer_get_base(collected.back().second.get());
        }

        std::map<std::pair<uint32_t, uint32_t>, ggml_tensor *> shared; // weights by n_head and n_head_kv

        for (llama_h2o_layer * layer : some) {
            const auto & shape = layer->shape;
            auto & tensors     = layer->tensors;

            tensors.scores  = view_next(shape.n_head_kv);
            tensors.squares = has_squares ? view_next(shape.n_head_kv) : nullptr;
            tensors.moves   = moves;
            tensors.space   = space;
            tensors.choice  = choice;
            if (policy.n_queries > 0) {
                tensors.queries = ggml_new_tensor_4d(ctx_collected.get(), GGML_TYPE_F32, shape.k.n_embd_head,
                        policy.n_queries, shape.n_head, n_stream);
            }

            auto & one = shared[{ shape.n_head, shape.n_head_kv }];
            if (!one) {
                one = ggml_new_tensor_1d(ctx_weights.get(), GGML_TYPE_F32, int64_t(n_tokens) * shape.n_head);
            }
            tensors.weights = one;
        }

        ggml_backend_buffer_ptr buf_collected =
                checked(ggml_backend_alloc_ctx_tensors_from_buft(ctx_collected.get(), buft));
        ggml_backend_buffer_ptr buf_weights =
                checked(ggml_backend_alloc_ctx_tensors_from_buft(ctx_weights.get(), buft));

        for (const auto & [heads, tensor] : shared) {
            const std::vector<float> data(ggml_nelements(tensor), float(heads.second) / float(heads.first));
            ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
        }

        ggml_backend_buffer_clear(buf_collected.get(), 0);
        if (choice.divisors) {
            ggml_backend_tensor_set(choice.divisors, divisors.data(), 0, ggml_nbytes(choice.divisors));
        }
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
    // unlike a row sum, the outer product reads the values without a transpose
    ggml_tensor * sum = ggml_out_prod(ctx, values, weights);
    if (llama_h2o_has_op(tensors.scores, sum)) {
        return sum;
    }

    // Metal has no outer product
    weights = ggml_reshape_4d(ctx, weights, weights->ne[1], 1, weights->ne[2], weights->ne[3]);
    sum     = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, values)), weights);
    ggml_prec_set_acc(sum, GGML_PREC_F32);

    return sum;
}

size_t llama_h2o_layer_tensors::size_of_collected() const {
    size_t res = 0;
    for (const ggml_tensor * tensor : { scores, squares, queries }) {
        res += tensor ? ggml_nelements(tensor) * sizeof(float) : 0;
    }

    return res;
}

bool llama_h2o_is_on_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);

    return !ggml_backend_buft_is_host(buft) && dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

bool llama_h2o_has_op(const ggml_tensor * tensor, const ggml_tensor * op) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));

    return !dev || ggml_backend_dev_supports_op(dev, op);
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
