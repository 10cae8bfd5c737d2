#include "cache/h2o-cache.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-collected.h"
#include "cache/h2o-compaction.h"
#include "cache/h2o-rebase.h"
#include "cache/h2o-state.h"

#include "recall/h2o-checksum.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

//
// hooks of llama_kv_cache and of the memory that contains it
//

int32_t llama_h2o::decode(llama_context & ctx, const llama_batch & batch) {
    try {
        return ctx.decode(batch);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        if (llama_h2o * h2o = of(&ctx)) {
            for (uint32_t s = 0; s < h2o->parts.streams.size(); ++s) {
                h2o->parts.cells.free_lost(s);
            }
        }
        return -3;
    }
}

uint32_t llama_h2o::max_ubatch(const llama_context * ctx, uint32_t n_ubatch) {
    const llama_h2o * h2o = of(ctx);

    // non-causal tokens must be in the same ubatch
    return h2o && ctx->get_cparams().causal_attn ? std::min(n_ubatch, h2o->parts.params.slack) : n_ubatch;
}

// The id of a token. Image embeddings have none: a checksum of the embedding is used instead.
static int32_t name_of(const llama_ubatch & ubatch, uint32_t t, uint32_t n_embd) {
    if (ubatch.token) {
        return ubatch.token[t];
    }

    llama_h2o_checksum sum;
    sum.add(ubatch.embd + size_t(t) * n_embd, n_embd * sizeof(float));
    for (uint32_t i = 1; i < ubatch.n_pos; ++i) {
        sum.add(ubatch.pos + size_t(i) * ubatch.n_tokens + t, sizeof(llama_pos));
    }

    return int32_t(sum.value() & std::numeric_limits<int32_t>::max());
}

// Records the image that a token with several positions belongs to, if any: see llama-h2o.h.
static void note_pictures(llama_h2o_row_positions & rows, const llama_ubatch & ubatch, uint32_t t) {
    const auto pos = [&](uint32_t i) {
        return ubatch.pos[size_t(i) * ubatch.n_tokens + t];
    };

    rows.drop_pictures(pos(0));
    if (ubatch.token || ubatch.n_pos == 1 || pos(1) < 0) {
        return;
    }
    if (pos(2) <= 0 || pos(3) <= 0 || pos(1) >= int64_t(pos(2)) * pos(3)) {
        throw std::runtime_error("invalid position in an image: pass the positions that llama-h2o.h describes");
    }
    rows.note({ pos(0), pos(1), pos(2), pos(3), 1 });
}

bool llama_h2o::place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo) {
    const uint32_t n_new = kv.n_stream > 1 ? ubatch.n_tokens / ubatch.n_seqs_unq : ubatch.n_tokens;

    if (parts.breaker) {
        parts.breaker->next_us = std::numeric_limits<int64_t>::max(); // graphs that change rows must not be aborted
    }

    try {
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id_unq[i];

            llama_pos p_first = std::numeric_limits<llama_pos>::max();
            llama_pos p_last  = -1;
            for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
                if (ubatch.seq_id[t][0] == seq_id) {
                    p_first = std::min(p_first, ubatch.pos[t]);
                    p_last  = std::max(p_last, ubatch.pos[t]);
                    note_pictures(parts.streams[stream_of(seq_id)].rows, ubatch, t);
                    llama_h2o_note_token(
                            parts, stream_of(seq_id), ubatch.pos[t], name_of(ubatch, t, kv.hparams.n_embd_inp()));
                }
            }

            make_room(kv.seq_to_stream[seq_id], n_new, p_first, p_last);
        }

        sinfo = kv.find_slot(ubatch, false);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: failed to make room for %u tokens: %s\n", __func__, ubatch.n_tokens, err.what());
        return false;
    }

    if (parts.breaker) {
        parts.breaker->next_us = ggml_time_us() + parts.breaker->interval_us;
    }

    return !sinfo.empty();
}

void llama_h2o::make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last) {
    auto & st = parts.streams[s];

    if (st.broken) {
        throw std::runtime_error(
                "an earlier change of the rows failed: clear the sequence and evaluate the text again");
    }
    if (n_new > parts.params.slack) {
        throw std::runtime_error("the tokens that attend to each other exceed the slack");
    }
    if (p_last >= llama_h2o_pos_limit(parts)) {
        throw std::runtime_error("all positions that the model was trained on are used");
    }
    if (uint64_t(parts.cells[s].get_used()) + n_new > parts.n_capacity()) {
        llama_h2o_compact(parts, s);
    }
    if (uint32_t(st.rows.rope_pos(p_last)) >= parts.params.n_pos && llama_h2o_can_rebase(parts)) {
        llama_h2o_rebase(parts, s, p_first, p_last - p_first + 1);
    }
    if (st.stale) {
        llama_h2o_reset_free_cells(parts, s);
    }

    if (parts.breaker) {
        llama_h2o_keep_before(parts, s, p_first);
    }

    st.queries.note(p_first, p_last, [&](llama_pos p) { return st.rows.rope_pos(p); });
    if (st.index) {
        st.index->prepare(n_new);
    }
    st.n_looked += n_new;
    llama_h2o_keep_credit_small(parts, s, p_last);
}

bool llama_h2o::can_remove(llama_memory_i * memory, llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const llama_kv_cache * growing = llama_h2o_caches::of(memory).growing;

    p0 = std::max(p0, 0);
    p1 = p1 < 0 ? std::numeric_limits<llama_pos>::max() : p1;

    return !growing || !growing->h2o || growing->h2o->is_removable(seq_id, p0, p1);
}

bool llama_h2o::is_removable(llama_seq_id seq_id, llama_pos p0, llama_pos p1) const {
    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        const bool has_end = p1 > parts.cells.newest(s);
        const bool is_all  = has_end && p0 <= 0;
        const bool is_none = p0 > parts.cells.newest(s);
        // llama.cpp takes the newest position from the cells, and a dropped position has none
        const bool is_gap  = parts.streams[s].claims.is_dropped(p0 - 1);
        const bool is_tail = has_end && p0 >= parts.pos_removable(s) && !is_gap;

        // before the first compaction every row is in its own cell, so any range can be removed
        const bool is_middle = !has_end && parts.streams[s].pos_removable == 0;

        if (!is_all && !is_none && !is_tail && !is_middle) {
            return false;
        }
    }

    return true;
}

// Calls fn(), which removes tokens of a stream. If it throws because memory is short, the stream is marked as broken until it
// is cleared: the C functions llama_memory_seq_rm() and llama_memory_clear() must not throw.
template <typename F>
static bool has_removed(llama_h2o_stream & st, F fn) {
    try {
        fn();
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        st.broken = true;
        return false;
    }

    return true;
}

bool llama_h2o::remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    if (!is_removable(seq_id, p0, p1)) {
        return false;
    }

    const auto [s0, s1] = stream_range(seq_id);
    for (uint32_t s = s0; s < s1; ++s) {
        if (!has_removed(parts.streams[s], [&] { remove_from(s, p0, p1); })) {
            return false;
        }
    }

    return true;
}

void llama_h2o::remove_from(uint32_t s, llama_pos p0, llama_pos p1) {
    // recorded before the rows exist: if no room could be made for tokens, there is nothing else to remove
    parts.streams[s].queries.drop(p0);
    llama_h2o_drop_tokens(parts, s, p0, p1);

    const llama_pos newest = parts.cells.newest(s);
    if (p1 > newest) {
        parts.streams[s].rows.drop_pictures(p0);
    }
    if (p0 > newest) {
        return;
    }
    auto & dropped = parts.streams[s].claims.dropped;
    while (p1 > newest && !dropped.empty() && dropped.back().p0 >= p0) {
        dropped.pop_back();
    }
    const auto & before      = parts.streams[s].before;
    const bool is_broken_off = before && before->pos == p0; // an aborted first batch keeps pins and segments

    if (p1 <= newest) {
        parts.streams[s].marks.clear();
    } else if (p0 <= 0 && !is_broken_off) {
        parts.reset_stream(s);
    } else {
        llama_h2o_go_back_to_mark(parts, s, p0);
    }
    parts.streams[s].stale = true;
}

void llama_h2o::clear() {
    parts.refused = false;

    for (uint32_t s = 0; s < parts.streams.size(); ++s) {
        has_removed(parts.streams[s], [&] { parts.reset_stream(s); });
    }
}

void llama_h2o::restore_pinned(uint32_t s) {
    if (!parts.refused && !parts.streams[s].broken && llama_h2o_has_missing(parts, s)) {
        llama_h2o_compact(parts, s);
    }
}

void llama_h2o::refuse(const char * operation) {
    LLAMA_LOG_ERROR(
            "%s: %s cannot be exact while eviction is attached; clear the cache to continue\n", __func__, operation);

    parts.refused = true;
}

void llama_h2o::state_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    if (kv.hparams.ple_n_heads > 0) {
        throw std::runtime_error("the cells of this model have extra data that cannot be saved with eviction");
    }

    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        if (parts.streams[s].broken) {
            throw std::runtime_error("an earlier change of the rows failed: the sequence cannot be saved");
        }
    }

    llama_h2o_write_state(io, parts, s0, s1);
}

void llama_h2o::state_read(llama_io_read_i & io, llama_seq_id seq_id) {
    const auto [s0, s1] = stream_range(seq_id);

    llama_h2o_read_state(io, parts, s0, s1);
}

void llama_h2o::empty_streams(llama_seq_id seq_id) {
    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        parts.cells.clear(s);
        parts.reset_stream(s);
    }
}

std::pair<uint32_t, uint32_t> llama_h2o::stream_range(llama_seq_id seq_id) const {
    if (seq_id < 0) {
        return { 0, kv.n_stream };
    }

    const uint32_t s = stream_of(seq_id);

    return { s, s + 1 };
}

//
// abort
//

// Called between two nodes of a graph.
static bool ask_breaker(void * data) {
    auto & breaker = *static_cast<llama_h2o_breaker *>(data);

    if (ggml_time_us() < breaker.next_us) {
        return false;
    }

    const bool res  = breaker.ask(breaker.data);
    breaker.next_us = ggml_time_us() + breaker.interval_us;

    return res;
}

bool llama_h2o::set_breaker(llama_context & ctx, llama_h2o_breaker * breaker) {
    const llama_h2o_caches caches = llama_h2o_caches::of(ctx.get_memory());

    llama_h2o * h2o = caches.growing ? caches.growing->h2o.get() : nullptr;
    // llama.cpp offloads the last layers: if the first one is on a device, all are
    const bool is_elsewhere = h2o && h2o->parts.params.recall == 0 && !h2o->parts.layers.front().shape.on_host;
    const bool is_taken     = ctx.abort_callback && ctx.abort_callback != ask_breaker;
    if (!caches.growing || caches.recurrent || is_elsewhere || is_taken) {
        return false;
    }

    if (breaker) {
        breaker->next_us = ggml_time_us() + breaker->interval_us;
    }
    ctx.set_abort_callback(breaker ? ask_breaker : nullptr, breaker);

    if (h2o) {
        h2o->parts.breaker = breaker;
        for (auto & st : h2o->parts.streams) {
            st.before.reset();
        }
    }

    return true;
}

//
// statistics
//

llama_h2o_stats llama_h2o::get_stats(llama_memory_i & memory, llama_seq_id seq_id) {
    const llama_h2o_caches caches = llama_h2o_caches::of(&memory);
    const llama_kv_cache & kv     = *caches.growing;

    const uint32_t s = kv.seq_to_stream[seq_id];

    llama_h2o_stats stats = {};
    stats.n_cells         = kv.get_size();
    stats.n_used          = kv.v_cells[s].get_used();
    stats.n_layer         = kv.hparams.n_layer();
    stats.pos_limit       = kv.hparams.n_ctx_train;
    stats.size_k          = kv.size_k_bytes() / kv.n_stream;
    stats.size_v          = kv.size_v_bytes() / kv.n_stream;

    if (const llama_kv_cache * window = caches.window) {
        stats.size_window = (window->size_k_bytes() + window->size_v_bytes()) / window->get_n_stream();
    }
    if (caches.recurrent) {
        for (const auto & [buft, size] : caches.recurrent->memory_breakdown()) {
            stats.size_recurrent += size / kv.n_seq_max;
        }
    }

    if (kv.h2o) {
        const llama_h2o_parts & parts = kv.h2o->parts;
        const auto & st               = parts.streams[s];

        stats.n_pinned = st.claims.n_pinned;
        for (const auto & span : st.claims.dropped) {
            stats.n_forgotten += uint32_t(span.p1 - span.p0);
        }
        stats.pos_removable    = parts.pos_removable(s);
        stats.pos_limit        = llama_h2o_pos_limit(parts);
        stats.n_compactions    = st.count.n_compactions;
        stats.n_cells_freed    = st.count.n_cells_freed;
        stats.n_rows_evicted   = st.count.n_rows_evicted;
        stats.n_rows_moved     = st.count.n_rows_moved;
        stats.n_rebases        = st.count.n_rebases;
        stats.t_compactions_us = st.count.t_compactions_us;
        stats.t_rebases_us     = st.count.t_rebases_us;
        for (const auto & layer : parts.layers) {
            stats.size_scores += layer.tensors.size_of_collected() / kv.n_stream;
        }

        if (st.archive) {
            stats.n_looked = st.n_looked;
            stats.found    = st.n_looked > 0 ? st.index->share() / (double(st.n_looked) * parts.n_query_heads()) : 0.0;
            stats.n_archived   = st.archive->next() - st.archive->first();
            stats.n_unarchived = st.archive->n_dropped();
            stats.size_archive = st.archive->n_bytes();
        }
    }

    return stats;
}
