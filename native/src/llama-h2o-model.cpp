// What is known of a model before text is in its cache.

#include "llama-h2o.h"

#include "llama-kv-cells.h"
#include "llama-model.h"
#include "llama.h"

static bool has_rope_factors_by_size(const llama_model & model) {
    for (const auto & layer : model.layers) {
        if (layer.rope_long || layer.rope_short) {
            return true;
        }
    }

    return false;
}

// Whether a layer has K and V of its own for the whole text.
static bool grows(const llama_model & model, uint32_t il) {
    const llama_hparams & hparams = model.hparams;

    // all layers have both there
    const bool has_attention = !hparams.is_recr(il) || model.arch == LLM_ARCH_FALCON_H1;

    return has_attention && hparams.has_kv(il) && !hparams.is_swa(il);
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
    if (hparams.is_mla()) {
        return LLAMA_H2O_ERR_MLA;
    }
    if (hparams.use_alibi || hparams.f_max_alibi_bias > 0.0f) {
        return LLAMA_H2O_ERR_ALIBI;
    }
    if (has_rope_factors_by_size(*model)) {
        return LLAMA_H2O_ERR_ROPE_FACTORS;
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

// The elements of a row may be no whole number of blocks: such a cache is refused elsewhere.
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
