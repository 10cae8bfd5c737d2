// Eviction attached to a KV cache: the scores, whose row lies where, and the hooks that
// llama_kv_cache calls.

#pragma once

#include "llama-h2o.h"
#include "llama-kv-cache.h"

#include "cache/h2o-host-rows.h"
#include "cache/h2o-marks.h"
#include "cache/h2o-rope.h"
#include "graph/h2o-queries.h"
#include "policies/h2o-policy.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

struct llama_h2o_kernel;
class llama_h2o_cache_graph;
class llama_h2o_state_reader;
class llama_h2o_state_writer;

class llama_io_read_i;
class llama_io_write_i;

struct llama_h2o {
    static constexpr uint32_t MAX_LAYER_NODES = 112;

    // Allocates the scores, and nothing later. Throws std::exception if that fails.
    llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params);

    // the eviction attached to a context, or to the cache behind a graph; null if there is none
    static llama_h2o * of(const llama_context * ctx);
    static llama_h2o * of(const llama_memory_context_i * mctx);

    // the first stream that the graph of mctx works on
    static uint32_t first_stream(const llama_memory_context_i * mctx);

    // the plain KV cache of a context, or null if it has another kind of memory
    static llama_kv_cache * plain_cache(const llama_context * ctx);

    // leaves the context as it was if it fails or throws
    static int32_t attach(llama_context & ctx, llama_h2o_params params);

    //
    // hooks of llama_kv_cache
    //

    // most tokens that may be decoded at once; 0 after an operation that was refused
    uint32_t max_ubatch(uint32_t n_ubatch) const;

    // make room for the ubatch, with a compaction if it takes one, and find its cells
    bool place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo);

    // whether positions [p0, p1) can be removed exactly; if so, prepares for it
    bool remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1);

    void clear();

    // an operation that has no return value and cannot be done exactly: say so, and decode nothing
    // until the cache is cleared
    void refuse(const char * operation);

    //
    // graph
    //

    struct layer {
        uint32_t il;        // layer of the model
        uint32_t n_head;    // query heads
        uint32_t n_head_kv; // KV heads

        llama_h2o_row_layout k;
        llama_h2o_row_layout v;

        bool on_host  = false; // whether the host can reach the rows where they lie
        bool collects = false; // whether the graph adds to the scores

        ggml_tensor * scores  = nullptr; // F32 [n_cells, n_head_kv, n_stream]
        ggml_tensor * squares = nullptr; // F32 likewise, of squared probabilities; null unless the policy asks for it
        ggml_tensor * queries = nullptr; // F32 [n_embd_head_k, n_queries, n_head, n_stream], the last ones; likewise
        ggml_tensor * weights =
                nullptr; // F32 [n_ubatch*n_head], all n_head_kv/n_head: sums become means over a KV group

        std::optional<llama_h2o_rope> rope = std::nullopt; // of the keys; none until the first graph is built

        const llama_h2o_kernel * kernel = nullptr; // for attention with scores in one op on the CPU
        bool on_cuda                    = false;   // whether the CUDA backend has kernels for that
        bool fused                      = false;   // whether the last graph attends so, not with ggml's ops

        // how the last graph attends
        float kq_scale      = 0.0f;
        float kq_cap        = 0.0f; // 0: none
        ggml_tensor * sinks = nullptr;

        ggml_tensor * credit = nullptr; // of the last graph; null unless the policy weighs queries

        // Calls fn(tensor, offset, size) for the pieces of what the policy has collected of a stream, up to n_span cells.
        template <typename F>
        void for_each_collected(uint32_t s, uint32_t n_span, F fn) const {
            for (ggml_tensor * sums : { scores, squares }) {
                for (uint32_t head = 0; sums && head < n_head_kv; ++head) {
                    fn(sums, sums->nb[2] * s + sums->nb[1] * head, n_span * sizeof(float));
                }
            }
            if (queries) {
                fn(queries, queries->nb[3] * s, queries->nb[3]);
            }
        }

        // probabilities of queries, as the layer attends: F32 [n_kv, n_tokens, n_head, n_stream]
        ggml_tensor * build_probs(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * kq_mask) const;
    };

    layer * find_layer(int32_t il);

    // most nodes that our hooks add to a graph, views and inputs included
    uint32_t n_graph_nodes() const { return MAX_LAYER_NODES * layers.size(); }

    bool is_first(const layer & layer) const { return &layer == &layers.front(); }

    // inputs of the graph that is being built, the same for all layers
    ggml_tensor * query_slots = nullptr;
    ggml_tensor * credit      = nullptr;

    // what the attention that a query at p pays to each cell counts, see h2o-credit.h
    bool weighs_queries() const { return policy->weighs(); }
    void fill_credit(llama_seq_id seq_id, llama_pos p, float * data, size_t n_kv) const;

    // finds out how the keys that are about to be stored were rotated
    void watch_keys(const ggml_tensor * k_cur, int32_t il);

    // the position for the rotary embedding of a token that is being decoded
    llama_pos rope_pos(llama_seq_id seq_id, llama_pos pos) const;

    //
    // what the cache holds
    //

    // of a cache with or without eviction
    static llama_h2o_stats get_stats(const llama_kv_cache & kv, llama_seq_id seq_id);

    // memory that is neither the host's nor a rearranged part of it
    static bool is_on_device(ggml_backend_buffer_type_t buft);

    // bytes, of graphs of our own
    size_t size_of_work_on_devices() const;

    // see llama_h2o_get_rows()
    int32_t get_rows(llama_seq_id seq_id, int32_t il, uint32_t n_rows, int32_t * pos, float * score);

    //
    // for the user of the cache
    //

    int32_t pin(llama_seq_id seq_id, uint32_t n_pinned);
    int32_t pin_spans(llama_seq_id seq_id, std::vector<llama_h2o_span> spans);
    int32_t share_fairly(llama_seq_id seq_id, std::vector<llama_pos> starts);

    // see h2o-marks.h. mark() throws std::bad_alloc
    void mark(llama_seq_id seq_id);
    llama_pos marked(llama_seq_id seq_id, llama_pos pos) const; // the last mark up to a position, or 0

    // see llama_h2o_enlarge() and llama_h2o_shrink(). Throw std::exception; the cache is then as it was. After
    // shrink() this object is gone
    int32_t enlarge(uint32_t n_cells);
    int32_t shrink();

    // one sequence, or all of them if seq_id is -1. Throw std::exception; a failed read leaves what
    // was to be read empty
    void state_write(llama_io_write_i & io, llama_seq_id seq_id) const;
    void state_read(llama_io_read_i & io, llama_seq_id seq_id);

private:
    // of a stream, see llama_h2o_stats
    struct counters {
        uint64_t n_compactions    = 0;
        uint64_t n_cells_freed    = 0;
        uint64_t n_rows_evicted   = 0;
        uint64_t n_rows_moved     = 0;
        uint64_t n_rebases        = 0;
        uint64_t t_compactions_us = 0;
        uint64_t t_rebases_us     = 0;
    };

    // the numbers of a stream in a saved state, without gaps
    struct stream_head {
        uint32_t n_used; // cells in use
        uint32_t n_span; // cells up to the last one in use
        uint32_t v_head; // where the search for free cells begins
        uint32_t n_pinned;
        uint32_t n_spans;
        uint32_t n_starts;
        uint32_t n_queries; // of the ring
        llama_pos shift;
        llama_pos pos_removable;
        llama_pos pos_forgotten;
        counters count;
    };

    struct stream {
        // whose row lies in a cell, for the cells that a compaction has seen: [n_layer][n_head_kv][n_cells]
        std::vector<std::vector<llama_pos>> pos;

        // and the position it is rotated to, likewise
        std::vector<std::vector<llama_pos>> rope_pos;

        // 0: all rows of the cell belong to the cell's own position, and the lists do not have them
        std::vector<uint8_t> listed; // [n_cells]

        // a new token is rotated to its position less this; grows with every re-base
        llama_pos shift = 0;

        uint32_t n_pinned = 0;
        std::vector<llama_h2o_span> spans; // pinned, ascending and apart
        std::vector<llama_pos> starts;     // of segments that share the places fairly, ascending; or empty

        std::vector<llama_h2o_query_slot> queries; // of the ring

        std::vector<llama_h2o_text_mark> marks; // ascending; none is older than the last compaction or re-base

        // cells were freed since their scores were last zeroed
        bool stale = false;

        // from here on every head has all its rows, each in its own cell
        llama_pos pos_removable = 0;

        // the newest position when the policy last took away from what was collected, or -1
        llama_pos pos_forgotten = -1;

        counters count;
    };

    llama_context & ctx;
    llama_kv_cache & kv;

    const std::unique_ptr<llama_h2o_policy> policy;

    const llama_h2o_params params; // with the text of the policy above

    std::vector<layer> layers;
    std::vector<stream> streams;

    bool refused = false;

    // while this is the eviction of a larger cache: the cache that the context goes back to
    std::unique_ptr<llama_memory_i> smaller;

    ggml_backend_sched_ptr sched; // for graphs of our own; null if there are none

    // the constant weights live apart from the cache, which may be cleared
    std::vector<std::pair<ggml_context_ptr, ggml_backend_buffer_ptr>> weights_bufs;

    // makes the graphs, which shows whether the params can be met
    int32_t reserve();

    void add_layers();
    void choose_kernels();
    void alloc_tensors();

    // whether the graph computes attention as the params ask for
    bool has_kernels_asked_for() const;

    void make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last);

    uint32_t n_heads() const { return first_head(layers.size()); }
    uint32_t first_head(size_t ikv) const; // of a layer, among the KV heads of all

    // first and one past the last stream of a sequence, or of all if seq_id is negative
    std::pair<uint32_t, uint32_t> stream_range(llama_seq_id seq_id) const;

    // the newest position of a stream, or -1
    llama_pos newest(uint32_t s) const;

    std::vector<uint32_t> used_cells(uint32_t s) const;

    llama_pos row_pos(const stream & st, const llama_kv_cells & cells, size_t ikv, uint32_t head, uint32_t cell) const;

    void reset_free_cells(uint32_t s);
    void list_rows(uint32_t s, const std::vector<uint32_t> & used);

    // What a policy has collected of the rows of a stream, to be read and written by the host.
    struct collected {
        std::vector<llama_h2o_host_rows> scores;  // of the layers
        std::vector<llama_h2o_host_rows> squares; // likewise; or empty
    };

    void compact(uint32_t s);
    llama_h2o_rule rule(uint32_t s) const;
    llama_h2o_keep select(uint32_t s, collected & rows, std::vector<uint32_t> used);
    void select_layers(uint32_t s,
            size_t begin,
            size_t end,
            const std::vector<std::vector<float>> & probes,
            collected & rows,
            llama_h2o_keep & keep) const;
    bool ends_scope(size_t ikv, uint32_t head) const;
    void score_head(size_t ikv,
            uint32_t head,
            const llama_h2o_selection & selection,
            const std::vector<float> * probe,
            collected & rows,
            const std::vector<uint32_t> & used,
            double * score) const;
    collected rows_of(uint32_t s) const;
    void forget(uint32_t s, collected & rows, llama_pos pos);
    void keep_credit_small(uint32_t s, llama_pos p_last);
    void move_rows(uint32_t s, const llama_h2o_plan & plan);
    llama_h2o_cache_graph build_most_moves() const;
    void move_lists(uint32_t s, const llama_h2o_plan & plan, collected & rows);
    void free_cells(uint32_t s, const std::vector<uint32_t> & freed);

    // graphs of our own
    void reserve_graphs();
    std::vector<std::vector<float>> run(const llama_h2o_cache_graph & graph);
    void run_in_place(const llama_h2o_cache_graph & graph);

    // see h2o-probe.cpp; [n_layer] of [n_cells, n_probed, n_head_kv]
    llama_h2o_cache_graph build_probe(uint32_t s) const;

    // see h2o-queries.cpp
    void note_queries(stream & st, llama_pos p_first, llama_pos p_last);
    void forget_queries(stream & st, llama_pos p0);
    void turn_queries(uint32_t s, llama_pos back, llama_h2o_cache_graph & graph);

    // see h2o-rebase.cpp
    bool can_rebase() const;
    llama_pos pos_limit() const; // first position that a text cannot reach
    void rebase(uint32_t s, llama_pos p_next);
    llama_h2o_cache_graph build_most_turns() const;
    void reset_stream(uint32_t s);

    void go_back_to_mark(uint32_t s, llama_pos p0);

    void give_back();
    void take_rows(llama_h2o & from);
    void take_cells(const llama_h2o & from, uint32_t s, const std::vector<uint32_t> & used);
    void take_lists(const llama_h2o & from, uint32_t s, const std::vector<uint32_t> & used);

    // LLAMA_H2O_OK, or why these pins or segments cannot be
    int32_t check_pins(uint32_t n_pinned, const std::vector<llama_h2o_span> & spans) const;
    static int32_t check_starts(const std::vector<llama_pos> & starts);

    void state_write_stream(llama_h2o_state_writer & out, uint32_t s) const;
    void state_read_stream(llama_h2o_state_reader & in, uint32_t s);
    void expect_head(
            const stream_head & head, const std::vector<llama_h2o_query_slot> & queries, llama_pos newest) const;
    void expect_rows(uint32_t s, const stream_head & head, const std::vector<uint32_t> & used) const;
};
