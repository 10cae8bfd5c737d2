// The functions of the C interface about a model and its memory, independent of eviction.

#include "llama-h2o-calls.h"

#include "cache/h2o-cache.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-rope.h"

#include "gguf.h"
#include "llama-context.h"
#include "llama-kv-cells.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_set>

// Whether a layer has its own K and V for the whole text.
static bool grows(const llama_model & model, uint32_t il) {
    const llama_hparams & hparams = model.hparams;

    // in Falcon-H1 all layers have both
    const bool has_attention = !hparams.is_recr(il) || model.arch == LLM_ARCH_FALCON_H1;

    return has_attention && hparams.has_kv(il) && !hparams.is_swa(il);
}

// The first token with the text of an earlier one, or -1. Like llama.cpp, makes a text from the number of a token without one.
static int64_t find_repeated(const gguf_context * ctx, int64_t key) {
    const size_t n = gguf_get_arr_n(ctx, key);

    std::deque<std::string> made;
    std::unordered_set<std::string_view> texts;
    texts.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        const char * text = gguf_get_arr_str(ctx, key, i);

        const std::string_view named =
                *text ? text : std::string_view(made.emplace_back("[EMPTY_" + std::to_string(i) + "]"));
        if (!texts.insert(named).second) {
            return int64_t(i);
        }
    }

    return -1;
}

int32_t llama_h2o_find_repeated_token(const gguf_context * ctx, int64_t * token) {
    if (!ctx || !token) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o_caught([&] {
        const int64_t key  = gguf_find_key(ctx, "tokenizer.ggml.tokens");
        const bool is_list = key >= 0 && gguf_get_kv_type(ctx, key) == GGUF_TYPE_ARRAY &&
                             gguf_get_arr_type(ctx, key) == GGUF_TYPE_STRING;

        *token = is_list ? find_repeated(ctx, key) : -1;

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_supports(const llama_model * model) {
    if (!model) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    const llama_hparams & hparams = model->hparams;

    if (llama_model_is_recurrent(model)) {
        return LLAMA_H2O_ERR_RECURRENT;
    }
    if (model->split_mode() == LLAMA_SPLIT_MODE_TENSOR) {
        return LLAMA_H2O_ERR_SPLIT;
    }
    if (llama_model_has_encoder(model) || !llama_model_has_decoder(model) || !hparams.causal_attn ||
            llama_model_is_diffusion(model)) {
        return LLAMA_H2O_ERR_NO_CACHE;
    }
    if (hparams.indexer_head_size > 0 || model->arch == LLM_ARCH_DEEPSEEK4) {
        return LLAMA_H2O_ERR_SPARSE;
    }
    if (hparams.use_alibi || hparams.f_max_alibi_bias > 0.0f) {
        return LLAMA_H2O_ERR_ALIBI;
    }

    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        if (grows(*model, il)) {
            return LLAMA_H2O_OK;
        }
    }

    return LLAMA_H2O_ERR_SLIDING;
}

uint32_t llama_h2o_n_pos_learned(const llama_model * model) {
    return model && model->pos_embd ? uint32_t(model->pos_embd->ne[1]) : 0;
}

uint32_t llama_h2o_n_pos(const llama_model * model, uint32_t n_ctx) {
    if (!model) {
        return 0;
    }

    const llama_hparams & hparams = model->hparams;

    // llama.cpp chooses after rounding n_ctx up to a multiple of 256
    const bool is_short = llama_h2o_has_longrope(*model) && GGML_PAD(uint64_t(n_ctx), 256) <= hparams.n_ctx_orig_yarn;

    return is_short ? std::min(hparams.n_ctx_orig_yarn, hparams.n_ctx_train) : hparams.n_ctx_train;
}

// Rounds down if n_embd is not a multiple of the block size: such a cache is rejected elsewhere.
static uint64_t size_of_row(int32_t type, uint32_t n_embd) {
    return type >= 0 && type < GGML_TYPE_COUNT && ggml_blck_size(ggml_type(type)) > 0
                   ? ggml_type_size(ggml_type(type)) * n_embd / ggml_blck_size(ggml_type(type))
                   : 0;
}

uint64_t llama_h2o_size_of_cell(const llama_model * model, int32_t type_k, int32_t type_v, bool offload_kqv) {
    if (!model || llama_model_is_recurrent(model) || !llama_model_has_decoder(model) || !model->hparams.causal_attn) {
        return 0;
    }

    const llama_hparams & hparams = model->hparams;

    uint64_t size = 2 * sizeof(llama_pos) + sizeof(llama_kv_cell_ext) + sizeof(llama_kv_cells::seq_set_t);
    for (uint32_t il = 0; il < hparams.n_layer(); ++il) {
        const bool on_device =
                offload_kqv && ggml_backend_dev_type(model->dev_layer(il)) != GGML_BACKEND_DEVICE_TYPE_CPU;
        if (on_device || !hparams.has_kv(il) || hparams.is_swa(il) || hparams.is_recr(il)) {
            continue;
        }
        size += size_of_row(type_k, hparams.n_embd_k_gqa(il));
        size += hparams.is_mla() ? 0 : size_of_row(type_v, hparams.n_embd_v_gqa(il));
    }

    return size;
}

// The layer whose rows in this cache a layer uses; -1 if none.
static int32_t rows_of(const llama_kv_cache * kv, int32_t il) {
    return kv ? llama_h2o::rows_of(*kv, il) : -1;
}

int32_t llama_h2o_get_layer(const llama_context * ctx, int32_t il, llama_h2o_layer_info * layer) {
    if (!ctx || !layer || il < 0 || uint32_t(il) >= ctx->get_model().hparams.n_layer()) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }
    if (!ctx->get_memory()) {
        return LLAMA_H2O_ERR_NO_CACHE;
    }

    const llama_h2o_caches caches = llama_h2o_caches::of(ctx->get_memory());
    if (!caches.growing && !caches.recurrent) {
        return LLAMA_H2O_ERR_CACHE_KIND;
    }

    const llama_hparams & hparams = ctx->get_model().hparams;

    *layer         = {};
    layer->rows_of = rows_of(caches.growing, il);
    if (layer->rows_of < 0) {
        layer->rows_of = rows_of(caches.window, il);
        if (layer->rows_of >= 0) {
            layer->window  = hparams.n_swa;
            layer->chunked = hparams.swa_type == LLAMA_SWA_TYPE_CHUNKED;
        }
    }
    layer->recurrent = caches.recurrent && caches.recurrent->r_l[il];
    if (layer->rows_of >= 0) {
        layer->n_head_kv     = hparams.n_head_kv(layer->rows_of);
        layer->n_embd_head_k = hparams.n_embd_head_k(layer->rows_of);
        layer->n_embd_head_v = hparams.n_embd_head_v(layer->rows_of);
    }

    return LLAMA_H2O_OK;
}
