#include "llama-h2o.h"

struct reason {
    int32_t status;
    const char * text;
};

static const reason REASONS[] = {
    { LLAMA_H2O_OK, "ok" },
    { LLAMA_H2O_ERR_ARGUMENT, "null pointer, or sequence, layer or size out of range" },
    { LLAMA_H2O_ERR_PARAMS,
            "recent and slack must be at least 1, and the capacity and the positions must fit 31 bits" },
    { LLAMA_H2O_ERR_CELLS, "the context has fewer cells than the capacity: raise n_ctx or lower the budget" },
    { LLAMA_H2O_ERR_NOT_EMPTY, "the context has decoded tokens already: clear it first" },
    { LLAMA_H2O_ERR_ATTACHED, "eviction is attached to this context already" },
    { LLAMA_H2O_ERR_NOT_ATTACHED, "eviction is not attached to this context" },
    { LLAMA_H2O_ERR_SHARED_CELLS,
            "several sequences share one stream of cells: create the context with kv_unified = false" },
    { LLAMA_H2O_ERR_NO_CACHE, "the model has no causal KV cache (encoder, embedding or diffusion model)" },
    { LLAMA_H2O_ERR_RECURRENT, "the model is recurrent: it keeps a state of fixed size that has no rows to evict" },
    { LLAMA_H2O_ERR_SLIDING,
            "every layer with a KV cache has an attention window: its cache does not grow with the text" },
    { LLAMA_H2O_ERR_ALIBI,
            "ALiBi is not supported: its bias depends on the position of the cell, not of the row in it" },
    { LLAMA_H2O_ERR_SHARED_LAYERS, "layers that share K and V have different numbers of query heads" },
    { LLAMA_H2O_ERR_SPARSE,
            "sparse attention is not supported: the model chooses rows by keys that it keeps for all tokens" },
    { LLAMA_H2O_ERR_CACHE_KIND, "this kind of KV cache is not supported" },
    { LLAMA_H2O_ERR_ROW_BLOCKS, "the head size is not a multiple of the block size of the cache type: use f16" },
    { LLAMA_H2O_ERR_MEMORY, "out of memory" },
    { LLAMA_H2O_ERR_INTERNAL, "unexpected failure inside llama.cpp: see its log" },
    { LLAMA_H2O_ERR_N_POS,
            "the capacity exceeds the positions the model was trained on: lower the budget or the slack" },
    { LLAMA_H2O_ERR_PIN, "more tokens are pinned than there are pinned and heavy rows: raise heavy, or pin fewer" },
    { LLAMA_H2O_ERR_ATTENTION,
            "the attention type does not fit the processor, the head size or the cache type: use auto" },
    { LLAMA_H2O_ERR_ENLARGED, "the cache is enlarged already: shrink it first" },
    { LLAMA_H2O_ERR_NOT_ENLARGED, "the cache is not enlarged" },
    { LLAMA_H2O_ERR_POLICY, "unknown policy, or one of its parameters is missing or out of range: see the log" },
    { LLAMA_H2O_ERR_SPANS, "spans and segments must be ascending, not empty and disjoint, and at most a million" },
    { LLAMA_H2O_ERR_SPLIT, "the heads of a layer are split over devices: use split_mode = LLAMA_SPLIT_MODE_LAYER" },
    { LLAMA_H2O_ERR_NO_ARCHIVE, "there is no archive to recall rows from: attach eviction with rows for recall" },
    { LLAMA_H2O_ERR_ARCHIVE_FILE,
            "the archive file cannot be used: it is in use, not writable, or belongs to another text" },
    { LLAMA_H2O_ERR_ARCHIVE_TYPE,
            "the head size is not a multiple of the block size of the archive's type: use f16 for "
            "recall_type (--recall-type)" },
    { LLAMA_H2O_ERR_ARCHIVE_SIZE,
            "the archive's limit is less than the size of 128 tokens: raise recall_mib (--recall-mib)" },
    { LLAMA_H2O_ERR_FORGOTTEN,
            "pinned tokens and the newest token cannot be dropped, and dropped tokens cannot be pinned" },
    { LLAMA_H2O_ERR_RECALL_HEADS, "the head size is not a multiple of 4: evicted rows of this model cannot be "
                                  "searched, set recall to 0 (--recall 0)" },
};

const char * llama_h2o_strerror(int32_t status) {
    for (const auto & [known, text] : REASONS) {
        if (known == status) {
            return text;
        }
    }

    return "unknown status";
}
