#include "graph/h2o-attention.h"

#include "cache/h2o-cache.h"
#include "graph/h2o-fused.h"
#include "graph/h2o-inputs.h"
#include "graph/h2o-retrieved.h"

#include "llama-graph.h"

#include <algorithm>
#include <cstring>

//
// collecting scores
//

ggml_tensor * llama_h2o_view_collected(
        const llm_graph_context & graph, ggml_tensor * collected, int64_t n_kv, int64_t n_stream) {
    return ggml_view_4d(graph.ctx0, collected, n_kv, 1, collected->ne[1], n_stream, collected->nb[1], collected->nb[1],
            collected->nb[2], collected->nb[2] * llama_h2o::first_stream(graph.mctx));
}

// A view of n KV heads of a tensor whose dim 2 is heads, with n_group heads per KV head.
static ggml_tensor * view_heads(ggml_context * ctx, ggml_tensor * t, int64_t n_group, int64_t first, int64_t n) {
    if (t->ne[2] == n_group * n) {
        return t;
    }
    return ggml_view_4d(ctx, t, t->ne[0], t->ne[1], n_group * n, t->ne[3], t->nb[1], t->nb[2], t->nb[3],
            t->nb[2] * n_group * first);
}

// Adds the sum over queries and the mean over the query heads of each KV group.
//   probs   of the KV heads from `first` on
//   credit  weights of the probabilities; may be null
static void build_sum(const llm_graph_context & graph,
        const llama_h2o_layer & layer,
        ggml_tensor * probs,
        ggml_tensor * credit,
        ggml_tensor * collected,
        int64_t first) {
    ggml_context * ctx = graph.ctx0;

    const int64_t n_kv      = probs->ne[0];
    const int64_t n_head_kv = probs->ne[2] * layer.shape.n_head_kv / layer.shape.n_head;
    const int64_t n_stream  = probs->ne[3];

    ggml_tensor * sums = llama_h2o_view_collected(graph, collected, n_kv, n_stream);
    sums               = view_heads(ctx, sums, 1, first, n_head_kv);

    if (layer.attention.on_cuda) {
        llama_h2o_build_add(graph, sums, probs, credit);
        return;
    }

    if (credit) {
        probs = ggml_mul(ctx, probs, credit);
    }

    const int64_t n_probs = probs->ne[1] * probs->ne[2] / n_head_kv; // queries per KV group

    // the query heads of a group are adjacent: [n_kv, n_probs, n_head_kv, n_stream]
    ggml_tensor * cur = ggml_reshape_4d(ctx, probs, n_kv, n_probs, n_head_kv, n_stream);

    if (n_probs > 1) {
        const size_t size = sizeof(float);

        ggml_tensor * weights = ggml_view_4d(ctx, layer.tensors.weights, 1, n_probs, n_head_kv, n_stream, size,
                size * n_probs, size * n_probs * n_head_kv, 0);

        cur = layer.build_sum(ctx, cur, weights);
    }

    ggml_build_forward_expand(graph.gf, ggml_add_inplace(ctx, sums, cur));
}

//   probs  of the KV heads from `first` on
static void build_collected(
        const llm_graph_context & graph, const llama_h2o_layer & layer, ggml_tensor * probs, int64_t first) {
    if (layer.attention.collects) {
        build_sum(graph, layer, probs, layer.attention.credit, layer.tensors.scores, first);
    }
    if (layer.tensors.squares) {
        build_sum(graph, layer, ggml_sqr(graph.ctx0, probs), nullptr, layer.tensors.squares, first);
    }
}

// Scales the probabilities of cells by the share of attention that retrieved rows leave to them.
//   probs  of the KV heads from `first` on
static ggml_tensor * build_kept(
        const llm_graph_context & graph, const llama_h2o_layer & layer, ggml_tensor * probs, int64_t first) {
    ggml_context * ctx = graph.ctx0;

    if (!layer.attention.retrieved) {
        return probs;
    }

    const int64_t n_group = layer.shape.n_group();

    ggml_tensor * kept = llama_h2o_build_kept(ctx, layer.attention.retrieved);

    return ggml_mul(ctx, probs, view_heads(ctx, kept, n_group, first, probs->ne[2] / n_group));
}

// The log-sum-exp of the logits, F32 [1, n_tokens, n_head, n_stream]: the logit minus the log of the probability of one cell, the
// one with the highest probability, which is not masked.
static ggml_tensor * build_lse(ggml_context * ctx, ggml_tensor * probs) {
    const int64_t n_rows = ggml_nrows(probs);

    ggml_tensor * cell = ggml_argmax(ctx, ggml_reshape_2d(ctx, probs, probs->ne[0], n_rows));
    const auto of_cell = [&](ggml_tensor * t) {
        return ggml_get_rows(ctx, ggml_reshape_3d(ctx, t, 1, t->ne[0], n_rows), ggml_reshape_2d(ctx, cell, 1, n_rows));
    };
    float scale;
    std::memcpy(&scale, probs->op_params, sizeof(scale));

    // sinks may reduce the probabilities of all cells to 0; retrieved rows then get none either
    ggml_tensor * share = ggml_clamp(ctx, of_cell(probs), 1e-30f, 1.0f);
    ggml_tensor * lse   = ggml_sub(ctx, ggml_scale(ctx, of_cell(probs->src[0]), scale), ggml_log(ctx, share));

    return ggml_reshape_4d(ctx, lse, 1, probs->ne[1], probs->ne[2], probs->ne[3]);
}

// Adds the attention to retrieved rows, and collects the remaining attention to the cells.
//   parts   probabilities of consecutive KV heads
static void build_alongside(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        const std::vector<ggml_tensor *> & parts) {
    layer.attention.retrieved = nullptr;
    if (layer.attention.searched()) {
        ggml_tensor * lse = build_lse(graph.ctx0, parts.front());
        for (size_t i = 1; i < parts.size(); ++i) {
            lse = ggml_concat(graph.ctx0, lse, build_lse(graph.ctx0, parts[i]), 2);
        }
        layer.attention.retrieved = llama_h2o_build_retrieved(graph, layer, q, lse);
    }

    int64_t first = 0;
    for (ggml_tensor * probs : parts) {
        build_collected(graph, layer, build_kept(graph, layer, probs, first), first);
        first += probs->ne[2] / layer.shape.n_group();
    }
}

// Records how logits are scaled and capped, as in build_attn_mha().
static void set_logits(llama_h2o_layer_attention & attention, const llm_graph_context & graph, float kq_scale) {
    const auto & hparams = graph.hparams;

    attention.kq_scale = kq_scale;
    attention.kq_cap   = hparams.attn_soft_cap ? hparams.f_attn_logit_softcapping : 0.0f;

    // Grok scales before the cap, other models after it
    if (graph.arch == LLM_ARCH_GROK) {
        attention.kq_scale = kq_scale * hparams.f_attn_out_scale;
        attention.kq_cap   = hparams.f_attn_logit_softcapping / hparams.f_attn_out_scale;
    }
}

// maximum number of threads of the graph
static uint32_t most_threads(const llm_graph_context & graph) {
    return uint32_t(std::max(graph.cparams.n_threads, graph.cparams.n_threads_batch));
}

// Sets up the layer's search of the archives of the graph's streams.
static void set_search(llama_h2o & h2o, llama_h2o_layer & layer, const llm_graph_context & graph, int64_t n_stream) {
    auto & attention = layer.attention;

    attention.texts.clear();
    if (h2o.parts.params.recall == 0) {
        return;
    }

    const uint32_t ikv = uint32_t(&layer - h2o.parts.layers.data());
    const uint32_t s0  = llama_h2o::first_stream(graph.mctx);
    for (uint32_t s = s0; s < s0 + n_stream; ++s) {
        auto & st = h2o.parts.streams[s];
        st.index->set_slots(most_threads(graph));
        attention.texts.push_back(&st.index->text(ikv));
    }

    const auto & archive = *h2o.parts.streams[s0].archive;
    const auto & rope    = *layer.rope;

    llama_h2o_search & search = attention.search;
    search.n_find             = h2o.parts.streams[s0].index->max_find();
    search.type               = archive.type();
    search.nb_row             = archive.row_size(ikv);
    search.rotation           = rope.rotation();
    search.n_query_mix        = rope.n_mix;
    search.cap                = attention.kq_cap * attention.kq_scale; // the model applies the cap before the scale
    search.texts              = attention.texts.data();
    search.on_device          = nullptr;
    for (const auto & texts : h2o.parts.device_texts) {
        const auto * text = texts->text(s0, ikv);
        if (text && h2o.parts.search_on_devices()) {
            search.on_device     = text;
            search.device_stride = uint32_t(texts->layers.size());
        }
    }
}

namespace {

// A graph cannot be reused if the search moves between CPU and devices.
class input_search : public llm_graph_input_i {
public:
    explicit input_search(const llama_h2o * h2o) : h2o(h2o), on_devices(h2o->parts.search_on_devices()) {}

    void set_input(const llama_ubatch *) override {}

    bool can_reuse(const llm_graph_params &) override { return h2o->parts.search_on_devices() == on_devices; }

private:
    const llama_h2o * h2o; // outlives the graphs
    const bool on_devices;
};

} // namespace

// Records how the layer computes attention, and adds the inputs of the policy. Layers that share K and V add up their attention,
// but only the queries of the layer that owns them are kept. Returns null without eviction.
static llama_h2o_layer * begin_layer(
        const llm_graph_context & graph, ggml_tensor * q, int64_t n_kv, ggml_tensor * sinks, float kq_scale, int il) {
    llama_h2o * h2o         = llama_h2o::of(graph.mctx);
    llama_h2o_layer * layer = h2o ? h2o->find_layer(il) : nullptr;
    if (!layer) {
        return nullptr;
    }

    layer->attention.credit = llama_h2o_build_credit(graph, n_kv, q->ne[1], q->ne[3], il);

    set_logits(layer->attention, graph, kq_scale);
    layer->attention.sinks = sinks;
    set_search(*h2o, *layer, graph, q->ne[3]);
    if (h2o->parts.is_first(il) && !h2o->parts.device_texts.empty()) {
        graph.res->add_input(std::make_unique<input_search>(h2o));
    }

    if (int32_t(layer->shape.il) == il) {
        llama_h2o_build_queries(graph, q, il);
    }

    return layer;
}

void llama_h2o_build_scores(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * probs,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    if (llama_h2o_layer * layer = begin_layer(graph, q, probs->ne[0], sinks, kq_scale, il)) {
        build_alongside(graph, *layer, q, { probs });
    }
}

ggml_tensor * llama_h2o_add_found(const llm_graph_context & graph, ggml_tensor * cur, bool tokens_first, int il) {
    llama_h2o * h2o         = llama_h2o::of(graph.mctx);
    llama_h2o_layer * layer = h2o ? h2o->find_layer(il) : nullptr;

    return layer && layer->attention.retrieved
                   ? llama_h2o_build_with_retrieved(graph.ctx0, layer->attention.retrieved, cur, tokens_first)
                   : cur;
}

// The number of KV heads whose probabilities are computed at a time: all of them would need more memory than the cache saves. No
// ubatch needs more than the largest one, for which the memory is reserved.
static int64_t heads_at_a_time(
        const llm_graph_context & graph, const llama_h2o_layer & layer, int64_t n_kv, int64_t n_tokens) {
    static constexpr int64_t SIZE     = 16 << 20; // bytes per part, at least
    static constexpr int64_t MAX_PART = 4;        // each part needs nodes, whose number is limited

    const int64_t n_head_kv = layer.shape.n_head_kv;

    // the sinks tensor contains all heads of the layer
    if (layer.attention.sinks) {
        return n_head_kv;
    }

    const int64_t n_group  = layer.shape.n_head / n_head_kv;
    const int64_t size     = sizeof(float) * n_group * n_kv * n_tokens;
    const int64_t max_size = sizeof(float) * n_group * layer.tensors.scores->ne[0] * graph.cparams.n_ubatch;

    const int64_t n_part = std::clamp<int64_t>((max_size * n_head_kv + SIZE - 1) / SIZE, 1, MAX_PART);
    const int64_t n_head = (n_head_kv + n_part - 1) / n_part;

    return std::clamp<int64_t>(n_head * max_size / size, 1, n_head_kv);
}

// Recomputes the probabilities, in parts of consecutive KV heads.
static std::vector<ggml_tensor *> build_probs(const llm_graph_context & graph,
        const llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask) {
    ggml_context * ctx = graph.ctx0;

    const int64_t n_group = layer.shape.n_group();
    const int64_t n_max   = heads_at_a_time(graph, layer, k->ne[1], q->ne[1] * q->ne[3]);

    std::vector<ggml_tensor *> res;
    for (int64_t first = 0; first < layer.shape.n_head_kv; first += n_max) {
        const int64_t n = std::min(n_max, layer.shape.n_head_kv - first);

        ggml_tensor * some_q = view_heads(ctx, q, n_group, first, n);
        ggml_tensor * some_k = view_heads(ctx, k, 1, first, n);

        res.push_back(layer.attention.build_probs(ctx, some_q, some_k, kq_mask));
    }

    return res;
}

// Collects scores without storing probabilities.
static void build_sums(const llm_graph_context & graph,
        llama_h2o_layer & layer,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * kq_mask) {
    auto & attention = layer.attention;

    ggml_tensor * lse  = llama_h2o_build_lse(graph, layer, q, k, kq_mask);
    ggml_tensor * kept = nullptr;
    if (attention.searched()) {
        ggml_tensor * asked =
                ggml_view_4d(graph.ctx0, lse, 1, q->ne[1], q->ne[2], q->ne[3], lse->nb[1], lse->nb[2], lse->nb[3], 0);

        attention.retrieved = llama_h2o_build_retrieved(graph, layer, q, asked);
        kept                = llama_h2o_build_kept(graph.ctx0, attention.retrieved);
    }
    if (attention.collects) {
        llama_h2o_build_columns(graph, layer, lse, kept);
    }
}

//
// attention
//

ggml_tensor * llama_h2o_build_attention(const llm_graph_context & graph,
        ggml_tensor * q,
        ggml_tensor * k,
        ggml_tensor * v,
        ggml_tensor * kq_mask,
        ggml_tensor * sinks,
        float kq_scale,
        int il) {
    llama_h2o_layer * layer = begin_layer(graph, q, k->ne[1], sinks, kq_scale, il);
    if (!layer) {
        return nullptr;
    }

    const bool plain = layer->attention.kq_cap == 0.0f && kq_mask->type == GGML_TYPE_F16;

    layer->attention.fused     = plain && llama_h2o_can_fuse(*layer, q, k, v);
    layer->attention.retrieved = nullptr;
    if (layer->attention.fused) {
        return llama_h2o_build_fused(graph, *layer, q, k, v, kq_mask);
    }

    // flash attention does not return its probabilities
    if (layer->attention.collects || layer->attention.searched()) {
        if (plain && llama_h2o_can_sum(*layer, k)) {
            build_sums(graph, *layer, q, k, kq_mask);
        } else {
            build_alongside(graph, *layer, q, build_probs(graph, *layer, q, k, kq_mask));
        }
    }

    return nullptr;
}
