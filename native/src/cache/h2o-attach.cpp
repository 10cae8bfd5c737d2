// Attaching eviction to a context: inspects its cache and builds the data of the eviction.

#include "cache/h2o-cache.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-collected.h"
#include "cache/h2o-compaction.h"
#include "cache/h2o-probe.h"
#include "cache/h2o-rebase.h"
#include "cache/h2o-rope.h"
#include "cache/h2o-window.h"
#include "graph/h2o-fused.h"
#include "products/h2o-product.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>

// The layers of a cache, without the tensors that eviction adds.
//   all   each layer's index in the model and its K and V tensors
template <typename T>
static std::vector<llama_h2o_layer> make_layers(
        const T & all, const llama_hparams & hparams, uint32_t n_cells, bool v_trans) {
    const auto layout = [&](const ggml_tensor * t, uint32_t n_embd_head, bool transposed) {
        return llama_h2o_row_layout { t->type, n_embd_head, uint32_t(t->ne[0]), n_cells, transposed };
    };

    std::vector<llama_h2o_layer> layers;

    uint32_t n_heads = 0;
    for (const auto & one : all) {
        llama_h2o_layer layer;
        layer.shape = {
            one.il,
            hparams.n_head(one.il),
            hparams.n_head_kv(one.il),
            n_heads,
            layout(one.k, hparams.n_embd_head_k(one.il), false),
            one.v ? layout(one.v, hparams.n_embd_head_v(one.il), v_trans)
                  : layout(one.k, hparams.n_embd_head_v(one.il), false),
            ggml_backend_buffer_is_host(one.k->buffer),
        };
        layer.tensors.k = one.k;
        layer.tensors.v = one.v;
        layers.push_back(layer);

        n_heads += layer.shape.n_head_kv;
    }

    return layers;
}

llama_h2o::llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params) :
    parts(ctx,
            params,
            make_layers(kv.layers, kv.hparams, kv.get_size(), kv.v_trans),
            { kv.v_cells, kv.v_heads },
            { ctx, ctx.backend_ptrs, ctx.backend_buft, ctx.set_n_threads_fns }),
    kv(kv) {
    // graphs are reserved for whole ubatches, even with less slack, rounded up to a multiple of the sequences
    const uint32_t n_tokens = ctx.get_cparams().n_ubatch + kv.n_seq_max;

    std::vector<llama_h2o_memory> collected;

    llama_h2o_choose_kernels(parts.layers, llama_h2o_attention_type(params.attention));
    llama_h2o_alloc_tensors(parts.layers, *parts.policy, kv.n_stream, n_tokens, parts.max_moves(), collected, weights);

    llama_h2o_share_archives(parts);

    // the cache owns the scores, so that it clears, counts and frees them
    for (auto & memory : collected) {
        kv.ctxs_bufs.push_back(std::move(memory));
    }

    const llama_h2o_caches caches = llama_h2o_caches::of(ctx.get_memory());
    if (caches.window) {
        auto & window = *caches.window;
        if (!window.h2o_window) {
            window.h2o_window = std::make_shared<llama_h2o_window>(
                    make_layers(window.layers, window.hparams, window.get_size(), window.v_trans),
                    llama_h2o_cells(window.v_cells, window.v_heads), window.hparams);
        }
        parts.window = window.h2o_window;
    }
    parts.recurrent = caches.recurrent;
}

llama_kv_cache * llama_h2o::cache_of(const llama_context * ctx) {
    return llama_h2o_caches::of(ctx->get_memory()).growing;
}

llama_h2o * llama_h2o::of(const llama_context * ctx) {
    const llama_kv_cache * kv = cache_of(ctx);

    return kv ? kv->h2o.get() : nullptr;
}

llama_h2o * llama_h2o::of(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = llama_h2o_caches::growing_of(mctx);

    return kv_ctx ? kv_ctx->kv->h2o.get() : nullptr;
}

uint32_t llama_h2o::first_stream(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = llama_h2o_caches::growing_of(mctx);

    return kv_ctx->sinfos[kv_ctx->i_cur].s0;
}

ggml_type llama_h2o::type_v(const llama_kv_cache & kv) {
    return kv.layers.front().v ? kv.type_v() : kv.type_k();
}

std::unique_ptr<llama_memory_i> llama_h2o::new_memory(
        const llama_context & ctx, const llama_kv_cache & kv, uint32_t n_cells) {
    llama_memory_params params = {};
    params.type_k              = kv.type_k();
    params.type_v              = type_v(kv);

    llama_cparams cparams = ctx.get_cparams();
    cparams.n_ctx_seq     = n_cells;

    return std::unique_ptr<llama_memory_i>(ctx.get_model().create_memory(params, cparams));
}

bool llama_h2o::has_whole_rows(const llama_kv_cache & kv) {
    return std::all_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
        return !layer.v || ggml_backend_buffer_is_host(layer.v->buffer) ||
               layer.v->ne[0] % kv.hparams.n_embd_head_v(layer.il) == 0;
    });
}

bool llama_h2o::shares_evenly(const llama_kv_cache & kv) {
    return std::all_of(kv.map_layer_ids.begin(), kv.map_layer_ids.end(), [&](const auto & ids) {
        const auto & [il, ikv] = ids;
        return kv.hparams.n_head(il) == kv.hparams.n_head(kv.layers[ikv].il);
    });
}

int32_t llama_h2o::rows_of(const llama_kv_cache & kv, int32_t il) {
    const auto it = kv.map_layer_ids.find(il);

    return it == kv.map_layer_ids.end() ? -1 : int32_t(kv.layers[it->second].il);
}

// Replaces the windowed cache by one with as many cells as it needs. Returns the previous one; null if it was large enough.
static std::unique_ptr<llama_kv_cache> fit_window(llama_context & ctx) {
    const llama_kv_cache * window = llama_h2o_caches::of(ctx.get_memory()).window;
    if (!window || window->get_layer_ids().empty()) {
        return nullptr;
    }

    // the size that llama.cpp would choose if the cache with eviction were not smaller
    const uint32_t n_seqs  = window->get_n_seq_max() / window->get_n_stream();
    const uint32_t n_cells = GGML_PAD(ctx.get_model().hparams.n_swa * n_seqs + ctx.get_cparams().n_ubatch, 256);
    if (n_cells == window->get_size()) {
        return nullptr;
    }

    const std::unique_ptr<llama_memory_i> memory = llama_h2o::new_memory(ctx, *window, n_cells);

    std::unique_ptr<llama_kv_cache> res;
    llama_h2o_caches::swap_window(*memory, res);
    llama_h2o_caches::swap_window(*ctx.get_memory(), res);

    return res;
}

int32_t llama_h2o::attach(llama_context & ctx, llama_h2o_params params) {
    llama_kv_cache & kv = *cache_of(&ctx);

    std::unique_ptr<llama_kv_cache> window = fit_window(ctx);

    const size_t n_bufs = kv.ctxs_bufs.size();

    if (params.n_pos == 0) {
        params.n_pos = kv.hparams.n_ctx_train;
    }

    const uint32_t n_ctx_seq = ctx.cparams.n_ctx_seq;

    const auto detach = [&] {
        ctx.cparams.n_ctx_seq = n_ctx_seq;

        kv.h2o.reset();
        kv.ctxs_bufs.resize(n_bufs);
        if (window) {
            llama_h2o_caches::swap_window(*ctx.get_memory(), window);
        } else if (llama_kv_cache * same = llama_h2o_caches::of(ctx.get_memory()).window) {
            same->h2o_window.reset();
        }

        ctx.sched_need_reserve = true;
    };

    // llama.cpp chooses the LongRoPE factors by the cells per sequence, which are fewer than the positions here
    if (llama_h2o_has_longrope(ctx.get_model())) {
        ctx.cparams.n_ctx_seq = params.n_pos;
    }

    try {
        kv.h2o = std::make_shared<llama_h2o>(ctx, kv, params);

        const int32_t status = kv.h2o->reserve();
        if (status != LLAMA_H2O_OK) {
            detach();
        } else if (params.attention != LLAMA_H2O_ATTENTION_OPS) {
            llama_h2o_use_products(ctx.backend_cpu);
        }
        return status;
    } catch (...) {
        detach();
        throw;
    }
}

int32_t llama_h2o::reserve() {
    const llama_h2o_params & params = parts.params;

    // the new graph contains the nodes for the scores, and shows how the keys are rotated
    parts.ctx.sched_need_reserve = true;
    parts.ctx.sched_reserve();

    if (!llama_h2o_has_kernels(parts.layers, llama_h2o_attention_type(params.attention))) {
        return LLAMA_H2O_ERR_ATTENTION;
    }
    if (llama_h2o_can_rebase(parts) && parts.n_capacity() > params.n_pos) {
        return LLAMA_H2O_ERR_N_POS;
    }

    reserve_graphs();

    return LLAMA_H2O_OK;
}

void llama_h2o::reserve_graphs() {
    const bool on_host = std::all_of(parts.layers.begin(), parts.layers.end(),
            [](const llama_h2o_layer & layer) { return layer.shape.on_host; });
    if (on_host && !parts.policy->has_need(LLAMA_H2O_NEEDS_QUERY_ATTENTION)) {
        return;
    }

    parts.graphs.reserve(parts.layers.size(), llama_h2o_build_probe(parts, 0));
    llama_h2o_try_moves(parts);
}

llama_h2o_layer * llama_h2o::find_layer(int32_t il) {
    const auto it = kv.map_layer_ids.find(il);

    return it == kv.map_layer_ids.end() ? nullptr : &parts.layers[it->second];
}

void llama_h2o::watch_keys(const ggml_tensor * k_cur, int32_t il) {
    auto & rope = find_layer(il)->rope;
    if (!rope) {
        rope = llama_h2o_read_rope(k_cur);
    }
}
