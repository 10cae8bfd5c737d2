// Helpers of the C interface.

#pragma once

#include "llama-h2o.h"

#include "cache/h2o-cache.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <exception>
#include <new>

inline bool llama_h2o_has_seq(const llama_kv_cache & kv, int32_t seq_id) {
    return seq_id >= 0 && uint32_t(seq_id) < kv.get_n_seq_max();
}

// Calls fn() and converts exceptions to return codes.
template <typename F>
auto llama_h2o_caught(F fn) -> decltype(fn()) {
    try {
        return fn();
    } catch (const std::bad_alloc &) {
        return LLAMA_H2O_ERR_MEMORY;
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return LLAMA_H2O_ERR_INTERNAL;
    }
}

// The same for fn(eviction of the context).
template <typename F>
int32_t llama_h2o_with_eviction(llama_context * ctx, F fn) {
    if (!ctx) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    llama_h2o * h2o = llama_h2o::of(ctx);
    if (!h2o) {
        return LLAMA_H2O_ERR_NOT_ATTACHED;
    }

    return llama_h2o_caught([&] { return fn(*h2o); });
}

// The same for fn(eviction, stream of the sequence).
template <typename F>
int32_t llama_h2o_with_stream(llama_context * ctx, int32_t seq_id, F fn) {
    return llama_h2o_with_eviction(ctx, [&](llama_h2o & h2o) -> int32_t {
        return llama_h2o_has_seq(*llama_h2o::cache_of(ctx), seq_id) ? fn(h2o, h2o.stream_of(seq_id))
                                                                    : LLAMA_H2O_ERR_ARGUMENT;
    });
}
