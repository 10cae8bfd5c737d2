#include "h2o-attention.h"

#include "h2o-cache.h"

#include "llama-graph.h"

void llama_h2o_build_scores(const llm_graph_context & graph, ggml_tensor * probs, int il) {
    const llama_h2o * h2o = llama_h2o::of(graph.mctx);
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

    ggml_tensor * scores = ggml_view_4d(ctx, layer->scores, n_kv, 1, layer->n_head_kv, n_stream, layer->scores->nb[1],
            layer->scores->nb[1], layer->scores->nb[2], layer->scores->nb[2] * llama_h2o::first_stream(graph.mctx));

    ggml_build_forward_expand(graph.gf, ggml_add_inplace(ctx, scores, cur));
}

void llama_h2o_build_scores_beside_flash(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    if (!llama_h2o::of(graph.mctx)) {
        return;
    }

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
