// Eviction attached to a KV cache: the hooks that llama_kv_cache and the graph call, and the order of the steps. The data
// that these steps share is in h2o-parts.h.

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

    // Allocates everything that the policy collects; nothing is allocated later. Throws std::exception if that fails.
    llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params);

    // the eviction attached to a context, or to the cache that a graph works on; null if there is none
    static llama_h2o * of(const llama_context * ctx);
    static llama_h2o * of(const llama_memory_context_i * mctx);

    // the first stream that the graph of mctx works on
    static uint32_t first_stream(const llama_memory_context_i * mctx);

    // the cache of a context that grows with the text; null for another kind of memory
    static llama_kv_cache * cache_of(const llama_context * ctx);

    // the type of V; with MLA, where V is a part of K, the type of K
    static ggml_type type_v(const llama_kv_cache & kv);

    // a new memory like that of a context, with n_cells cells of the cache's types
    static std::unique_ptr<llama_memory_i> new_memory(
            const llama_context & ctx, const llama_kv_cache & kv, uint32_t n_cells);

    // whether the heads of all V tensors on devices start at a multiple of their size
    static bool has_whole_rows(const llama_kv_cache & kv);

    // whether layers that share K and V have the same number of query heads
    static bool shares_evenly(const llama_kv_cache & kv);

    // the layer whose K and V in this cache a layer uses, normally itself; -1 if none
    static int32_t rows_of(const llama_kv_cache & kv, int32_t il);

    // if it fails or throws, the context is unchanged
    static int32_t attach(llama_context & ctx, llama_h2o_params params);

    llama_h2o_parts parts;

    uint32_t stream_of(llama_seq_id seq_id) const { return kv.seq_to_stream[seq_id]; }

    //
    // hooks of llama_kv_cache and of the memory that contains it
    //

    // llama_context::decode(), but returns -3 if it throws because memory is short: llama_decode() is a C function
    static int32_t decode(llama_context & ctx, const llama_batch & batch);

    // maximum size of a ubatch
    static uint32_t max_ubatch(const llama_context * ctx, uint32_t n_ubatch);

    // whether an operation was refused that has no return value
    bool is_refused() const { return parts.refused; }

    // make room for the ubatch, with a compaction if necessary, and find its cells
    bool place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo);

    // whether all parts of a memory can remove positions [p0, p1) exactly
    static bool can_remove(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    // returns whether the cache with eviction can remove them exactly; if so, prepares for it
    bool remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    void clear();

    // after a stream's pins have changed: restores evicted rows of pinned positions, if the archive has them
    void restore_pinned(uint32_t s);

    // for an operation that has no return value and cannot be exact: log an error, and fail to decode until the cache is
    // cleared
    void refuse(const char * operation);

    // The whole memory of a context; with eviction it ends with a checksum over all bytes, because llama.cpp's own parts have
    // none. seq_id -1: all sequences. Throw std::exception; after a failed read the sequences are empty
    static void write_memory(llama_context & ctx, llama_io_write_i & io, llama_seq_id seq_id, uint32_t flags);
    static void read_memory(llama_context & ctx, llama_io_read_i & io, llama_seq_id seq_id, uint32_t flags);

    // of an empty sequence, in all parts of the memory
    void zero_rows(llama_seq_id seq_id);

    // the part with eviction
    void state_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id);

    //
    // hooks of the graph
    //

    // maximum nodes that our hooks add to a graph, including views and inputs
    uint32_t n_graph_nodes() const { return MAX_LAYER_NODES * kv.map_layer_ids.size(); }

    // The layer whose K and V a layer of the model uses, itself or another one; null without eviction.
    llama_h2o_layer * find_layer(int32_t il);

    // inputs of the graph under construction, shared by all layers
    ggml_tensor * query_slots = nullptr;
    ggml_tensor * credit      = nullptr;

    // reads from the graph how the keys that it stores are rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    //
    // for the user of the cache
    //

    // for a memory with a growing cache, with or without eviction
    static llama_h2o_stats get_stats(llama_memory_i & memory, llama_seq_id seq_id);

    // see llama_h2o_set_breaker(); false if decoding cannot be aborted
    static bool set_breaker(llama_context & ctx, llama_h2o_breaker * breaker);

    // see llama_h2o_enlarge() and llama_h2o_shrink(). Throw std::exception; the cache is then unchanged. shrink() destroys
    // this object
    int32_t enlarge(uint32_t n_cells);
    int32_t shrink();

private:
    llama_kv_cache & kv;

    // if this is the eviction of an enlarged cache: the original cache
    std::unique_ptr<llama_kv_cache> smaller;

    // the constant weights are separate from the cache, because clearing the cache zeroes its buffers
    std::vector<llama_h2o_memory> weights;

    // whether positions [p0, p1) can be removed; a negative sequence stands for all
    bool is_removable(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const;

    // reserves the graphs, which shows whether the params can be met
    int32_t reserve();
    void reserve_graphs();

    // for n_new tokens of the positions [p_first, p_last]
    void make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last);
    void remove_from(uint32_t s, llama_pos p0, llama_pos p1);

    void give_back();

    // resets streams to their initial state
    void empty_streams(llama_seq_id seq_id);

    // first and one past the last stream of a sequence, or of all if seq_id is negative
    std::pair<uint32_t, uint32_t> stream_range(llama_seq_id seq_id) const;
};
