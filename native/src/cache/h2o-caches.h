// What the memory of a context consists of: the cache of the layers that see the whole text, which eviction is attached to,
// and what has a size of its own beside it.

#pragma once

#include "llama-kv-cache.h"

#include <memory>

class llama_kv_cache_iswa;
class llama_memory_recurrent;

struct llama_h2o_caches {
    llama_kv_cache * growing           = nullptr; // null: there is none, or it means something else by its cells
    llama_kv_cache * window            = nullptr; // of layers that see a window or a chunk of the text; null: none do
    llama_memory_recurrent * recurrent = nullptr; // of layers with a state; null: there are none

    static llama_h2o_caches of(llama_memory_i * memory);

    // the part of a graph's memory that works on the growing cache, or null
    static const llama_kv_cache_context * growing_of(const llama_memory_context_i * mctx);

    // Exchange a cache of a memory for another one of the same kind. They throw std::bad_cast where there is none.
    static void swap_growing(std::unique_ptr<llama_memory_i> & memory, std::unique_ptr<llama_kv_cache> & other);
    static void swap_window(llama_memory_i & memory, std::unique_ptr<llama_kv_cache> & other);

private:
    static llama_kv_cache_iswa * windowed_of(llama_memory_i * memory);
};
