#include "h2o-attention.h"

#include "h2o-cache.h"
#include "h2o-kernel.h"

#include "llama-graph.h"

#include <algorithm>
#include <iterator>

// The scores of the cells and streams that the graph works on: [n_kv, 1, n_head_kv, n_stream].
static ggml_tensor * view_scores(
        const llm_graph_context & graph, const llama_h2o::layer & layer, int64_t n_kv, int64_t n_stream) {
    ggml_tensor * scores = layer.scores;

    return ggml_view_4d(graph.ctx0, scores, n_kv, 1, layer.n_head_kv, n_stream, scores->nb[1], scores->nb[1],
            scores->nb[2], scores->nb[2] * llama_h2o::first_stream(graph.mctx));
}

void llama_h2o_build_scores(const llm_graph_context & graph, ggml_tensor * probs, int il) {
    llama_h2o * h2o = llama_h2o::of(graph.mctx);
    if (!h2o) {
        return;
    }

    const auto * layer = h2o->find_layer(il);

    ggml_context * ctx = graph.ctx0;

    const int64_t n_kv     = probs->ne[0];
    const int64_t n_stream = probs->ne[3];
    const int64_t n_probs  = probs->ne[1] * probs->ne[2] / layer->n_head_kv; // queries of a KV group

    // the query heads of a group follow each other: [n_kv, n_probs, n_head_kv, n_stream]
    ggml_tensor * cur = ggml_reshape_4d(ctx, probs, n_kv, n_probs, layer->n_head_kv, n_stream);

    // the outer product sums over dim 1 and, unlike a row sum, reads the probabilities as they lie
    if (n_probs > 1) {
        const size_t size = sizeof(float);

        ggml_tensor * weights = ggml_view_4d(ctx, layer->weights, 1, n_probs, layer->n_head_kv, n_stream, size,
                size * n_probs, size * n_probs * layer->n_head_kv, 0);

        cur = ggml_out_prod(ctx, cur, weights);
    }

    ggml_tensor * scores = view_scores(graph, *layer, n_kv, n_stream);

    ggml_build_forward_expand(graph.gf, ggml_add_inplace(ctx, scores, cur));
}

static void build_scores_beside_flash(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    ggml_context * ctx = graph.ctx0;

    ggml_tensor * kq = ggml_mul_mat(ctx, k, q);
    ggml_prec_set_acc(kq, GGML_PREC_F32);

    if (graph.hparams.attn_soft_cap) {
        const float cap = graph.hparams.f_attn_logit_softcapping;

        kq = ggml_scale(ctx, ggml_tanh(ctx, ggml_scale(ctx, kq, 1.0f / cap)), cap);
    }

    kq = ggml_soft_max_ext(ctx, kq, kq_mask, kq_scale, graph.hparams.f_max_alibi_bias);
    ggml_soft_max_add_sinks(kq, sinks);

    llama_h2o_build_scores(graph, kq, il);
}

//
// one op for the attention and the scores
//

// tensors of the op, in the order of ggml_tensor.src
enum fused_src { SRC_Q, SRC_K, SRC_V, SRC_MASK, SRC_SCORES };

static llama_h2o_attention::operand operand_of(const ggml_tensor * t) {
    return { static_cast<const char *>(t->data), t->type, t->nb[1], t->nb[2], t->nb[3] };
}

// The result lies at the start of `space`, the work space behind it. Without data for a graph that is being built.
static llama_h2o_attention read_attention(
        ggml_tensor * const * src, float scale, ggml_tensor * space, uint32_t n_slots) {
    const ggml_tensor * q      = src[SRC_Q];
    const ggml_tensor * k      = src[SRC_K];
    const ggml_tensor * v      = src[SRC_V];
    const ggml_tensor * scores = src[SRC_SCORES];

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

    attn.scores          = static_cast<float *>(scores->data);
    attn.nb_score_head   = scores->nb[2];
    attn.nb_score_stream = scores->nb[3];

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
        ggml_tensor * kq_mask,
        float kq_scale) {
    ggml_context * ctx = graph.ctx0;

    layer.kq_scale = kq_scale;

    ggml_tensor * src[] = { q, k, v, kq_mask, view_scores(graph, layer, k->ne[1], k->ne[3]) };

    // one column per thread, so that the op knows for how many there is room
    const uint32_t n_slots = std::max(graph.cparams.n_threads, graph.cparams.n_threads_batch);

    const llama_h2o_attention attn = read_attention(src, kq_scale, nullptr, n_slots);
    const int64_t n_elements       = attn.n_out() + llama_h2o_work_size(attn);
    const int64_t n_per_slot       = (n_elements + n_slots - 1) / n_slots;

    ggml_tensor * cur = ggml_custom_4d(
            ctx, GGML_TYPE_F32, n_per_slot, n_slots, 1, 1, src, std::size(src), attend, GGML_N_TASKS_MAX, &layer);

    cur = ggml_custom_inplace(ctx, cur, src, std::size(src), combine, GGML_N_TASKS_MAX, &layer);

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

    auto & layer = *h2o->find_layer(il);

    const bool plain = !sinks && !graph.hparams.attn_soft_cap && kq_mask->type == GGML_TYPE_F16;

    layer.fused = layer.kernel && plain && has_rows_for_kernel(k) && has_rows_for_kernel(v);
    if (layer.fused) {
        return build_fused(graph, layer, q, k, v, kq_mask, kq_scale);
    }

    build_scores_beside_flash(graph, q, k, kq_mask, sinks, kq_scale, il);

    return nullptr;
}
