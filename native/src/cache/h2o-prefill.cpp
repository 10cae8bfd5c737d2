// Exact prefill: the context temporarily has a larger cache in which nothing is evicted. Afterwards one compaction reduces it to
// the budget, and the rows are copied to the original cache.

#include "cache/h2o-cache.h"
#include "cache/h2o-caches.h"
#include "cache/h2o-collected.h"
#include "cache/h2o-compaction.h"

#include "llama-context.h"
#include "llama-model.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

//
// copying rows
//

static void take_stream(llama_h2o_parts & parts, llama_h2o_parts & from, uint32_t s) {
    const std::vector<uint32_t> used = from.cells.used(s);
    if (used.size() > parts.n_cells) {
        throw std::runtime_error("more rows than cells");
    }

    const std::vector<llama_pos> positions = from.cells.positions(s, used);

    auto & mine   = parts.streams[s];
    auto & theirs = from.streams[s];

    theirs.rows.list(used, positions);

    parts.cells.clear(s);
    for (size_t i = 0; i < used.size(); ++i) {
        parts.cells.put(s, i, positions[i]);
    }

    llama_h2o_row_positions rows(parts.n_heads(), parts.n_cells);
    rows.take(theirs.rows, used);

    mine       = theirs;
    mine.rows  = std::move(rows);
    mine.stale = true;
    mine.marks.clear();
    mine.before.reset();

    for (size_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        const auto & layer = parts.layers[ikv];
        const auto & dst   = layer.tensors;
        const auto & src   = from.layers[ikv].tensors;

        parts.layers[ikv].shape.on_host = from.layers[ikv].shape.on_host;
        llama_h2o_copy_cells(dst.k, layer.shape.k, src.k, from.layers[ikv].shape.k, s, used);
        if (dst.v) {
            llama_h2o_copy_cells(dst.v, layer.shape.v, src.v, from.layers[ikv].shape.v, s, used);
        }

        if (dst.scores->view_offs == 0) { // of all layers on this device
            ggml_tensor * to   = dst.scores->view_src;
            ggml_tensor * sums = src.scores->view_src;
            llama_h2o_copy_cells(to, llama_h2o_layout_of_sums(to), sums, llama_h2o_layout_of_sums(sums), s, used);
        }
        if (dst.queries) {
            std::vector<uint8_t> queries(dst.queries->nb[3]);
            ggml_backend_tensor_get(src.queries, queries.data(), queries.size() * s, queries.size());
            ggml_backend_tensor_set(dst.queries, queries.data(), queries.size() * s, queries.size());
        }
    }
}

// Copies everything from another cache of the same kind: its used cells, in the same order, without gaps.
static void take_rows(llama_h2o_parts & parts, llama_h2o_parts & from) {
    parts.ctx.synchronize();

    parts.breaker = from.breaker; // it belongs to the context
    for (uint32_t s = 0; s < parts.streams.size(); ++s) {
        take_stream(parts, from, s);
    }
}

//
// the caches
//

// llama.cpp rounds the number of cells up to a multiple of this
static constexpr uint32_t CELL_BLOCK = 256;

int32_t llama_h2o::enlarge(uint32_t n_cells) {
    if (smaller) {
        return LLAMA_H2O_ERR_ENLARGED;
    }
    if (n_cells <= kv.get_size() || n_cells > uint32_t(std::numeric_limits<int32_t>::max()) - CELL_BLOCK) {
        return LLAMA_H2O_ERR_ARGUMENT;
    }
    // without eviction every row needs a position
    if (n_cells > GGML_PAD(std::max(parts.params.n_pos, kv.get_size() + 1), CELL_BLOCK)) {
        return LLAMA_H2O_ERR_N_POS;
    }

    n_cells = GGML_PAD(n_cells, CELL_BLOCK);

    std::unique_ptr<llama_memory_i> memory = new_memory(parts.ctx, kv, n_cells);
    std::unique_ptr<llama_kv_cache> cache;
    llama_h2o_caches::swap_growing(memory, cache);
    memory.reset();

    llama_kv_cache & larger = *cache;

    llama_h2o_params larger_params = parts.params;
    larger_params.slack            = n_cells - parts.n_budget();

    larger.h2o = std::make_shared<llama_h2o>(parts.ctx, larger, larger_params);
    take_rows(larger.h2o->parts, parts);

    llama_h2o_caches::swap_growing(parts.ctx.memory, cache);
    larger.h2o->smaller = std::move(cache);

    try {
        parts.ctx.sched_need_reserve = true;
        parts.ctx.sched_reserve();
        larger.h2o->reserve_graphs();
    } catch (const std::exception &) {
        larger.h2o->give_back();
        throw;
    }

    // from here on the rows are in one cache only, which also takes over the archive
    for (auto & st : parts.streams) {
        st.archive.reset();
        st.index.reset();
    }
    kv.clear(false);

    return LLAMA_H2O_OK;
}

int32_t llama_h2o::shrink() {
    if (!smaller) {
        return LLAMA_H2O_ERR_NOT_ENLARGED;
    }

    auto & target = smaller->h2o->parts;

    if (parts.breaker) {
        parts.breaker->next_us = std::numeric_limits<int64_t>::max(); // not before the next batch, see place()
    }
    for (uint32_t s = 0; s < parts.streams.size(); ++s) {
        if (parts.streams[s].stale) {
            llama_h2o_reset_free_cells(parts, s);
        }
        if (parts.cells[s].get_used() > target.n_capacity()) {
            llama_h2o_compact(parts, s);
        }
    }

    take_rows(target, parts);
    target.refused = parts.refused;

    give_back();

    return LLAMA_H2O_OK;
}

// Destroys this object and its cache.
void llama_h2o::give_back() {
    parts.ctx.synchronize();

    std::unique_ptr<llama_kv_cache> mine = std::move(smaller);
    llama_h2o_caches::swap_growing(parts.ctx.memory, mine);

    parts.ctx.sched_need_reserve = true;
    try {
        parts.ctx.sched_reserve();
    } catch (const std::exception &) {
        parts.ctx.sched_need_reserve = true; // retried before the next batch
    }
}
