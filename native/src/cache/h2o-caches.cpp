#include "cache/h2o-caches.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"

#include <typeinfo>
#include <utility>

// Exact type only: a class derived from T may use its cells differently.
template <typename T>
static T * exactly(llama_memory_i * memory) {
    auto * res = dynamic_cast<T *>(memory);

    return res && typeid(*res) == typeid(T) ? res : nullptr;
}

llama_kv_cache_iswa * llama_h2o_caches::windowed_of(llama_memory_i * memory) {
    auto * hybrid = exactly<llama_memory_hybrid_iswa>(memory);

    return hybrid ? hybrid->get_mem_attn() : exactly<llama_kv_cache_iswa>(memory);
}

llama_h2o_caches llama_h2o_caches::of(llama_memory_i * memory) {
    llama_h2o_caches res;

    res.growing   = exactly<llama_kv_cache>(memory);
    res.recurrent = exactly<llama_memory_recurrent>(memory);
    if (auto * windowed = windowed_of(memory)) {
        res.growing = windowed->get_base();
        res.window  = windowed->get_swa();
    }
    if (auto * hybrid = exactly<llama_memory_hybrid>(memory)) {
        res.growing   = hybrid->get_mem_attn();
        res.recurrent = hybrid->get_mem_recr();
    }
    if (auto * hybrid = exactly<llama_memory_hybrid_iswa>(memory)) {
        res.recurrent = hybrid->get_mem_recr();
    }

    return res;
}

const llama_kv_cache_context * llama_h2o_caches::growing_of(const llama_memory_context_i * mctx) {
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_context *>(mctx)) {
        return hybrid->get_attn();
    }
    if (const auto * hybrid = dynamic_cast<const llama_memory_hybrid_iswa_context *>(mctx)) {
        mctx = hybrid->get_attn();
    }
    if (const auto * windowed = dynamic_cast<const llama_kv_cache_iswa_context *>(mctx)) {
        return windowed->get_base();
    }

    return dynamic_cast<const llama_kv_cache_context *>(mctx);
}

void llama_h2o_caches::swap_growing(std::unique_ptr<llama_memory_i> & memory, std::unique_ptr<llama_kv_cache> & other) {
    if (auto * windowed = windowed_of(memory.get())) {
        std::swap(windowed->kv_base, other);
        return;
    }
    if (auto * hybrid = exactly<llama_memory_hybrid>(memory.get())) {
        std::swap(hybrid->mem_attn, other);
        return;
    }

    auto & mine = dynamic_cast<llama_kv_cache &>(*memory);
    memory.release();
    memory = std::move(other);
    other.reset(&mine);
}

void llama_h2o_caches::swap_window(llama_memory_i & memory, std::unique_ptr<llama_kv_cache> & other) {
    auto * windowed = windowed_of(&memory);
    if (!windowed) {
        throw std::bad_cast();
    }
    std::swap(windowed->kv_swa, other);
}
