// Reading a prompt in full: for a while the context has a larger cache, in which nothing is evicted. Afterwards one
// compaction leaves what fits, and the rows go to the cache that the context had before.

#include "cache/h2o-cache.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

// llama.cpp allocates cells in blocks of so many
static constexpr uint32_t CELL_BLOCK = 256;

static std::unique_ptr<llama_memory_i> new_cache(llama_context & ctx, const llama_kv_cache & kv, uint32_t n_cells) {
    llama_memory_params params = {};
    params.type_k              = kv.type_k();
    params.type_v              = kv.type_v();

    llama_cparams cparams = ctx.get_cparams();
    cparams.n_ctx_seq     = n_cells;

    return std::unique_ptr<llama_memory_i>(ctx.get_model().create_memory(params, cparams));
}

int32_t llama_h2o::enlarge(uint32_t n_cells) {
    if (smaller) {
        return LLAMA_H2O_ERR_ENLARGED;
    }
    if (n_cells <= kv.get_size() || n_cells > uint32_t(std::numeric_limits<int32_t>::max()) - CELL_BLOCK) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }

    n_cells = GGML_PAD(n_cells, CELL_BLOCK);

    std::unique_ptr<llama_memory_i> memory = new_cache(ctx, kv, n_cells);

    auto & larger = dynamic_cast<llama_kv_cache &>(*memory);

    llama_h2o_params larger_params = params;
    larger_params.slack            = n_cells - llama_h2o_n_budget(params);

    larger.h2o = std::make_shared<llama_h2o>(ctx, larger, larger_params);
    larger.h2o->take_rows(*this);

    std::swap(ctx.memory, memory);
    larger.h2o->smaller = std::move(memory);

    try {
        ctx.sched_need_reserve = true;
        ctx.sched_reserve();
        larger.h2o->reserve_graphs();
    } catch (const std::exception &) {
        larger.h2o->give_back();
        throw;
    }

    // from here on the rows are in one cache only
    kv.clear(false);

    return LLAMA_H2O_OK;
}

int32_t llama_h2o::shrink() {
    if (!smaller) {
        return LLAMA_H2O_ERR_NOT_ENLARGED;
    }

    auto & target = *dynamic_cast<llama_kv_cache &>(*smaller).h2o;

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        if (streams[s].stale) {
            reset_free_cells(s);
        }
        if (kv.v_cells[s].get_used() > llama_h2o_n_capacity(target.params)) {
            compact(s);
            if (params.positions == LLAMA_H2O_POSITIONS_DENSE) {
                rebase(s, newest(s) + 1);
            }
        }
    }

    target.take_rows(*this);
    target.refused = refused;

    give_back();

    return LLAMA_H2O_OK;
}

// Ends the life of this object and its cache.
void llama_h2o::give_back() {
    ctx.synchronize();

    const std::unique_ptr<llama_memory_i> mine = std::exchange(ctx.memory, std::move(smaller));

    ctx.sched_need_reserve = true;
    ctx.sched_reserve();
}

// Scores or squares of cells, to the first cells of another tensor.
static void take_sums(ggml_tensor * dst, ggml_tensor * src, uint32_t s, const std::vector<uint32_t> & cells) {
    llama_h2o_host_rows to(dst, s);
    llama_h2o_host_rows from(src, s);

    for (int64_t head = 0; head < dst->ne[1]; ++head) {
        for (size_t i = 0; i < cells.size(); ++i) {
            to.f32()[head * dst->ne[0] + i] = from.f32()[head * src->ne[0] + cells[i]];
        }
    }

    to.commit();
}

// All that another cache of the same kind holds, its cells in the same order but without gaps.
void llama_h2o::take_rows(llama_h2o & from) {
    ctx.synchronize();

    for (uint32_t s = 0; s < kv.n_stream; ++s) {
        const std::vector<uint32_t> used = from.used_cells(s);
        if (used.size() > kv.get_size()) {
            throw std::runtime_error("more rows than cells");
        }

        from.list_rows(s, used);

        take_cells(from, s, used);
        take_lists(from, s, used);

        for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
            const auto & layer = layers[ikv];

            llama_h2o_copy_cells(kv.layers[ikv].k, layer.k, from.kv.layers[ikv].k, from.layers[ikv].k, s, used);
            llama_h2o_copy_cells(kv.layers[ikv].v, layer.v, from.kv.layers[ikv].v, from.layers[ikv].v, s, used);

            take_sums(layer.scores, from.layers[ikv].scores, s, used);
            if (layer.squares) {
                take_sums(layer.squares, from.layers[ikv].squares, s, used);
            }
            if (layer.queries) {
                std::vector<uint8_t> queries(layer.queries->nb[3]);
                ggml_backend_tensor_get(from.layers[ikv].queries, queries.data(), queries.size() * s, queries.size());
                ggml_backend_tensor_set(layer.queries, queries.data(), queries.size() * s, queries.size());
            }
        }
    }
}

void llama_h2o::take_cells(const llama_h2o & from, uint32_t s, const std::vector<uint32_t> & used) {
    auto & cells = kv.v_cells[s];

    cells.reset();
    for (size_t i = 0; i < used.size(); ++i) {
        cells.pos_set(i, from.kv.v_cells[s].pos_get(used[i]));
        cells.seq_add(i, llama_seq_id(s));
    }
    kv.v_heads[s] = 0;
}

void llama_h2o::take_lists(const llama_h2o & from, uint32_t s, const std::vector<uint32_t> & used) {
    const auto & theirs = from.streams[s];

    auto & st = streams[s];

    std::fill(st.listed.begin(), st.listed.end(), 0);
    std::fill_n(st.listed.begin(), used.size(), 1);
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        for (uint32_t head = 0; head < layers[ikv].n_head_kv; ++head) {
            for (size_t i = 0; i < used.size(); ++i) {
                const size_t dst = size_t(head) * kv.get_size() + i;
                const size_t src = size_t(head) * from.kv.get_size() + used[i];

                st.pos[ikv][dst]      = theirs.pos[ikv][src];
                st.rope_pos[ikv][dst] = theirs.rope_pos[ikv][src];
            }
        }
    }

    st.shift         = theirs.shift;
    st.n_pinned      = theirs.n_pinned;
    st.spans         = theirs.spans;
    st.starts        = theirs.starts;
    st.queries       = theirs.queries;
    st.pos_removable = theirs.pos_removable;
    st.pos_forgotten = theirs.pos_forgotten;
    st.count         = theirs.count;
    st.stale         = true;
    st.marks.clear();
}
