#include "cache/h2o-cache.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-collected.h"
#include "cache/h2o-compaction.h"
#include "cache/h2o-probe.h"
#include "cache/h2o-rebase.h"
#include "cache/h2o-state.h"
#include "cache/h2o-window.h"
#include "graph/h2o-fused.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

//
// attachment
//

// The layers of a cache, without what eviction adds to them.
//   all   has of each layer its number in the model, and the tensors of K and V
template <typename T>
static std::vector<llama_h2o_layer> make_layers(
        const T & all, const llama_hparams & hparams, uint32_t n_cells, bool v_trans) {
    const auto layout = [&](const ggml_tensor * t, uint32_t n_embd_head, bool transposed) {
        return llama_h2o_row_layout { t->type, n_embd_head, uint32_t(t->ne[0]), n_cells, transposed };
    };

    std::vector<llama_h2o_layer> layers;

    uint32_t n_heads = 0;
    for (const auto & one : all) {
        llama_h2o_layer layer;
        layer.shape = {
            one.il,
            hparams.n_head(one.il),
            hparams.n_head_kv(one.il),
            n_heads,
            layout(one.k, hparams.n_embd_head_k(one.il), false),
            one.v ? layout(one.v, hparams.n_embd_head_v(one.il), v_trans)
                  : layout(one.k, hparams.n_embd_head_v(one.il), false),
            ggml_backend_buffer_is_host(one.k->buffer),
        };
        layer.tensors.k = one.k;
        layer.tensors.v = one.v;
        layers.push_back(layer);

        n_heads += layer.shape.n_head_kv;
    }

    return layers;
}

llama_h2o::llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params) :
    parts(ctx,
            params,
            make_layers(kv.layers, kv.hparams, kv.get_size(), kv.v_trans),
            { kv.v_cells, kv.v_heads },
            { ctx, ctx.backend_ptrs, ctx.backend_buft, ctx.set_n_threads_fns }),
    kv(kv) {
    // graphs are reserved for whole ubatches, whatever the slack, rounded up to a multiple of the sequences
    const uint32_t n_tokens = ctx.get_cparams().n_ubatch + kv.n_seq_max;

    std::vector<llama_h2o_memory> collected;

    llama_h2o_choose_kernels(parts.layers, params.attention);
    llama_h2o_alloc_tensors(parts.layers, *parts.policy, parts.n_question(), kv.n_stream, n_tokens, collected, weights);

    // what is collected belongs to the cache: cleared with it, counted with it, freed with it
    for (auto & memory : collected) {
        kv.ctxs_bufs.push_back(std::move(memory));
    }

    const llama_h2o_caches caches = llama_h2o_caches::of(ctx.get_memory());
    if (caches.window) {
        auto & window = *caches.window;
        if (!window.h2o_window) {
            window.h2o_window = std::make_shared<llama_h2o_window>(
                    make_layers(window.layers, window.hparams, window.get_size(), window.v_trans),
                    llama_h2o_cells(window.v_cells, window.v_heads), window.hparams, window.attn_rot_hadamard);
        }
        parts.window = window.h2o_window;
    }
    parts.recurrent = caches.recurrent;
}

llama_kv_cache * llama_h2o::cache_of(const llama_context * ctx) {
    return llama_h2o_caches::of(ctx->get_memory()).growing;
}

llama_h2o * llama_h2o::of(const llama_context * ctx) {
    const llama_kv_cache * kv = cache_of(ctx);

    return kv ? kv->h2o.get() : nullptr;
}

llama_h2o * llama_h2o::of(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = llama_h2o_caches::growing_of(mctx);

    return kv_ctx ? kv_ctx->kv->h2o.get() : nullptr;
}

uint32_t llama_h2o::first_stream(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = llama_h2o_caches::growing_of(mctx);

    return kv_ctx->sinfos[kv_ctx->i_cur].s0;
}

ggml_type llama_h2o::type_v(const llama_kv_cache & kv) {
    return kv.layers.front().v ? kv.type_v() : kv.type_k();
}

bool llama_h2o::has_whole_rows(const llama_kv_cache & kv) {
    return std::all_of(kv.layers.begin(), kv.layers.end(), [&](const auto & layer) {
        return !layer.v || ggml_backend_buffer_is_host(layer.v->buffer) ||
               layer.v->ne[0] % kv.hparams.n_embd_head_v(layer.il) == 0;
    });
}

bool llama_h2o::shares_evenly(const llama_kv_cache & kv) {
    return std::all_of(kv.map_layer_ids.begin(), kv.map_layer_ids.end(), [&](const auto & ids) {
        const auto & [il, ikv] = ids;
        return kv.hparams.n_head(il) == kv.hparams.n_head(kv.layers[ikv].il);
    });
}

int32_t llama_h2o::rows_of(const llama_kv_cache & kv, int32_t il) {
    const auto it = kv.map_layer_ids.find(il);

    return it == kv.map_layer_ids.end() ? -1 : int32_t(kv.layers[it->second].il);
}

// A cache for the window of as many cells as it needs, in place of the one that is there; returns that, or null if it
// has them.
static std::unique_ptr<llama_kv_cache> fit_window(llama_context & ctx) {
    const llama_kv_cache * window = llama_h2o_caches::of(ctx.get_memory()).window;
    if (!window || window->get_layer_ids().empty()) {
        return nullptr;
    }

    const llama_model & model = ctx.get_model();
    llama_cparams cparams     = ctx.get_cparams();

    cparams.n_ctx_seq = llama_h2o_window::n_cells_needed(
            model.hparams, window->get_n_seq_max() / window->get_n_stream(), cparams.n_ubatch);
    if (cparams.n_ctx_seq == window->get_size()) {
        return nullptr;
    }

    llama_memory_params params = {};
    params.type_k              = window->type_k();
    params.type_v              = llama_h2o::type_v(*window);

    const std::unique_ptr<llama_memory_i> memory(model.create_memory(params, cparams));

    std::unique_ptr<llama_kv_cache> res;
    llama_h2o_caches::swap_window(*memory, res);
    llama_h2o_caches::swap_window(*ctx.get_memory(), res);

    return res;
}

int32_t llama_h2o::attach(llama_context & ctx, llama_h2o_params params) {
    llama_kv_cache & kv = *cache_of(&ctx);

    std::unique_ptr<llama_kv_cache> window = fit_window(ctx);

    const size_t n_bufs = kv.ctxs_bufs.size();

    if (params.n_pos == 0) {
        params.n_pos = kv.hparams.n_ctx_train;
    }

    const auto detach = [&] {
        kv.h2o.reset();
        kv.ctxs_bufs.resize(n_bufs);
        if (window) {
            llama_h2o_caches::swap_window(*ctx.get_memory(), window);
        } else if (llama_kv_cache * same = llama_h2o_caches::of(ctx.get_memory()).window) {
            same->h2o_window.reset();
        }

        ctx.sched_need_reserve = true;
    };

    try {
        kv.h2o = std::make_shared<llama_h2o>(ctx, kv, params);

        const int32_t status = kv.h2o->reserve();
        if (status != LLAMA_H2O_OK) {
            detach();
        }
        return status;
    } catch (...) {
        detach();
        throw;
    }
}

int32_t llama_h2o::reserve() {
    const llama_h2o_params & params = parts.params;

    // the graph now has nodes for the scores; building it also shows how the keys are rotated
    parts.ctx.sched_need_reserve = true;
    parts.ctx.sched_reserve();

    const bool can_rebase = llama_h2o_can_rebase(parts);

    if (!llama_h2o_has_kernels(parts.layers, params.attention)) {
        return LLAMA_H2O_ERR_ATTENTION;
    }
    if (params.positions == LLAMA_H2O_POSITIONS_DENSE && !can_rebase) {
        return LLAMA_H2O_ERR_REBASE;
    }
    const bool has_whole_angles = std::all_of(parts.layers.begin(), parts.layers.end(),
            [](const llama_h2o_layer & layer) { return layer.rope && layer.rope->first == 0; });
    if (parts.policy->probe == llama_h2o_probe_type::expected && (!can_rebase || !has_whole_angles)) {
        return LLAMA_H2O_ERR_POLICY_ROPE;
    }
    if (can_rebase && parts.n_capacity() > params.n_pos) {
        return LLAMA_H2O_ERR_N_POS;
    }

    reserve_graphs();

    return LLAMA_H2O_OK;
}

void llama_h2o::reserve_graphs() {
    const auto is_on_host = [](const llama_h2o_layer & layer) {
        return layer.shape.on_host;
    };

    bool on_host = std::all_of(parts.layers.begin(), parts.layers.end(), is_on_host);
    if (parts.window) {
        const auto & layers = parts.window->layers;
        on_host             = on_host && std::all_of(layers.begin(), layers.end(), is_on_host);
    }
    if (on_host && parts.policy->probe == llama_h2o_probe_type::none) {
        return;
    }

    const llama_h2o_cache_graph probe = llama_h2o_build_probe(parts, 0);
    const llama_h2o_cache_graph moves = llama_h2o_build_most_moves(parts);
    const llama_h2o_cache_graph turns = llama_h2o_build_most_turns(parts);

    parts.graphs.reserve(parts.n_layers(), { &probe, &moves, &turns });
}

llama_h2o_layer * llama_h2o::find_layer(int32_t il) {
    const auto it = kv.map_layer_ids.find(il);

    return it == kv.map_layer_ids.end() ? nullptr : &parts.layers[it->second];
}

void llama_h2o::watch_keys(const ggml_tensor * k_cur, int32_t il) {
    auto & rope = find_layer(il)->rope;
    if (rope) {
        return;
    }

    rope = llama_h2o_read_rope(k_cur, kv.attn_rot_hadamard);
}

//
// hooks of llama_kv_cache, and of the memory that it is a part of
//

uint32_t llama_h2o::max_ubatch(const llama_context * ctx, uint32_t n_ubatch) {
    const llama_h2o * h2o = of(ctx);

    return h2o ? std::min(n_ubatch, h2o->parts.params.slack) : n_ubatch;
}

bool llama_h2o::place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo) {
    const uint32_t n_new = kv.n_stream > 1 ? ubatch.n_tokens / ubatch.n_seqs_unq : ubatch.n_tokens;

    try {
        if (kv.hparams.n_pos_per_embd() > 1 && !ubatch.token) {
            throw std::runtime_error("images, whose tokens have several positions each, cannot be evicted");
        }
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id_unq[i];

            llama_pos p_first = std::numeric_limits<llama_pos>::max();
            llama_pos p_last  = -1;
            for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
                if (ubatch.seq_id[t][0] == seq_id) {
                    p_first = std::min(p_first, ubatch.pos[t]);
                    p_last  = std::max(p_last, ubatch.pos[t]);
                    llama_h2o_note_token(parts, stream_of(seq_id), ubatch.pos[t], ubatch.token ? ubatch.token[t] : -1);
                }
            }

            make_room(kv.seq_to_stream[seq_id], n_new, p_first, p_last);
        }

        sinfo = kv.find_slot(ubatch, false);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: failed to make room for %u tokens: %s\n", __func__, ubatch.n_tokens, err.what());
        return false;
    }

    return !sinfo.empty();
}

void llama_h2o::make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last) {
    auto & st = parts.streams[s];

    if (p_last >= llama_h2o_pos_limit(parts)) {
        throw std::runtime_error("the positions that the model was trained on are used up");
    }
    if (uint64_t(parts.n_used(s)) + n_new > parts.n_capacity()) {
        compact(s, p_first);
    }
    if (uint32_t(st.rows.rope_pos(p_last)) >= parts.params.n_pos && llama_h2o_can_rebase(parts)) {
        llama_h2o_rebase(parts, s, p_first);
    }
    if (st.stale) {
        llama_h2o_reset_free_cells(parts, s); // also those of recalled rows that a compaction or a re-base drops
    }

    st.queries.note(p_first, p_last, st.rows.shift());
    st.question.note(p_first, p_last, st.rows.shift());
    llama_h2o_keep_credit_small(parts, s, p_last);
}

void llama_h2o::compact(uint32_t s, llama_pos p_next) {
    llama_h2o_compact(parts, s);
    if (parts.params.positions == LLAMA_H2O_POSITIONS_DENSE) {
        llama_h2o_rebase(parts, s, p_next);
    }
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
        const bool is_tail = has_end && p0 >= parts.pos_removable(s);

        // before the first compaction every row lies in its own cell, and any range can go
        const bool is_middle = !has_end && parts.streams[s].pos_removable == 0;

        if (!is_all && !is_none && !is_tail && !is_middle) {
            return false;
        }
    }

    return true;
}

bool llama_h2o::remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const auto [s0, s1] = stream_range(seq_id);

    if (!is_removable(seq_id, p0, p1)) {
        return false;
    }

    for (uint32_t s = s0; s < s1; ++s) {
        const llama_pos newest = parts.cells.newest(s);
        if (p0 > newest) {
            continue;
        }
        parts.streams[s].queries.forget(p0);
        parts.streams[s].question.forget(p0);
        llama_h2o_forget_tokens(parts, s, p0);
        if (p1 <= newest) {
            parts.streams[s].marks.clear();
        } else if (p0 <= 0) {
            parts.reset_stream(s);
        } else {
            llama_h2o_go_back_to_mark(parts, s, p0);
        }
        parts.streams[s].stale = true;
    }

    return true;
}

void llama_h2o::clear() {
    parts.refused = false;

    for (uint32_t s = 0; s < parts.streams.size(); ++s) {
        parts.reset_stream(s);
    }
}

void llama_h2o::refuse(const char * operation) {
    LLAMA_LOG_ERROR("%s: %s cannot be done exactly while eviction is attached; clear the cache to go on\n", __func__,
            operation);

    parts.refused = true;
}

void llama_h2o::state_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    if (kv.hparams.ple_n_heads > 0) {
        throw std::runtime_error("the cells of this model have extra data that cannot be saved with eviction");
    }

    const auto [s0, s1] = stream_range(seq_id);

    llama_h2o_write_state(io, parts, s0, s1);
}

void llama_h2o::state_read(llama_io_read_i & io, llama_seq_id seq_id) {
    const auto [s0, s1] = stream_range(seq_id);

    llama_h2o_read_state(io, parts, s0, s1);
}

std::pair<uint32_t, uint32_t> llama_h2o::stream_range(llama_seq_id seq_id) const {
    if (seq_id < 0) {
        return { 0, kv.n_stream };
    }

    const uint32_t s = stream_of(seq_id);

    return { s, s + 1 };
}

//
// what the cache holds
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
    stats.size_k          = kv.size_k_bytes();
    stats.size_v          = kv.size_v_bytes();
    stats.size_window     = caches.window ? caches.window->size_k_bytes() + caches.window->size_v_bytes() : 0;

    if (caches.recurrent) {
        for (const auto & [buft, size] : caches.recurrent->memory_breakdown()) {
            stats.size_recurrent += size;
        }
    }

    if (kv.h2o) {
        const llama_h2o_parts & parts = kv.h2o->parts;
        const auto & st               = parts.streams[s];

        stats.n_used           = parts.n_used(s);
        stats.n_pinned         = st.claims.n_pinned;
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
            stats.size_scores += layer.tensors.size_of_collected();
        }

        stats.n_recalled   = st.recalled.cells.size();
        stats.hidden       = st.recalled.hidden;
        stats.missed       = st.recalled.missed;
        stats.n_recalls    = st.count.n_recalls;
        stats.t_recalls_us = st.count.t_recalls_us;
        stats.t_archive_us = st.count.t_archive_us;
        if (st.archive) {
            stats.n_archived   = st.archive->next() - st.archive->first();
            stats.n_unarchived = st.archive->n_dropped();
            stats.size_archive = st.archive->n_bytes();
        }
    }

    return stats;
}
