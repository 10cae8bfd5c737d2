#include "llama-h2o.h"

const char * llama_h2o_strerror(int32_t status) {
    switch (status) {
        case LLAMA_H2O_OK:
            return "ok";
        case LLAMA_H2O_ERR_ARGUMENT:
            return "a null pointer, or a sequence, layer or size that is out of range";
        case LLAMA_H2O_ERR_PARAMS:
            return "recent and slack must be at least 1, and the capacity and the positions must fit 31 bits";
        case LLAMA_H2O_ERR_CELLS:
            return "the context has fewer cells than the capacity: raise n_ctx or lower the budget";
        case LLAMA_H2O_ERR_NOT_EMPTY:
            return "the context has decoded tokens already: clear it first";
        case LLAMA_H2O_ERR_ATTACHED:
            return "eviction is attached to this context already";
        case LLAMA_H2O_ERR_NOT_ATTACHED:
            return "eviction is not attached to this context";
        case LLAMA_H2O_ERR_SHARED_CELLS:
            return "several sequences share one stream of cells: create the context with kv_unified = false";
        case LLAMA_H2O_ERR_NO_CACHE:
            return "the model has no causal KV cache (encoder, embedding or diffusion model)";
        case LLAMA_H2O_ERR_RECURRENT:
            return "the model is recurrent: it keeps a state of fixed size that has no rows to evict";
        case LLAMA_H2O_ERR_SLIDING:
            return "every layer with a KV cache sees a window only: that cache does not grow with the text";
        case LLAMA_H2O_ERR_ALIBI:
            return "ALiBi is not supported: its bias comes from the cell, not from the row that lies in it";
        case LLAMA_H2O_ERR_SHARED_LAYERS:
            return "layers that share K and V have different numbers of query heads";
        case LLAMA_H2O_ERR_SPARSE:
            return "sparse attention chooses the rows it looks at on its own, by keys that are kept for all of them";
        case LLAMA_H2O_ERR_CACHE_KIND:
            return "this kind of KV cache is not supported";
        case LLAMA_H2O_ERR_ROW_BLOCKS:
            return "the head size is no multiple of the block size of the cache type: use f16";
        case LLAMA_H2O_ERR_MEMORY:
            return "out of memory for the scores";
        case LLAMA_H2O_ERR_INTERNAL:
            return "unexpected failure inside llama.cpp: see its log";
        case LLAMA_H2O_ERR_N_POS:
            return "the capacity exceeds the positions the model was trained on: lower the budget or the slack";
        case LLAMA_H2O_ERR_REBASE:
            return "the keys of this model cannot be given other positions: use the original ones";
        case LLAMA_H2O_ERR_PIN:
            return "more tokens are pinned than there are pinned and heavy rows: raise heavy, or pin fewer";
        case LLAMA_H2O_ERR_ATTENTION:
            return "this kind of attention does not fit the processor, the head size or the cache: use auto";
        case LLAMA_H2O_ERR_ENLARGED:
            return "the cache is enlarged already: shrink it first";
        case LLAMA_H2O_ERR_NOT_ENLARGED:
            return "the cache is not enlarged";
        case LLAMA_H2O_ERR_POLICY:
            return "the policy is unknown, or a parameter of it is missing or out of its limits: see the log";
        case LLAMA_H2O_ERR_SPANS:
            return "spans and segments must be ascending, not empty and apart, and no more than a million";
        case LLAMA_H2O_ERR_SPLIT:
            return "the heads of a layer are split over devices: use split_mode = LLAMA_SPLIT_MODE_LAYER";
        case LLAMA_H2O_ERR_NO_ARCHIVE:
            return "there is no archive to recall rows from: attach eviction with rows for recall";
        case LLAMA_H2O_ERR_ARCHIVE_FILE:
            return "the file of the archive cannot be used: it is in use, cannot be written, or is of another text";
        case LLAMA_H2O_ERR_ARCHIVE_TYPE:
            return "the head size is no multiple of the block size of the archive's type: use f16 for recall_type "
                   "(--recall-type)";
        case LLAMA_H2O_ERR_ARCHIVE_SIZE:
            return "the archive's limit is less than 128 tokens take: raise recall_mib (--recall-mib)";
        case LLAMA_H2O_ERR_RECALL_HEADS:
            return "the head size is no multiple of 4: evicted rows of this model cannot be found again, set recall to "
                   "0 "
                   "(--recall 0)";
    }

    return "unknown status";
}
