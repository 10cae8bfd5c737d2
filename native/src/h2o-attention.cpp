#include "h2o-attention.h"

#include "h2o-cache.h"
#include "h2o-credit.h"
#include "h2o-kernel.h"
#include "h2o-queries.h"

#include "llama-graph.h"

#include <algorithm>

//
// what the policy collects
//

// The cells and streams that the graph works on of scores or squares: [n_kv, 1, n_head_kv, n_stream].
static ggml_tensor * view_collected(
        const llm_graph_context & graph, ggml_tensor * collected, int64_t n_kv, int64_t n_stream) {
    return ggml_view_4d(graph.ctx0, collected, n_kv, 1, collected->ne[1], n_stream, collected->nb[1], collected->nb[1],
            collected->nb[2], collected->nb[2] * llama_h2o::first_stream(graph.mctx));
}

// Adds the sum over queries, the mean over the query heads of each KV group.
static void build_sum(
        const llm_graph_context & graph, const llama_h2o::layer & layer, ggml_tensor * probs, ggml_tensor * collected) {
    ggml_context * ctx = graph.ctx0;

    const int64_t n_kv     = probs->ne[0];
    const int64_t n_stream = probs->ne[3];
    const int64_t n_probs  = probs->ne[1] * probs->ne[2] / layer.n_head_kv; // queries of a KV group

    // the query heads of a group follow each other: [n_kv, n_probs, n_head_kv, n_stream]
    ggml_tensor * cur = ggml_reshape_4d(ctx, probs, n_kv, n_probs, layer.n_head_kv, n_stream);

    // the outer product sums over dim 1 and, unlike a row sum, reads the probabilities as they lie
    if (n_probs > 1) {
        const size_t size = sizeof(float);

        ggml_tensor * weights = ggml_view_4d(ctx, layer.weights, 1, n_probs, layer.n_head_kv, n_stream, size,
                size * n_probs, size * n_probs * layer.n_head_kv, 0);

        cur = ggml_out_prod(ctx, cur, weights);
    }

    cur = ggml_add_inplace(ctx, view_collected(graph, collected, n_kv, n_stream), cur);

    ggml_build_forward_expand(graph.gf, cur);
}

static void build_collected(const llm_graph_context & graph, const llama_h2o::layer & layer, ggml_tensor * probs) {
    if (layer.collects) {
        ggml_tensor * cur = layer.credit ? ggml_mul(graph.ctx0, probs, layer.credit) : probs;

        build_sum(graph, layer, cur, layer.scores);
    }
    if (layer.squares) {
        build_sum(graph, layer, ggml_sqr(graph.ctx0, probs), layer.squares);
    }
}

// Notes how the layer attends, for those who do it once more, and gives it the inputs that the policy needs.
static llama_h2o::layer & begin_layer(const llm_graph_context & graph,
        llama_h2o & h2o,
        ggml_tensor * q,
        int64_t n_kv,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    auto & layer = *h2o.find_layer(il);

    layer.credit = llama_h2o_build_credit(graph, n_kv, q->ne[1], q->ne[3], il);

    layer.kq_scale = kq_scale;
    layer.kq_cap   = graph.hparams.attn_soft_cap ? graph.hparams.f_attn_logit_softcapping : 0.0f;
    layer.sinks    = sinks;

    return layer;
}

void llama_h2o_build_scores(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * probs,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);
    if (!h2o) {
        return;
    }

    const auto & layer = begin_layer(graph, *h2o, q, probs->ne[0], sinks, kq_scale, il);

    build_collected(graph, layer, probs);

    llama_h2o_build_queries(graph, q, il);
}

ggml_tensor * llama_h2o::layer::build_probs(
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

//
// one op for the attention and the scores
//

// tensors of the op, in the order of ggml_tensor.src; those at the end may be missing
enum fused_src { SRC_Q, SRC_K, SRC_V, SRC_MASK, SRC_SCORES, SRC_SQUARES, SRC_CREDIT, N_SRC };

static llama_h2o_attention::operand operand_of(const ggml_tensor * t) {
    return { static_cast<const char *>(t->data), t->type, t->nb[1], t->nb[2], t->nb[3] };
}

// The result lies at the start of `space`, the work space behind it. Without data for a graph that is being built.
static llama_h2o_attention read_attention(
        ggml_tensor * const * src, float scale, ggml_tensor * space, uint32_t n_slots) {
    const ggml_tensor * q       = src[SRC_Q];
    const ggml_tensor * k       = src[SRC_K];
    const ggml_tensor * v       = src[SRC_V];
    const ggml_tensor * scores  = src[SRC_SCORES];
    const ggml_tensor * squares = src[SRC_SQUARES];
    const ggml_tensor * credit  = src[SRC_CREDIT];

    llama_h2o_attention attn = {};

    attn.n_embd_head_k = k->ne[0];
    attn.n_embd_head_v = v->ne[0];
    attn.n_head        = q->ne[2];
    attn.n_head_kv     = k->ne[2];
    attn.n_kv          = k->ne[1];
    attn.n_tokens      = q->ne[1];
    attn.n_stream      = k->ne[3];
    attn.scale         = scale;
    attn.n_slots       = n_slots;

    attn.q    = operand_of(q);
    attn.k    = operand_of(k);
    attn.v    = operand_of(v);
    attn.mask = operand_of(src[SRC_MASK]);

    attn.credit = credit ? operand_of(credit) : llama_h2o_attention::operand {};

    attn.scores          = scores ? static_cast<float *>(scores->data) : nullptr;
    attn.squares         = squares ? static_cast<float *>(squares->data) : nullptr;
    attn.nb_score_head   = scores ? scores->nb[2] : 0;
    attn.nb_score_stream = scores ? scores->nb[3] : 0;

    if (space) {
        attn.out  = static_cast<float *>(space->data);
        attn.work = attn.out + attn.n_out();
    }

    return attn;
}

static void attend(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto * layer = static_cast<const llama_h2o::layer *>(userdata);

    layer->kernel->attend(read_attention(dst->src, layer->kq_scale, dst, dst->ne[1]), ith, nth);
}

// in place: the first source is the result of attend()
static void combine(ggml_tensor * dst, int ith, int nth, void * userdata) {
    const auto * layer = static_cast<const llama_h2o::layer *>(userdata);

    layer->kernel->combine(read_attention(dst->src + 1, layer->kq_scale, dst, dst->ne[1]), ith, nth);
}

static ggml_tensor * build_fused(const llm_graph_context & graph,
        llama_h2o::layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * src[N_SRC] = { q, k, v, kq_mask };
    if (layer.collects) {
        src[SRC_SCORES] = view_collected(graph, layer.scores, k->ne[1], k->ne[3]);
        src[SRC_CREDIT] = layer.credit;
    }
    if (layer.squares) {
        src[SRC_SQUARES] = view_collected(graph, layer.squares, k->ne[1], k->ne[3]);
    }

    // one column per thread, so that the op knows for how many there is room
    const uint32_t n_slots = std::max(graph.cparams.n_threads, graph.cparams.n_threads_batch);

    const llama_h2o_attention attn = read_attention(src, layer.kq_scale, nullptr, n_slots);
    const int64_t n_elements       = attn.n_out() + llama_h2o_work_size(attn);
    const int64_t n_per_slot       = (n_elements + n_slots - 1) / n_slots;

    ggml_tensor * cur =
            ggml_custom_4d(ctx, GGML_TYPE_F32, n_per_slot, n_slots, 1, 1, src, N_SRC, attend, GGML_N_TASKS_MAX, &layer);

    cur = ggml_custom_inplace(ctx, cur, src, N_SRC, combine, GGML_N_TASKS_MAX, &layer);

    const int64_t n_embd = v->ne[0] * q->ne[2];

    return ggml_view_2d(ctx, cur, n_embd, q->ne[1] * q->ne[3], n_embd * sizeof(float), 0);
}

static bool has_rows_for_kernel(const ggml_tensor * t) {
    const bool known = t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || t->type == GGML_TYPE_Q8_0 ||
                       t->type == GGML_TYPE_Q4_0;

    return known && t->nb[0] == ggml_type_size(t->type) && t->ne[1] % LLAMA_H2O_TILE == 0;
}

ggml_tensor * llama_h2o_build_attention(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);
    if (!h2o) {
        return nullptr;
    }

    auto & layer = begin_layer(graph, *h2o, q, k->ne[1], sinks, kq_scale, il);

    llama_h2o_build_queries(graph, q, il);

    const bool plain = !sinks && !graph.hparams.attn_soft_cap && kq_mask->type == GGML_TYPE_F16;

    layer.fused = layer.kernel && plain && has_rows_for_kernel(k) && has_rows_for_kernel(v);
    if (layer.fused) {
        return build_fused(graph, layer, q, k, v, kq_mask);
    }

    // flash attention keeps its probabilities to itself
    if (layer.collects) {
        build_collected(graph, layer, layer.build_probs(graph.ctx0, q, k, kq_mask));
    }

    return nullptr;
}
