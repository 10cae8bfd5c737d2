// Eviction attached to a KV cache: the hooks that llama_kv_cache and the graph call, and the order in which things
// happen. Those who do them are named in h2o-parts.h.

#pragma once

#include "llama-h2o.h"
#include "llama-kv-cache.h"

#include "cache/h2o-parts.h"

#include <memory>
#include <utility>
#include <vector>

class llama_io_read_i;
class llama_io_write_i;

struct llama_h2o {
    static constexpr uint32_t MAX_LAYER_NODES = 216;

    // Allocates what the policy collects, and nothing later. Throws std::exception if that fails.
    llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params);

    // the eviction attached to a context, or to the cache behind a graph; null if there is none
    static llama_h2o * of(const llama_context * ctx);
    static llama_h2o * of(const llama_memory_context_i * mctx);

    // the first stream that the graph of mctx works on
    static uint32_t first_stream(const llama_memory_context_i * mctx);

    // the cache of a context that grows with the text, or null if it has another kind of memory
    static llama_kv_cache * cache_of(const llama_context * ctx);

    // of the rows of V; where they are a part of K (MLA), of that
    static ggml_type type_v(const llama_kv_cache & kv);

    // a memory as that of a context, with so many cells of the types of a cache
    static std::unique_ptr<llama_memory_i> new_memory(
            const llama_context & ctx, const llama_kv_cache & kv, uint32_t n_cells);

    // whether the heads of all V on devices lie at a multiple of their size
    static bool has_whole_rows(const llama_kv_cache & kv);

    // whether layers that use another one's K and V have as many query heads as that one
    static bool shares_evenly(const llama_kv_cache & kv);

    // the layer whose K and V in this cache a layer uses, its own as a rule; -1 if none
    static int32_t rows_of(const llama_kv_cache & kv, int32_t il);

    // leaves the context as it was if it fails or throws
    static int32_t attach(llama_context & ctx, llama_h2o_params params);

    llama_h2o_parts parts;

    uint32_t stream_of(llama_seq_id seq_id) const { return kv.seq_to_stream[seq_id]; }

    //
    // hooks of llama_kv_cache, and of the memory that it is a part of
    //

    // llama_context::decode(); what it throws, for want of memory, nobody behind llama_decode() could catch: -3
    static int32_t decode(llama_context & ctx, const llama_batch & batch);

    // most tokens of a context that may be decoded at once
    static uint32_t max_ubatch(const llama_context * ctx, uint32_t n_ubatch);

    // after an operation that cannot be undone
    bool is_refused() const { return parts.refused; }

    // make room for the ubatch, with a compaction if it takes one, and find its cells
    bool place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo);

    // whether positions [p0, p1) can be removed exactly from all parts of a memory
    static bool can_remove(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // the same for the evicted cache; if so, prepares for it
    bool remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    void clear();

    // after a stream's pins have changed: those of them that were evicted come back, if the archive has them
    void restore_pinned(uint32_t s);

    // an operation that has no return value and cannot be done exactly: say so, and decode nothing
    // until the cache is cleared
    void refuse(const char * operation);

    // The whole memory of a context, with a checksum over all its bytes where something is evicted: llama.cpp's own parts
    // have none. One sequence, or all of them if seq_id is -1. Throw std::exception; a failed read leaves what was to be
    // read empty
    static void write_memory(llama_context & ctx, llama_io_write_i & io, llama_seq_id seq_id, uint32_t flags);
    static void read_memory(llama_context & ctx, llama_io_read_i & io, llama_seq_id seq_id, uint32_t flags);

    // of a sequence without text, in all parts of the memory
    void zero_rows(llama_seq_id seq_id);

    // the part of it that is evicted
    void state_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id);

    //
    // hooks of the graph
    //

    // most nodes that our hooks add to a graph, views and inputs included
    uint32_t n_graph_nodes() const { return MAX_LAYER_NODES * kv.map_layer_ids.size(); }

    // The one whose K and V a layer of the model uses, its own or another one's; null if none is evicted.
    llama_h2o_layer * find_layer(int32_t il);

    // inputs of the graph that is being built, the same for all layers
    ggml_tensor * query_slots = nullptr;
    ggml_tensor * credit      = nullptr;

    // finds out how the keys that are about to be stored were rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    //
    // for the user of the cache
    //

    // of a memory whose growing cache is known, with or without eviction
    static llama_h2o_stats get_stats(llama_memory_i & memory, llama_seq_id seq_id);

    // see llama_h2o_set_breaker(); false where nothing can be broken off
    static bool set_breaker(llama_context & ctx, llama_h2o_breaker * breaker);

    // see llama_h2o_enlarge() and llama_h2o_shrink(). Throw std::exception; the cache is then as it was. After
    // shrink() this object is gone
    int32_t enlarge(uint32_t n_cells);
    int32_t shrink();

private:
    llama_kv_cache & kv;

    // while this is the eviction of a larger cache: the cache that the context goes back to
    std::unique_ptr<llama_kv_cache> smaller;

    // the constant weights live apart from the cache, which may be cleared
    std::vector<llama_h2o_memory> weights;

    // whether positions [p0, p1) can be removed; a negative sequence stands for all
    bool is_removable(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // makes the graphs, which shows whether the params can be met
    int32_t reserve();
    void reserve_graphs();

    // for n_new tokens of the positions [p_first, p_last]
    void make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last);
    void remove_from(uint32_t s, llama_pos p0, llama_pos p1);

    void give_back();

    // as streams that no text has been written to
    void empty_streams(llama_seq_id seq_id);

    // first and one past the last stream of a sequence, or of all if seq_id is negative
    std::pair<uint32_t, uint32_t> stream_range(llama_seq_id seq_id) const;
};
