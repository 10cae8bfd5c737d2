// Blocks of queries, one query per lane, so that rows need no transpose and no sums across lanes.

#pragma once

#include "kernels/h2o-kernel-factors.h"
#include "kernels/h2o-search-impl.h"

#include <cfloat>

namespace {

struct many_work {
    float * exps;      // [n_kv][BLOCK]                   exp(logit - top)
    factor * q;        // [n_embd_k][BLOCK]               queries, scaled; factors take up to this
    float * out;       // [n_embd_v][BLOCK]               sum of exps * V
    factor * rows;     // [TILE][max(n_embd_k, n_embd_v)] K or V
    float * mask;      // [TILE][BLOCK]
    factor * mix;      // the same memory: exps of a tile
    float * retrieved; // [n_padded][BLOCK]               exps of retrieved rows
    factor * unmixed;  // [n_embd_k][BLOCK]               queries, scaled, without a Hadamard transform
    uint32_t * best;
    float * searching; // of search_work
    float * sums;      // [n_sums][n_parts][n_kv]       of the blocks of each part: scores, squares

    size_t n_kv;
    size_t n_parts;

    // about this many parts balance the work of all threads
    static constexpr uint32_t N_PARTS = 48;

    many_work(const llama_h2o_attention & a, uint32_t slot) : n_kv(a.n_kv), n_parts(max_parts(a)) {
        sums      = a.work;
        exps      = sums + a.n_sums() * n_parts * n_kv + slot * size_of_slot(a);
        out       = exps + n_kv * BLOCK;
        mask      = out + a.n_embd_head_v * BLOCK;
        mix       = reinterpret_cast<factor *>(mask);
        q         = reinterpret_cast<factor *>(mask + TILE * BLOCK);
        rows      = q + a.n_embd_head_k * BLOCK;
        retrieved = mask + TILE * BLOCK + a.n_embd_head_k * BLOCK + n_longest(a) * TILE;

        const size_t n_retrieved = a.search ? n_padded(a) : 0;

        unmixed   = reinterpret_cast<factor *>(retrieved + n_retrieved * BLOCK);
        best      = reinterpret_cast<uint32_t *>(retrieved + (n_retrieved + a.n_embd_head_k) * BLOCK);
        searching = a.search ? reinterpret_cast<float *>(best + candidates::room(a.search->n_find)) : nullptr;
    }

    static size_t n_longest(const llama_h2o_attention & a) { return max_u32(a.n_embd_head_k, a.n_embd_head_v); }
    static size_t n_padded(const llama_h2o_attention & a) { return (a.search->n_find + TILE - 1) / TILE * TILE; }

    static size_t size_of_slot(const llama_h2o_attention & a) {
        const size_t n_embd = size_t(a.n_embd_head_k) + a.n_embd_head_v;
        const size_t n      = (a.n_kv + n_embd + TILE) * BLOCK + n_longest(a) * TILE;

        return a.search ? n + (n_padded(a) + a.n_embd_head_k) * BLOCK + candidates::room(a.search->n_find) +
                                  search_work::size(a)
                        : n;
    }

    static size_t size(const llama_h2o_attention & a) {
        return a.n_sums() * max_parts(a) * size_t(a.n_kv) + a.n_slots * size_of_slot(a);
    }

    static size_t max_parts(const llama_h2o_attention & a) { return a.n_pairs() + N_PARTS; }

    float * sums_of(uint32_t i, uint32_t part) const { return sums + (i * n_parts + part) * n_kv; }
};

// A block of queries of one KV head.
struct block {
    uint32_t s;
    uint32_t h;
    uint32_t row; // first
    uint32_t n;   // at most BLOCK

    uint32_t n_lanes() const { return (n + W - 1) / W * W; }
};

enum class tile_mask { none, all, some };

// Whether a tile of cells is masked for a block of queries.
tile_mask read_mask(const llama_h2o_attention & a, const block & b, uint32_t cell) {
    bool any_zero   = false;
    bool any_masked = false;
    bool any_other  = false;
    for (uint32_t row = b.row; row < b.row + b.n; row += a.n_group() - row % a.n_group()) {
        const uint16_t * mask = reinterpret_cast<const uint16_t *>(mask_of(a, b.s, row)) + cell;

        uint32_t n_zero   = 0;
        uint32_t n_masked = 0;
        for (uint32_t j = 0; j < TILE; ++j) {
            n_zero   += mask[j] == 0;
            n_masked += mask[j] == F16_MINUS_INF;
        }
        any_zero   |= n_zero > 0;
        any_masked |= n_masked > 0;
        any_other  |= n_zero + n_masked < TILE;
    }

    if (any_other || (any_zero && any_masked)) {
        return tile_mask::some;
    }

    return any_masked ? tile_mask::all : tile_mask::none;
}

void add_mask(const llama_h2o_attention & a, const many_work & w, const block & b, uint32_t cell) {
    for (uint32_t r = 0; r < b.n_lanes(); ++r) {
        const char * mask = mask_of(a, b.s, b.row + min_u32(r, b.n - 1)) + cell * sizeof(ggml_fp16_t);
        for (uint32_t j = 0; j < TILE; j += W) {
            float x[W];
            v_store(x, v_load_f16(mask + j * sizeof(ggml_fp16_t)));
            for (uint32_t i = 0; i < W; ++i) {
                w.mask[(j + i) * BLOCK + r] = x[i];
            }
        }
    }

    for (uint32_t j = 0; j < TILE; ++j) {
        float * x = w.exps + (cell + j) * BLOCK;
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            v_store(x + r, v_add_mask(v_load(x + r), v_load(w.mask + j * BLOCK + r)));
        }
    }
}

// Updates the maxima with the logits of a tile.
inline void raise_tops(const block & b, const float * x, float * tops) {
    for (uint32_t r = 0; r < b.n_lanes(); r += W) {
        vec top = v_load(tops + r);
        for (uint32_t j = 0; j < TILE; ++j) {
            top = v_max(top, v_load(x + j * BLOCK + r));
        }
        v_store(tops + r, top);
    }
}

// Replaces the logits of a tile, for W queries, by exps; returns their sums.
inline vec make_exps(float * x, vec top) {
    vec sum = v_set(0.0f);
    for (uint32_t j = 0; j < TILE; ++j) {
        const vec y = v_exp(v_sub(v_load(x + j * BLOCK), top));
        v_store(x + j * BLOCK, y);
        sum = v_add(sum, y);
    }

    return sum;
}

void many_logits(const llama_h2o_attention & a, const many_work & w, const block & b, float * tops) {
    for (uint32_t r = 0; r < b.n_lanes(); ++r) {
        const float * q = query(a, b.s, b.h, b.row + min_u32(r, b.n - 1));
        store_query(q, a.scale, a.n_embd_head_k, w.q + r);
        tops[r] = sink_of(a, b.h, b.row + r);
    }

    const uint32_t n = a.n_embd_head_k / N_FACTOR;
    for (uint32_t cell = 0; cell < a.n_kv; cell += TILE) {
        float * x = w.exps + cell * BLOCK;

        const tile_mask mask = read_mask(a, b, cell);
        if (mask == tile_mask::all) {
            fill(x, TILE * BLOCK, MINUS_INF);
            continue;
        }

        const char * rows = rows_of(a.k, b.s, b.h, cell);
        row_types::with(
                a.k.type, [&](auto type) { read_keys<decltype(type)>(rows, a.k.nb_row, a.n_embd_head_k, w.rows); });
        product<false>(w.rows, n, 1, w.q, n, x, TILE, b.n_lanes());

        if (mask == tile_mask::some) {
            add_mask(a, w, b, cell);
        }

        raise_tops(b, x, tops);
    }
}

// Factors that turn the exps of a block's queries into probabilities; 0 for lanes without a query.
struct many_factors {
    float cells[BLOCK];
    float all[BLOCK]; // for the result
};

// Replaces logits by exps, and adds V weighted by them.
void many_mix(const llama_h2o_attention & a, const many_work & w, const block & b, const float * tops, float * sums) {
    for (uint32_t r = 0; r < b.n_lanes(); ++r) {
        sums[r] = std::exp(sink_of(a, b.h, b.row + r) - std::max(tops[r], -FLT_MAX));
    }
    std::memset(w.out, 0, a.n_embd_head_v * BLOCK * sizeof(float));

    for (uint32_t cell = 0; cell < a.n_kv; cell += TILE) {
        float * x = w.exps + cell * BLOCK;

        bool is_zero = true;
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            // if all cells are masked, the maximum and all logits are -inf
            const vec top = v_max(v_load(tops + r), v_set(-FLT_MAX));

            const vec sum = make_exps(x + r, top);
            v_store(sums + r, v_add(v_load(sums + r), sum));
            is_zero = is_zero && v_top(sum) == 0.0f;
        }

        if (!is_zero) {
            const uint32_t n  = a.n_embd_head_v;
            const char * rows = rows_of(a.v, b.s, b.h, cell);
            row_types::with(a.v.type, [&](auto type) { read_values<decltype(type)>(rows, a.v.nb_row, n, w.rows); });

            const factor * mix = as_factors(x, b.n_lanes(), w.mix);
            product<true>(w.rows, 1, n, mix, TILE / N_FACTOR, w.out, n, b.n_lanes());
        }
    }
}

} // namespace
