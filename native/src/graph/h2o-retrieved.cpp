#include "graph/h2o-retrieved.h"

#include "cuda/h2o-cuda.h"
#include "graph/h2o-fused.h"
#include "kernels/h2o-kernel.h"

#include "llama-graph.h"

#include <algorithm>

// sources of the op, in the order of ggml_tensor.src
enum retrieved_src { SRC_Q, SRC_LSE, N_SRC };

// Floats of the result, padded to vectors.
static size_t n_result(const ggml_tensor * q, const llama_h2o_layer & layer) {
    return (size_t(layer.shape.v.n_embd_head + 1) * q->ne[1] * q->ne[2] * q->ne[3] + 15) / 16 * 16;
}

// The result is at the start of `space`, followed by work space. Tensors have no data yet while a graph is built.
static llama_h2o_attention read_alongside(
        ggml_tensor * const * src, const llama_h2o_layer & layer, const ggml_tensor * space, uint32_t n_slots) {
    const ggml_tensor * q = src[SRC_Q];

    llama_h2o_attention attn = {};

    attn.n_embd_head_k = layer.shape.k.n_embd_head;
    attn.n_embd_head_v = layer.shape.v.n_embd_head;
    attn.n_head        = q->ne[2];
    attn.n_head_kv     = layer.shape.n_head_kv;
    attn.n_tokens      = q->ne[1];
    attn.n_stream      = q->ne[3];
    attn.scale         = layer.attention.kq_scale;
    attn.n_slots       = n_slots;
    attn.q             = { static_cast<const char *>(q->data), q->type, q->nb[1], q->nb[2], q->nb[3] };
    attn.lse           = static_cast<const float *>(src[SRC_LSE]->data);
    attn.search        = layer.attention.searched();

    if (space) {
        attn.out  = static_cast<float *>(space->data);
        attn.work = attn.out + n_result(q, layer);
    }

    return attn;
}

llama_h2o_attention llama_h2o_read_alongside(const ggml_tensor * op, const void * userdata) {
    return read_alongside(op->src, *static_cast<const llama_h2o_layer *>(userdata), op, op->ne[1]);
}

static void alongside(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto & layer = *static_cast<const llama_h2o_layer *>(userdata);

    const uint32_t n_embd = layer.shape.k.n_embd_head;
    const auto * kernel   = llama_h2o_best_kernel(n_embd, layer.shape.v.n_embd_head);

    kernel->alongside(llama_h2o_read_alongside(dst, userdata), ith, nth);
}

ggml_tensor * llama_h2o_build_retrieved(
        const llm_graph_context & graph, llama_h2o_layer & layer, ggml_tensor * q, ggml_tensor * lse) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * src[N_SRC] = { q, lse };

    // one column per thread, from which the op reads their maximum number
    const bool on_device   = layer.attention.search.on_device;
    const uint32_t n_slots = on_device ? 1 : std::max(graph.cparams.n_threads, graph.cparams.n_threads_batch);

    const llama_h2o_attention attn = read_alongside(src, layer, nullptr, n_slots);

    const int64_t n_work = on_device ? llama_h2o_cuda_search_space(attn, true).size : llama_h2o_alongside_size(attn);
    const int64_t n_each = (int64_t(n_result(q, layer)) + n_work + n_slots - 1) / n_slots;

    ggml_tensor * cur = ggml_custom_4d(ctx, GGML_TYPE_F32, n_each, n_slots, 1, 1, src, N_SRC,
            on_device ? llama_h2o_device_alongside() : alongside, GGML_N_TASKS_MAX, &layer);
    // some backends claim to support every op
    llama_h2o_compute_where(graph, layer.tensors.k, on_device, cur);

    const int64_t n_row = int64_t(layer.shape.v.n_embd_head) + 1;

    cur = ggml_view_4d(ctx, cur, n_row, q->ne[2], q->ne[1], q->ne[3], n_row * sizeof(float),
            n_row * q->ne[2] * sizeof(float), n_row * q->ne[2] * q->ne[1] * sizeof(float), 0);

    // one copy to the device for all views of it
    return on_device ? cur : ggml_cont(ctx, cur);
}

// Elements of every row, from `first` on.
static ggml_tensor * part_of(ggml_context * ctx, ggml_tensor * retrieved, int64_t first, int64_t n, bool tokens_first) {
    ggml_tensor * cur = ggml_view_4d(ctx, retrieved, n, retrieved->ne[1], retrieved->ne[2], retrieved->ne[3],
            retrieved->nb[1], retrieved->nb[2], retrieved->nb[3], first * sizeof(float));

    return tokens_first ? ggml_permute(ctx, cur, 0, 2, 1, 3) : cur;
}

ggml_tensor * llama_h2o_build_kept(ggml_context * ctx, ggml_tensor * retrieved) {
    return part_of(ctx, retrieved, retrieved->ne[0] - 1, 1, true);
}

ggml_tensor * llama_h2o_build_with_retrieved(
        ggml_context * ctx, ggml_tensor * retrieved, ggml_tensor * cur, bool tokens_first) {
    const int64_t n_embd = retrieved->ne[0] - 1;

    ggml_tensor * kept = part_of(ctx, retrieved, n_embd, 1, tokens_first);

    return ggml_add(ctx, ggml_mul(ctx, cur, kept), part_of(ctx, retrieved, 0, n_embd, tokens_first));
}
