#include "cache/h2o-cache.h"

#include "cache/h2o-cache-graph.h"
#include "graph/h2o-fused.h"
#include "kernels/h2o-kernel.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <map>
#include <stdexcept>
#include <typeinfo>

//
// attachment
//

static llama_h2o_params with_text_of(llama_h2o_params params, const llama_h2o_policy & policy) {
    params.policy = policy.text.c_str();

    return params;
}

llama_h2o::llama_h2o(llama_context & ctx, llama_kv_cache & kv, const llama_h2o_params & params) :
    ctx(ctx), kv(kv), policy(llama_h2o_new_policy(params.policy, params.recent)),
    params(with_text_of(params, *policy)) {
    add_layers();
    choose_kernels();
    alloc_tensors();

    streams.resize(kv.n_stream);
    for (auto & st : streams) {
        st.listed.assign(kv.get_size(), 0);
        st.queries.resize(policy->n_queries);
        st.n_pinned = params.pinned;
        for (const auto & layer : layers) {
            st.pos.emplace_back(size_t(layer.n_head_kv) * kv.get_size(), -1);
            st.rope_pos.emplace_back(size_t(layer.n_head_kv) * kv.get_size(), -1);
        }
    }
}

llama_kv_cache * llama_h2o::plain_cache(const llama_context * ctx) {
    auto * memory = dynamic_cast<llama_kv_cache *>(ctx->get_memory());

    // a class derived from the plain cache may mean something else by its cells
    return memory && typeid(*memory) == typeid(llama_kv_cache) ? memory : nullptr;
}

llama_h2o * llama_h2o::of(const llama_context * ctx) {
    const llama_kv_cache * kv = plain_cache(ctx);

    return kv ? kv->h2o.get() : nullptr;
}

llama_h2o * llama_h2o::of(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = dynamic_cast<const llama_kv_cache_context *>(mctx);

    return kv_ctx ? kv_ctx->kv->h2o.get() : nullptr;
}

uint32_t llama_h2o::first_stream(const llama_memory_context_i * mctx) {
    const auto * kv_ctx = static_cast<const llama_kv_cache_context *>(mctx);

    return kv_ctx->sinfos[kv_ctx->i_cur].s0;
}

int32_t llama_h2o::attach(llama_context & ctx, llama_h2o_params params) {
    llama_kv_cache & kv = *plain_cache(&ctx);

    const size_t n_bufs = kv.ctxs_bufs.size();

    if (params.n_pos == 0) {
        params.n_pos = kv.hparams.n_ctx_train;
    }

    const auto detach = [&] {
        kv.h2o.reset();
        kv.ctxs_bufs.resize(n_bufs);

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
    // the graph now has nodes for the scores; building it also shows how the keys are rotated
    ctx.sched_need_reserve = true;
    ctx.sched_reserve();

    if (!has_kernels_asked_for()) {
        return LLAMA_H2O_ERR_ATTENTION;
    }
    if (params.positions == LLAMA_H2O_POSITIONS_DENSE && !can_rebase()) {
        return LLAMA_H2O_ERR_REBASE;
    }
    if (policy->probe == llama_h2o_probe_type::expected && !can_rebase()) {
        return LLAMA_H2O_ERR_POLICY_ROPE;
    }
    if (can_rebase() && llama_h2o_n_capacity(params) > params.n_pos) {
        return LLAMA_H2O_ERR_N_POS;
    }

    reserve_graphs();

    return LLAMA_H2O_OK;
}

void llama_h2o::add_layers() {
    for (const auto & kv_layer : kv.layers) {
        const uint32_t il        = kv_layer.il;
        const uint32_t n_head_kv = kv.hparams.n_head_kv(il);

        const auto layout = [&](const ggml_tensor * t, uint32_t n_embd_head, bool transposed) {
            return llama_h2o_row_layout { t->type, n_embd_head, uint32_t(t->ne[0]), kv.get_size(), transposed };
        };

        layers.push_back({
                il,
                kv.hparams.n_head(il),
                n_head_kv,
                layout(kv_layer.k, kv.hparams.n_embd_head_k(il), false),
                layout(kv_layer.v, kv.hparams.n_embd_head_v(il), kv.v_trans),
                ggml_backend_buffer_is_host(kv_layer.k->buffer),
                policy->attention,
        });
    }
}

static const char * kernel_name(llama_h2o_attention_type type) {
    switch (type) {
        case LLAMA_H2O_ATTENTION_PORTABLE:
            return "portable";
        case LLAMA_H2O_ATTENTION_NEON:
            return "neon";
        case LLAMA_H2O_ATTENTION_AVX2:
            return "avx2";
        case LLAMA_H2O_ATTENTION_AVX512:
            return "avx512";
        case LLAMA_H2O_ATTENTION_AUTO:
        case LLAMA_H2O_ATTENTION_OPS:
            break;
    }

    return nullptr;
}

// null for plain memory
static ggml_backend_dev_t device_of(const ggml_tensor * tensor) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
}

// Whether the graph of a layer with this tensor runs on the CPU.
static bool is_on_cpu(const ggml_tensor * tensor) {
    ggml_backend_dev_t dev = device_of(tensor);

    return ggml_backend_buffer_is_host(tensor->buffer) &&
           (!dev || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU);
}

void llama_h2o::choose_kernels() {
    if (params.attention == LLAMA_H2O_ATTENTION_OPS) {
        return;
    }

    const char * name = kernel_name(params.attention);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];
        if (!is_on_cpu(kv.layers[ikv].k)) {
            layer.on_cuda = !name && llama_h2o_use_cuda(device_of(kv.layers[ikv].k));
            continue;
        }

        const auto * kernel =
                name ? llama_h2o_find_kernel(name) : llama_h2o_best_kernel(layer.k.n_embd_head, layer.v.n_embd_head);
        if (kernel && layer.k.n_embd_head % kernel->n_lanes == 0 && layer.v.n_embd_head % kernel->n_lanes == 0) {
            layer.kernel = kernel;
        }
    }
}

bool llama_h2o::has_kernels_asked_for() const {
    return !kernel_name(params.attention) ||
           std::all_of(layers.begin(), layers.end(), [](const layer & l) { return l.fused; });
}

static ggml_context_ptr new_tensor_context(size_t n_tensors) {
    const ggml_init_params init = {
        /*.mem_size   =*/n_tensors * ggml_tensor_overhead(),
        /*.mem_buffer =*/nullptr,
        /*.no_alloc   =*/true,
    };

    ggml_context_ptr res { ggml_init(init) };
    if (!res) {
        throw std::bad_alloc();
    }

    return res;
}

static ggml_backend_buffer_ptr alloc_buffer(ggml_context * ctx, ggml_backend_buffer_type_t buft) {
    ggml_backend_buffer_ptr buf { ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft) };
    if (!buf) {
        throw std::bad_alloc();
    }

    return buf;
}

void llama_h2o::alloc_tensors() {
    // graphs are reserved for whole ubatches, whatever the slack, rounded up to a multiple of the sequences
    const uint32_t n_ubatch = ctx.get_cparams().n_ubatch + kv.n_seq_max;

    // what the policy collects of a layer lies where its K lies, so that no step copies anything between devices
    std::map<ggml_backend_buffer_type_t, std::vector<size_t>> ikv_of_buft;
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        ikv_of_buft[ggml_backend_buffer_get_type(kv.layers[ikv].k->buffer)].push_back(ikv);
    }

    for (const auto & [buft, ikvs] : ikv_of_buft) {
        ggml_context_ptr ctx_scores  = new_tensor_context(3 * ikvs.size());
        ggml_context_ptr ctx_weights = new_tensor_context(ikvs.size());

        std::map<std::pair<uint32_t, uint32_t>, ggml_tensor *> weights; // by n_head and n_head_kv

        for (const size_t ikv : ikvs) {
            auto & layer = layers[ikv];

            layer.scores =
                    ggml_new_tensor_3d(ctx_scores.get(), GGML_TYPE_F32, kv.get_size(), layer.n_head_kv, kv.n_stream);
            ggml_format_name(layer.scores, "cache_scores_l%d", layer.il);
            if (policy->squares) {
                layer.squares = ggml_dup_tensor(ctx_scores.get(), layer.scores);
                ggml_format_name(layer.squares, "cache_squares_l%d", layer.il);
            }
            if (policy->n_queries > 0) {
                layer.queries = ggml_new_tensor_4d(ctx_scores.get(), GGML_TYPE_F32, layer.k.n_embd_head,
                        policy->n_queries, layer.n_head, kv.n_stream);
                ggml_format_name(layer.queries, "cache_queries_l%d", layer.il);
            }

            auto & shared = weights[{ layer.n_head, layer.n_head_kv }];
            if (!shared) {
                shared = ggml_new_tensor_1d(ctx_weights.get(), GGML_TYPE_F32, int64_t(n_ubatch) * layer.n_head);
            }
            layer.weights = shared;
        }

        ggml_backend_buffer_ptr buf_scores  = alloc_buffer(ctx_scores.get(), buft);
        ggml_backend_buffer_ptr buf_weights = alloc_buffer(ctx_weights.get(), buft);

        for (const auto & [heads, tensor] : weights) {
            const std::vector<float> data(ggml_nelements(tensor), float(heads.second) / float(heads.first));
            ggml_backend_tensor_set(tensor, data.data(), 0, ggml_nbytes(tensor));
        }

        // what is collected belongs to the cache: cleared with it, counted with it, freed with it
        ggml_backend_buffer_clear(buf_scores.get(), 0);
        kv.ctxs_bufs.emplace_back(std::move(ctx_scores), std::move(buf_scores));
        weights_bufs.emplace_back(std::move(ctx_weights), std::move(buf_weights));
    }
}

llama_h2o::layer * llama_h2o::find_layer(int32_t il) {
    const auto it = kv.map_layer_ids.find(il);

    return it == kv.map_layer_ids.end() ? nullptr : &layers[it->second];
}

void llama_h2o::watch_keys(const ggml_tensor * k_cur, int32_t il) {
    auto & layer = layers[kv.map_layer_ids.at(il)];
    if (layer.rope) {
        return;
    }

    layer.rope = llama_h2o_read_rope(k_cur);

    const auto hadamard = kv.attn_rot_hadamard.find(layer.rope->n_hadamard);
    if (hadamard != kv.attn_rot_hadamard.end()) {
        layer.rope->hadamard = hadamard->second;
    }
}

llama_pos llama_h2o::rope_pos(llama_seq_id seq_id, llama_pos pos) const {
    return pos - streams[kv.seq_to_stream[seq_id]].shift;
}

//
// graphs of our own
//

void llama_h2o::reserve_graphs() {
    const bool on_host = std::all_of(layers.begin(), layers.end(), [](const layer & l) { return l.on_host; });
    if (on_host && policy->probe == llama_h2o_probe_type::none) {
        return;
    }

    sched.reset(ggml_backend_sched_new(ctx.backend_ptrs.data(), ctx.backend_buft.data(), ctx.backend_ptrs.size(),
            layers.size() * llama_h2o_cache_graph::MAX_NODES, false, ctx.get_cparams().op_offload));

    const auto reserve = [&](const llama_h2o_cache_graph & graph) {
        if (!graph.empty()) {
            graph.reserve(sched.get());
        }
    };
    reserve(build_probe(0));
    reserve(build_most_moves());
    reserve(build_most_turns());
}

bool llama_h2o::is_on_device(ggml_backend_buffer_type_t buft) {
    ggml_backend_dev_t dev = ggml_backend_buft_get_device(buft);

    return !ggml_backend_buft_is_host(buft) && dev && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU;
}

size_t llama_h2o::size_of_work_on_devices() const {
    size_t res = 0;
    for (size_t i = 0; i < ctx.backend_ptrs.size() && sched; ++i) {
        if (is_on_device(ctx.backend_buft[i])) {
            res += ggml_backend_sched_get_buffer_size(sched.get(), ctx.backend_ptrs[i]);
        }
    }

    return res;
}

std::vector<std::vector<float>> llama_h2o::run(const llama_h2o_cache_graph & graph) {
    if (graph.empty()) {
        return {};
    }

    for (const auto & [backend, set_n_threads] : ctx.set_n_threads_fns) {
        set_n_threads(backend, ctx.get_cparams().n_threads_batch);
    }

    return graph.run(sched.get());
}

// If a graph fails that changes rows, nobody knows which.
void llama_h2o::run_in_place(const llama_h2o_cache_graph & graph) {
    try {
        run(graph);
    } catch (const std::exception &) {
        refused = true;
        throw;
    }
}

//
// hooks of llama_kv_cache
//

uint32_t llama_h2o::max_ubatch(uint32_t n_ubatch) const {
    return refused ? 0 : std::min(n_ubatch, params.slack);
}

bool llama_h2o::place(const llama_ubatch & ubatch, llama_kv_cache::slot_info & sinfo) {
    const uint32_t n_new = kv.n_stream > 1 ? ubatch.n_tokens / ubatch.n_seqs_unq : ubatch.n_tokens;

    try {
        for (uint32_t i = 0; i < ubatch.n_seqs_unq; ++i) {
            const llama_seq_id seq_id = ubatch.seq_id_unq[i];

            llama_pos p_first = std::numeric_limits<llama_pos>::max();
            llama_pos p_last  = -1;
            for (uint32_t t = 0; t < ubatch.n_tokens; ++t) {
                if (ubatch.seq_id[t][0] == seq_id) {
                    p_first = std::min(p_first, ubatch.pos[t]);
                    p_last  = std::max(p_last, ubatch.pos[t]);
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

// For n_new tokens of the positions [p_first, p_last].
void llama_h2o::make_room(uint32_t s, uint32_t n_new, llama_pos p_first, llama_pos p_last) {
    auto & st = streams[s];

    if (p_last >= pos_limit()) {
        throw std::runtime_error("the positions that the model was trained on are used up");
    }
    if (st.stale) {
        reset_free_cells(s);
    }
    if (uint64_t(kv.v_cells[s].get_used()) + n_new > llama_h2o_n_capacity(params)) {
        compact(s);
        if (params.positions == LLAMA_H2O_POSITIONS_DENSE) {
            rebase(s, p_first);
        }
    }
    if (uint32_t(p_last - st.shift) >= params.n_pos && can_rebase()) {
        rebase(s, p_first);
    }

    note_queries(st, p_first, p_last);
    keep_credit_small(s, p_last);
}

bool llama_h2o::remove(llama_seq_id seq_id, llama_pos p0, llama_pos p1) {
    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        const bool is_all  = p0 <= 0 && p1 > newest(s);
        const bool is_tail = p0 >= streams[s].pos_removable && p1 > newest(s);

        // before the first compaction every row lies in its own cell, and any range can go
        if (!is_all && !is_tail && streams[s].pos_removable > 0) {
            return false;
        }
    }

    for (uint32_t s = s0; s < s1; ++s) {
        if (p0 > newest(s)) {
            continue;
        }
        forget_queries(streams[s], p0);
        if (p1 <= newest(s)) {
            streams[s].marks.clear();
        } else if (p0 <= 0) {
            reset_stream(s);
        } else {
            go_back_to_mark(s, p0);
        }
        streams[s].stale = true;
    }

    return true;
}

// What holds for a stream without rows. The counters go on.
void llama_h2o::reset_stream(uint32_t s) {
    auto & st = streams[s];

    st.stale         = true;
    st.pos_removable = 0;
    st.pos_forgotten = -1;
    st.shift         = 0;
    st.n_pinned      = params.pinned;
    st.spans.clear();
    st.starts.clear();
    st.marks.clear();
    forget_queries(st, 0);
}

void llama_h2o::clear() {
    refused = false;

    for (uint32_t s = 0; s < streams.size(); ++s) {
        reset_stream(s);
    }
}

void llama_h2o::refuse(const char * operation) {
    LLAMA_LOG_ERROR("%s: %s cannot be done exactly while eviction is attached; clear the cache to go on\n", __func__,
            operation);

    refused = true;
}

//
// rows and cells
//

uint32_t llama_h2o::first_head(size_t ikv) const {
    uint32_t res = 0;
    for (size_t i = 0; i < ikv; ++i) {
        res += layers[i].n_head_kv;
    }

    return res;
}

std::pair<uint32_t, uint32_t> llama_h2o::stream_range(llama_seq_id seq_id) const {
    if (seq_id < 0) {
        return { 0, kv.n_stream };
    }

    const uint32_t s = kv.seq_to_stream[seq_id];

    return { s, s + 1 };
}

llama_pos llama_h2o::newest(uint32_t s) const {
    // one sequence per stream, of the same number
    return kv.v_cells[s].seq_pos_max(llama_seq_id(s));
}

std::vector<uint32_t> llama_h2o::used_cells(uint32_t s) const {
    const auto & cells = kv.v_cells[s];

    std::vector<uint32_t> res;
    res.reserve(cells.get_used());
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (!cells.is_empty(i)) {
            res.push_back(i);
        }
    }

    return res;
}

llama_pos llama_h2o::row_pos(
        const stream & st, const llama_kv_cells & cells, size_t ikv, uint32_t head, uint32_t cell) const {
    return st.listed[cell] ? st.pos[ikv][size_t(head) * kv.get_size() + cell] : cells.pos_get(cell);
}

// A score starts at zero when its cell is used again.
void llama_h2o::reset_free_cells(uint32_t s) {
    const auto & cells = kv.v_cells[s];

    ctx.synchronize();

    const auto reset = [&](ggml_tensor * collected) {
        llama_h2o_host_rows sums(collected, s);
        for (int64_t head = 0; head < collected->ne[1]; ++head) {
            float * row = sums.f32() + head * cells.size();
            for (uint32_t i = 0; i < cells.size(); ++i) {
                row[i] = cells.is_empty(i) ? 0.0f : row[i];
            }
        }
        sums.commit();
    };
    for (const auto & layer : layers) {
        reset(layer.scores);
        if (layer.squares) {
            reset(layer.squares);
        }
    }

    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i)) {
            streams[s].listed[i] = 0;
        }
    }

    streams[s].stale = false;
}

// From here on the rows of these cells are found through the list.
void llama_h2o::list_rows(uint32_t s, const std::vector<uint32_t> & used) {
    auto & st = streams[s];

    for (const uint32_t cell : used) {
        if (st.listed[cell]) {
            continue;
        }
        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            for (uint32_t head = 0; head < layers[ikv].n_head_kv; ++head) {
                const size_t i = size_t(head) * kv.get_size() + cell;

                st.pos[ikv][i]      = kv.v_cells[s].pos_get(cell);
                st.rope_pos[ikv][i] = st.pos[ikv][i] - st.shift;
            }
        }
        st.listed[cell] = 1;
    }
}

//
// what the cache holds
//

llama_h2o_stats llama_h2o::get_stats(const llama_kv_cache & kv, llama_seq_id seq_id) {
    const uint32_t s = kv.seq_to_stream[seq_id];

    llama_h2o_stats stats = {};
    stats.n_cells         = kv.get_size();
    stats.n_used          = kv.v_cells[s].get_used();
    stats.n_layer         = kv.layers.size();
    stats.pos_limit       = kv.hparams.n_ctx_train;
    stats.size_k          = kv.size_k_bytes();
    stats.size_v          = kv.size_v_bytes();

    if (kv.h2o) {
        const auto & st = kv.h2o->streams[s];

        stats.n_pinned         = st.n_pinned;
        stats.pos_removable    = st.pos_removable;
        stats.pos_limit        = kv.h2o->pos_limit();
        stats.n_compactions    = st.count.n_compactions;
        stats.n_cells_freed    = st.count.n_cells_freed;
        stats.n_rows_evicted   = st.count.n_rows_evicted;
        stats.n_rows_moved     = st.count.n_rows_moved;
        stats.n_rebases        = st.count.n_rebases;
        stats.t_compactions_us = st.count.t_compactions_us;
        stats.t_rebases_us     = st.count.t_rebases_us;
        for (const auto & layer : kv.h2o->layers) {
            for (const ggml_tensor * tensor : { layer.scores, layer.squares, layer.queries }) {
                stats.size_scores += tensor ? ggml_nbytes(tensor) : 0;
            }
        }
    }

    return stats;
}

int32_t llama_h2o::get_rows(llama_seq_id seq_id, int32_t il, uint32_t n_rows, int32_t * pos, float * score) {
    const auto it = kv.map_layer_ids.find(il);
    if (it == kv.map_layer_ids.end()) {
        return 0;
    }

    const size_t ikv         = it->second;
    const uint32_t n_head_kv = layers[ikv].n_head_kv;
    if (!pos && !score) {
        return n_head_kv;
    }

    const uint32_t s   = kv.seq_to_stream[seq_id];
    const auto & cells = kv.v_cells[s];
    if (!pos || !score || n_rows != cells.get_used()) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    ctx.synchronize();

    const std::vector<uint32_t> used = used_cells(s);

    llama_h2o_host_rows scores(layers[ikv].scores, s);
    for (uint32_t head = 0; head < n_head_kv; ++head) {
        for (const uint32_t cell : used) {
            *pos++   = row_pos(streams[s], cells, ikv, head, cell);
            *score++ = scores.f32()[size_t(head) * cells.size() + cell];
        }
    }

    return n_head_kv;
}

// Positions that are pinned by the first n_pinned and by spans together.
static uint64_t count_pinned(uint32_t n_pinned, const std::vector<llama_h2o_span> & spans) {
    uint64_t res = n_pinned;
    for (const auto & span : spans) {
        res += std::max<int64_t>(0, int64_t(span.p1) - std::max<int64_t>(span.p0, n_pinned));
    }

    return res;
}

int32_t llama_h2o::check_pins(uint32_t n_pinned, const std::vector<llama_h2o_span> & spans) const {
    llama_pos end = 0;
    for (const auto & span : spans) {
        if (span.p0 < end || span.p1 <= span.p0) {
            return LLAMA_H2O_ERR_SPANS;
        }
        end = span.p1;
    }

    const bool fits = count_pinned(n_pinned, spans) <= uint64_t(params.pinned) + params.heavy;

    return fits ? LLAMA_H2O_OK : LLAMA_H2O_ERR_PIN;
}

int32_t llama_h2o::pin(llama_seq_id seq_id, uint32_t n_pinned) {
    auto & st = streams[kv.seq_to_stream[seq_id]];

    const int32_t status = check_pins(n_pinned, st.spans);
    if (status == LLAMA_H2O_OK) {
        st.n_pinned = n_pinned;
    }

    return status;
}

int32_t llama_h2o::pin_spans(llama_seq_id seq_id, std::vector<llama_h2o_span> spans) {
    auto & st = streams[kv.seq_to_stream[seq_id]];

    const int32_t status = check_pins(st.n_pinned, spans);
    if (status == LLAMA_H2O_OK) {
        st.spans = std::move(spans);
    }

    return status;
}

int32_t llama_h2o::check_starts(const std::vector<llama_pos> & starts) {
    if (starts.size() > LLAMA_H2O_MAX_STARTS) {
        return LLAMA_H2O_ERR_SPANS;
    }

    llama_pos last = 0;
    for (const llama_pos start : starts) {
        if (start <= last) {
            return LLAMA_H2O_ERR_SPANS;
        }
        last = start;
    }

    return LLAMA_H2O_OK;
}

int32_t llama_h2o::share_fairly(llama_seq_id seq_id, std::vector<llama_pos> starts) {
    const int32_t status = check_starts(starts);
    if (status == LLAMA_H2O_OK) {
        streams[kv.seq_to_stream[seq_id]].starts = std::move(starts);
    }

    return status;
}
