// The parts of a context's memory: the cache of the layers that attend to the whole text, to which eviction is attached, and
// the parts of fixed size.

#pragma once

#include "llama-kv-cache.h"

#include <memory>

class llama_kv_cache_iswa;
class llama_memory_recurrent;

struct llama_h2o_caches {
    llama_kv_cache * growing           = nullptr; // null: none, or a cache whose cells are not one token each
    llama_kv_cache * window            = nullptr; // of layers with a window or chunked attention; may be null
    llama_memory_recurrent * recurrent = nullptr; // of recurrent layers; may be null

    static llama_h2o_caches of(llama_memory_i * memory);

    // the part of a graph's memory that works on the growing cache, or null
    static const llama_kv_cache_context * growing_of(const llama_memory_context_i * mctx);

    // Exchange a cache of a memory for another one of the same kind. Throw std::bad_cast if there is none.
    static void swap_growing(std::unique_ptr<llama_memory_i> & memory, std::unique_ptr<llama_kv_cache> & other);
    static void swap_window(llama_memory_i & memory, std::unique_ptr<llama_kv_cache> & other);

private:
    static llama_kv_cache_iswa * windowed_of(llama_memory_i * memory);
};
