#include "llama-h2o.h"

#include "llama-h2o-calls.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-cache.h"
#include "cache/h2o-dropping.h"
#include "graph/h2o-fused.h"
#include "kernels/h2o-kernel.h"
#include "policies/h2o-policy.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-model.h"
#include "llama.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

// Whether all head sizes are multiples of the block sizes of these types.
static bool has_whole_blocks(
        const llama_hparams & hparams, const llama_kv_cache & kv, ggml_type type_k, ggml_type type_v) {
    for (const uint32_t il : kv.get_layer_ids()) {
        if (hparams.n_embd_head_k(il) % ggml_blck_size(type_k) != 0 ||
                hparams.n_embd_head_v(il) % ggml_blck_size(type_v) != 0) {
            return false;
        }
    }

    return true;
}

// llama.cpp stores positions in 32 bits
static constexpr uint32_t MAX_POSITIONS = std::numeric_limits<int32_t>::max();

// Checks whether eviction can be attached to this context of a supported model.
static int32_t check_context(const llama_context & ctx, const llama_h2o_params & params) {
    const llama_kv_cache * kv = llama_h2o::cache_of(&ctx);
    if (!kv) {
        return ctx.get_memory() ? LLAMA_H2O_ERR_CACHE_KIND : LLAMA_H2O_ERR_NO_CACHE;
    }
    if (llama_h2o::of(&ctx)) {
        return LLAMA_H2O_ERR_ATTACHED;
    }
    if (params.recent < 1 || params.slack < 1 || params.attention < LLAMA_H2O_ATTENTION_AUTO ||
            params.attention > LLAMA_H2O_ATTENTION_AVX512BF16 || params.archive_type < LLAMA_H2O_ARCHIVE_F16 ||
            params.archive_type > LLAMA_H2O_ARCHIVE_F32 || params.n_pos > MAX_POSITIONS ||
            llama_h2o_n_capacity(params) > MAX_POSITIONS) {
        return LLAMA_H2O_ERR_PARAMS;
    }
    if (kv->get_n_stream() != kv->get_n_seq_max()) {
        return LLAMA_H2O_ERR_SHARED_CELLS;
    }
    if (kv->get_size() < llama_h2o_n_capacity(params)) {
        return LLAMA_H2O_ERR_CELLS;
    }
    for (uint32_t seq_id = 0; seq_id < kv->get_n_seq_max(); ++seq_id) {
        if (kv->get_cells(seq_id).get_used() > 0) {
            return LLAMA_H2O_ERR_NOT_EMPTY;
        }
    }
    if (kv->get_layer_ids().empty()) {
        return LLAMA_H2O_ERR_SLIDING;
    }
    const llama_hparams & hparams = ctx.get_model().hparams;
    if (!has_whole_blocks(hparams, *kv, kv->type_k(), llama_h2o::type_v(*kv))) {
        return LLAMA_H2O_ERR_ROW_BLOCKS;
    }
    const ggml_type archived = llama_h2o_type_of(llama_h2o_archive_type(params.archive_type));
    if (params.recall > 0 && !has_whole_blocks(hparams, *kv, archived, archived)) {
        return LLAMA_H2O_ERR_ARCHIVE_TYPE;
    }
    const auto has_codes = [&](const auto & il) {
        return llama_h2o_best_kernel(hparams.n_embd_head_k(il), hparams.n_embd_head_v(il)) != nullptr;
    };
    const auto layer_ids = kv->get_layer_ids();
    if (params.recall > 0 && !std::all_of(layer_ids.begin(), layer_ids.end(), has_codes)) {
        return LLAMA_H2O_ERR_RECALL_HEADS;
    }
    if (!llama_h2o::has_whole_rows(*kv)) {
        return LLAMA_H2O_ERR_ATTENTION;
    }
    if (!llama_h2o::shares_evenly(*kv)) {
        return LLAMA_H2O_ERR_SHARED_LAYERS;
    }

    return LLAMA_H2O_OK;
}

int32_t llama_h2o_attach(llama_context * ctx, llama_h2o_params params) {
    if (!ctx || !params.policy) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o_caught([&]() -> int32_t {
        int32_t status = llama_h2o_supports(&ctx->get_model());
        if (status == LLAMA_H2O_OK) {
            status = check_context(*ctx, params);
        }
        try {
            return status == LLAMA_H2O_OK ? llama_h2o::attach(*ctx, params) : status;
        } catch (const llama_h2o_policy_error & err) {
            LLAMA_LOG_ERROR("llama_h2o_attach: %s\n", err.what());
            return LLAMA_H2O_ERR_POLICY;
        } catch (const llama_h2o_archive::limit_error &) {
            return LLAMA_H2O_ERR_ARCHIVE_SIZE;
        }
    });
}

// Changes the claims of a sequence with fn(claims), if the result is valid.
template <typename F>
static int32_t change_claims(llama_context * ctx, int32_t seq_id, F fn) {
    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) {
        llama_h2o_claims changed = h2o.parts.streams[s].claims;
        fn(changed);

        const int32_t status = changed.check(h2o.parts.max_pinned());
        if (status == LLAMA_H2O_OK) {
            h2o.parts.streams[s].claims = std::move(changed);
            h2o.restore_pinned(s);
        }

        return status;
    });
}

template <typename T>
static int32_t change_list(
        llama_context * ctx, int32_t seq_id, std::vector<T> llama_h2o_claims::* list, const T * given, uint32_t n) {
    if (n > 0 && !given) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }
    if (n > LLAMA_H2O_MAX_STARTS) {
        return LLAMA_H2O_ERR_SPANS;
    }

    return change_claims(ctx, seq_id, [&](llama_h2o_claims & claims) { (claims.*list).assign(given, given + n); });
}

int32_t llama_h2o_pin(llama_context * ctx, int32_t seq_id, uint32_t n_pinned) {
    return change_claims(ctx, seq_id, [&](llama_h2o_claims & claims) { claims.n_pinned = n_pinned; });
}

int32_t llama_h2o_pin_spans(llama_context * ctx, int32_t seq_id, const llama_h2o_span * spans, uint32_t n_spans) {
    return change_list(ctx, seq_id, &llama_h2o_claims::spans, spans, n_spans);
}

int32_t llama_h2o_zero_rows(llama_context * ctx, int32_t seq_id) {
    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) {
        if (h2o.parts.cells.newest(s) >= 0) {
            return LLAMA_H2O_ERR_NOT_EMPTY;
        }
        h2o.zero_rows(seq_id);

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_share_fairly(llama_context * ctx, int32_t seq_id, const int32_t * starts, uint32_t n_starts) {
    return change_list(ctx, seq_id, &llama_h2o_claims::starts, starts, n_starts);
}

int32_t llama_h2o_forget(llama_context * ctx, int32_t seq_id, const llama_h2o_span * spans, uint32_t n_spans) {
    if (n_spans > 0 && !spans) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }
    if (n_spans > LLAMA_H2O_MAX_STARTS) {
        return LLAMA_H2O_ERR_SPANS;
    }

    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) {
        return llama_h2o_drop_spans(h2o.parts, s, std::vector<llama_h2o_span>(spans, spans + n_spans));
    });
}

int32_t llama_h2o_get_forgotten(llama_context * ctx, int32_t seq_id, llama_h2o_span * spans, uint32_t n_spans) {
    if (n_spans > 0 && !spans) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o_with_stream(ctx, seq_id, [&](const llama_h2o & h2o, uint32_t s) {
        const auto & dropped = h2o.parts.streams[s].claims.dropped;
        std::copy_n(dropped.begin(), std::min<size_t>(n_spans, dropped.size()), spans);

        return int32_t(dropped.size());
    });
}

int32_t llama_h2o_mark(llama_context * ctx, int32_t seq_id) {
    return llama_h2o_with_stream(ctx, seq_id, [](llama_h2o & h2o, uint32_t s) {
        llama_h2o_set_mark(h2o.parts, s);

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_marked(llama_context * ctx, int32_t seq_id, int32_t pos) {
    return llama_h2o_with_stream(
            ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) { return llama_h2o_last_mark(h2o.parts, s, pos); });
}

int32_t llama_h2o_set_breaker(llama_context * ctx, llama_h2o_breaker * breaker) {
    if (!ctx || (breaker && (!breaker->ask || breaker->interval_us < 0))) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o::set_breaker(*ctx, breaker);
}

int32_t llama_h2o_enlarge(llama_context * ctx, uint32_t n_ctx) {
    return llama_h2o_with_eviction(ctx, [&](llama_h2o & h2o) { return h2o.enlarge(n_ctx); });
}

int32_t llama_h2o_shrink(llama_context * ctx) {
    return llama_h2o_with_eviction(ctx, [](llama_h2o & h2o) { return h2o.shrink(); });
}

int32_t llama_h2o_n_few(llama_context * ctx) {
    return llama_h2o_with_eviction(
            ctx, [](const llama_h2o & h2o) { return int32_t(llama_h2o_few_tokens(h2o.parts.layers)); });
}

int32_t llama_h2o_get_stats(const llama_context * ctx, int32_t seq_id, llama_h2o_stats * stats) {
    if (!ctx || !stats) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    const llama_kv_cache * kv = llama_h2o::cache_of(ctx);
    if (!kv) {
        return ctx->get_memory() ? LLAMA_H2O_ERR_CACHE_KIND : LLAMA_H2O_ERR_NO_CACHE;
    }
    if (!llama_h2o_has_seq(*kv, seq_id)) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o_caught([&]() -> int32_t {
        *stats = llama_h2o::get_stats(*ctx->get_memory(), seq_id);
        return LLAMA_H2O_OK;
    });
}

// Suppresses the log: backends log several lines when they detect their devices.
struct quiet_log {
    quiet_log() {
        ggml_log_get(&callback, &user_data);
        ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    }

    ~quiet_log() { ggml_log_set(callback, user_data); }

    ggml_log_callback callback;
    void * user_data;
};

static bool is_gpu(ggml_backend_dev_t dev) {
    const auto type = ggml_backend_dev_type(dev);

    return type == GGML_BACKEND_DEVICE_TYPE_GPU || type == GGML_BACKEND_DEVICE_TYPE_IGPU;
}

const char * llama_h2o_device_name(int32_t i) {
    const char * name = nullptr;

    llama_h2o_caught([&] {
        const quiet_log quiet;

        for (size_t j = 0; i >= 0 && j < ggml_backend_dev_count() && !name; ++j) {
            ggml_backend_dev_t dev = ggml_backend_dev_get(j);
            if (is_gpu(dev) && i-- == 0) {
                name = ggml_backend_dev_description(dev);
            }
        }

        return LLAMA_H2O_OK;
    });

    return name;
}

int64_t llama_h2o_device_bytes(const llama_context * ctx) {
    if (!ctx) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return llama_h2o_caught([&] {
        const llama_h2o * h2o = llama_h2o::of(ctx);

        int64_t res = h2o ? h2o->parts.graphs.size_on_devices() : 0;
        for (const auto & [buft, size] : ctx->memory_breakdown()) {
            if (llama_h2o_is_on_device(buft)) {
                res += size.total();
            }
        }

        return res;
    });
}

static int32_t read_rows(
        llama_h2o_parts & parts, uint32_t s, const llama_h2o_layer & layer, int32_t * pos, float * score) {
    const auto & cells = parts.cells[s];
    const auto & rows  = parts.streams[s].rows;

    parts.ctx.synchronize();

    const std::vector<uint32_t> used = parts.cells.used(s);

    llama_h2o_host_rows scores(layer.tensors.scores, s);
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        for (const uint32_t cell : used) {
            *pos++   = rows.pos(layer.shape.first_head + head, cell, cells.pos_get(cell));
            *score++ = scores.f32()[size_t(head) * cells.size() + cell];
        }
    }

    return layer.shape.n_head_kv;
}

int32_t llama_h2o_get_rows(
        llama_context * ctx, int32_t seq_id, int32_t il, uint32_t n_rows, int32_t * pos, float * score) {
    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) -> int32_t {
        if (il < 0 || uint32_t(il) >= ctx->get_model().hparams.n_layer()) {
            return LLAMA_H2O_ERR_ARGUMENT;
        }

        const llama_h2o_layer * layer = h2o.find_layer(il);
        if (!layer || (!pos && !score)) {
            return layer ? layer->shape.n_head_kv : 0;
        }
        if (!pos || !score || n_rows != h2o.parts.cells[s].get_used()) {
            return LLAMA_H2O_ERR_ARGUMENT;
        }

        return read_rows(h2o.parts, s, *layer, pos, score);
    });
}

//
// the archive
//

// Calls fn(parts, stream) for a sequence with an archive.
template <typename F>
static int32_t with_archive(llama_context * ctx, int32_t seq_id, F fn) {
    return llama_h2o_with_stream(ctx, seq_id, [&](llama_h2o & h2o, uint32_t s) -> int32_t {
        return h2o.parts.streams[s].archive ? fn(h2o.parts, s) : LLAMA_H2O_ERR_NO_ARCHIVE;
    });
}

int32_t llama_h2o_get_found(llama_context * ctx, int32_t seq_id, int32_t p0, uint32_t n, double * weights) {
    if (p0 < 0 || (n > 0 && !weights)) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        parts.ctx.synchronize();
        for (uint32_t i = 0; i < n; ++i) {
            weights[i] = parts.streams[s].index->weight(int64_t(p0) + i);
        }

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_forget_found(llama_context * ctx, int32_t seq_id) {
    return with_archive(ctx, seq_id, [](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        parts.ctx.synchronize();
        parts.streams[s].reset_retrieved();

        return LLAMA_H2O_OK;
    });
}

int32_t llama_h2o_archive_open(llama_context * ctx, int32_t seq_id, const char * path, const uint8_t * id) {
    if (!path || !id) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    return with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        auto & st = parts.streams[s];
        llama_h2o_archive_id text;
        std::copy(id, id + text.size(), text.begin());

        int32_t res = LLAMA_H2O_OK;
        parts.ctx.synchronize();
        st.index->suspend();
        try {
            st.archive->move_to_file(path, text);
            st.archive_error.clear();
        } catch (const std::runtime_error & err) {
            st.archive_error = err.what();
            res              = LLAMA_H2O_ERR_ARCHIVE_FILE;
        }
        llama_h2o_update_index(parts, s); // its pages may have moved

        return res;
    });
}

int32_t llama_h2o_get_notes(llama_context * ctx, int32_t seq_id) {
    return llama_h2o_with_stream(
            ctx, seq_id, [](llama_h2o & h2o, uint32_t s) { return int32_t(llama_h2o_notes(h2o.parts, s)); });
}

const char * llama_h2o_archive_error(llama_context * ctx, int32_t seq_id) {
    const char * res = "";
    with_archive(ctx, seq_id, [&](llama_h2o_parts & parts, uint32_t s) -> int32_t {
        res = parts.streams[s].archive_error.c_str();

        return LLAMA_H2O_OK;
    });

    return res;
}
