// The kernel for many queries, such as a prompt: blocks of queries attend to all cells. If there is an archive, a block consists
// of the queries of some tokens, which search together.

#pragma once

#include "kernels/h2o-kernel-block.h"

namespace {

// Logits of a block's retrieved rows. Updates tops, the maxima, with these rows.
void many_retrieved_logits(
        const llama_h2o_attention & a, const many_work & w, const block & b, uint32_t n_retrieved, float * tops) {
    const auto & text     = *a.search->texts[b.s];
    const uint32_t n_embd = a.n_embd_head_k;

    const search_work search(w.searching, a);

    const factor * q = w.q;
    if (a.search->n_query_mix > 0) {
        for (uint32_t r = 0; r < b.n_lanes(); ++r) {
            unmixed_query(*a.search, query(a, b.s, b.h, b.row + min_u32(r, b.n - 1)), n_embd, search.queries);
            store_query(search.queries, a.scale, n_embd, w.unmixed + r);
        }
        q = w.unmixed;
    }

    for (uint32_t first = 0; first < n_retrieved; first += TILE) {
        const uint32_t n = min_u32(TILE, n_retrieved - first);
        float * x        = w.retrieved + first * BLOCK;

        read_retrieved_keys(*a.search, text, b.h, w.best + first, n, n_embd, search.keys);
        std::memset(search.keys + n * n_embd, 0, (TILE - n) * n_embd * sizeof(float));
        read_keys<rows_f32>(reinterpret_cast<const char *>(search.keys), n_embd * sizeof(float), n_embd, w.rows);
        product<false>(w.rows, n_embd / N_FACTOR, 1, q, n_embd / N_FACTOR, x, TILE, b.n_lanes());

        fill(x + n * BLOCK, (TILE - n) * BLOCK, MINUS_INF);
        raise_tops(b, x, tops);
    }
}

// Adds a block's retrieved rows to its attention.
//   tops   of the cells
//   sums   of the cells' exps; returns those of all rows
void many_retrieved(const llama_h2o_attention & a,
        const many_work & w,
        const block & b,
        uint32_t n_retrieved,
        const float * tops,
        float * sums,
        float * cell_factors) {
    const auto & text     = *a.search->texts[b.s];
    const uint32_t n_embd = a.n_embd_head_v;

    const search_work search(w.searching, a);

    float all_tops[BLOCK];
    std::memcpy(all_tops, tops, sizeof(all_tops));
    fetch_retrieved(*a.search, text, b.h, w.best, n_retrieved);
    many_retrieved_logits(a, w, b, n_retrieved, all_tops);

    for (uint32_t r = 0; r < b.n_lanes(); ++r) {
        cell_factors[r]  = std::exp(tops[r] - all_tops[r]);
        sums[r]         *= cell_factors[r];
    }
    for (uint32_t i = 0; i < n_embd; ++i) {
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            float * out = w.out + i * BLOCK + r;
            v_store(out, v_mul(v_load(out), v_load(cell_factors + r)));
        }
    }

    for (uint32_t first = 0; first < n_retrieved; first += TILE) {
        const uint32_t n = min_u32(TILE, n_retrieved - first);
        float * x        = w.retrieved + first * BLOCK;

        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            v_store(sums + r, v_add(v_load(sums + r), make_exps(x + r, v_load(all_tops + r))));
        }

        read_retrieved_values(*a.search, text, b.h, w.best + first, n, n_embd, search.values);
        std::memset(search.values + n * n_embd, 0, (TILE - n) * n_embd * sizeof(float));
        read_values<rows_f32>(reinterpret_cast<const char *>(search.values), n_embd * sizeof(float), n_embd, w.rows);
        product<true>(
                w.rows, 1, n_embd, as_factors(x, b.n_lanes(), w.mix), TILE / N_FACTOR, w.out, n_embd, b.n_lanes());
    }
}

// Records the attention to retrieved rows.
void many_note(const llama_h2o_attention & a,
        const many_work & w,
        const block & b,
        uint32_t n_retrieved,
        const float * factors,
        uint32_t ith) {
    const auto & text = *a.search->texts[b.s];

    for (uint32_t j = 0; j < n_retrieved; ++j) {
        vec sum     = v_set(0.0f);
        vec squares = v_set(0.0f);
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            const vec share = v_mul(v_load(w.retrieved + j * BLOCK + r), v_load(factors + r));
            sum             = v_add(sum, share);
            squares         = v_fma(share, share, squares);
        }
        text.note(ith, a.n_head_kv, b.h, w.best[j], v_sum(squares));
        text.note_share(ith, v_sum(sum));
    }
}

// The credit of each query of a block for a tile, times the factors: [BLOCK]. Returns false if it differs between cells.
bool many_credit(const llama_h2o_attention & a, const block & b, uint32_t cell, const float * factors, float * res) {
    for (uint32_t r = 0; r < b.n; ++r) {
        const float * credit = credit_of(a, b.s, b.row + r);

        if (credit && (r == 0 || (b.row + r) % a.n_group() == 0)) {
            bool equal = true;
            for (uint32_t j = 0; j < TILE; ++j) {
                equal &= credit[cell + j] == credit[cell];
            }
            if (!equal) {
                return false;
            }
        }
        res[r] = credit ? factors[r] * credit[cell] : factors[r];
    }
    fill(res + b.n, BLOCK - b.n, 0.0f);

    return true;
}

// Adds the probabilities of the block, or their squares, to res [n_kv], as means over the KV group.
template <bool SQUARED>
void many_collect(
        const llama_h2o_attention & a, const many_work & w, const block & b, const float * factors, float * res) {
    const float mean = 1.0f / a.n_group();

    for (uint32_t cell = 0; cell < a.n_kv; cell += TILE) {
        float f[BLOCK];
        if (many_credit(a, b, cell, factors, f)) {
            for (uint32_t j = cell; j < cell + TILE; j += 4) {
                vec sum[4] = { v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f) };
                for (uint32_t r = 0; r < b.n_lanes(); r += W) {
                    const vec x = v_load(f + r);
                    for (uint32_t k = 0; k < 4; ++k) {
                        const vec y = v_load(w.exps + (j + k) * BLOCK + r);
                        sum[k]      = SQUARED ? v_fma(v_mul(y, x), v_mul(y, x), sum[k]) : v_fma(y, x, sum[k]);
                    }
                }
                float four[4];
                v_store_sums(four, sum[0], sum[1], sum[2], sum[3]);
                for (uint32_t k = 0; k < 4; ++k) {
                    res[j + k] += four[k] * mean;
                }
            }
            continue;
        }

        for (uint32_t r = 0; r < b.n; ++r) {
            const float * credit = credit_of(a, b.s, b.row + r);
            for (uint32_t j = cell; j < cell + TILE; ++j) {
                const float y  = w.exps[j * BLOCK + r] * factors[r];
                res[j]        += (SQUARED ? y * y : y) * credit[j] * mean;
            }
        }
    }
}

void many_output(const llama_h2o_attention & a, const many_work & w, const block & b, const float * factors) {
    for (uint32_t r = 0; r < b.n; ++r) {
        float * out = output(a, b.s, b.h, b.row + r);
        for (uint32_t i = 0; i < a.n_embd_head_v; ++i) {
            out[i] = w.out[i * BLOCK + r] * factors[r];
        }
    }
}

// Splits the queries of a pair into blocks, of about the same size or of tokens that search together, and assigns these to
// parts with separate sums of scores.
struct many_blocks {
    uint32_t size; // queries per block
    uint32_t n;
    uint32_t n_parts;

    explicit many_blocks(const llama_h2o_attention & a) {
        const auto parts_of = [](uint32_t n, uint32_t size) {
            return (n + size - 1) / size;
        };

        size    = a.search ? a.n_together() * a.n_group()
                           : parts_of(parts_of(a.n_rows(), W), parts_of(a.n_rows(), BLOCK)) * W;
        n       = parts_of(a.n_rows(), size);
        n_parts = parts_of(n, parts_of(n, parts_of(many_work::N_PARTS, a.n_pairs())));
    }
};

// Merges cells and retrieved rows, and returns the factors of the exps of a block.
many_factors many_finish(
        const llama_h2o_attention & a, const many_work & w, const block & b, const float * tops, uint32_t ith) {
    many_factors res = {};

    float sums[BLOCK];
    many_mix(a, w, b, tops, sums);

    float cells[BLOCK];
    fill(cells, BLOCK, 1.0f);
    uint32_t n_retrieved = 0;
    if (a.search) {
        n_retrieved = search_together(
                a, search_work(w.searching, a), b, w.best, [&](uint32_t r) { return tops[r] + std::log(sums[r]); });
    }
    if (n_retrieved > 0) {
        many_retrieved(a, w, b, n_retrieved, tops, sums, cells);
    }
    for (uint32_t r = 0; r < b.n; ++r) {
        res.all[r]   = sums[r] != 0.0f ? 1.0f / sums[r] : 0.0f;
        res.cells[r] = res.all[r] * cells[r];
    }
    if (n_retrieved > 0) {
        many_note(a, w, b, n_retrieved, res.all, ith);
    }

    return res;
}

void many_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const many_work w(a, ith);
    const many_blocks blocks(a);

    const range mine = share(a.n_pairs() * blocks.n_parts, ith, nth);

    // pair by pair, so that its rows stay in the processor cache
    for (uint32_t part = mine.begin; part < mine.end; ++part) {
        const uint32_t pair = part / blocks.n_parts;

        for (uint32_t i = 0; i < a.n_sums(); ++i) {
            std::memset(w.sums_of(i, part), 0, a.n_kv * sizeof(float));
        }
        for (uint32_t i = part % blocks.n_parts; i < blocks.n; i += blocks.n_parts) {
            const uint32_t row = i * blocks.size;
            const block b = { pair / a.n_head_kv, pair % a.n_head_kv, row, min_u32(blocks.size, a.n_rows() - row) };

            float tops[BLOCK];
            many_logits(a, w, b, tops);

            const many_factors factors = many_finish(a, w, b, tops, ith);
            if (a.scores) {
                many_collect<false>(a, w, b, factors.cells, w.sums_of(0, part));
            }
            if (a.squares) {
                many_collect<true>(a, w, b, factors.cells, w.sums_of(1, part));
            }
            many_output(a, w, b, factors.all);
        }
    }
}

void many_combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const many_work w(a, ith);
    const many_blocks blocks(a);
    const range cells = share_cells(a.n_kv, ith, nth);

    for (uint32_t i = 0; i < a.n_sums() * a.n_pairs(); ++i) {
        const uint32_t pair = i % a.n_pairs();
        const bool squared  = i >= a.n_pairs();

        float * sums = of_head(a, squared ? a.squares : a.scores, pair / a.n_head_kv, pair % a.n_head_kv);

        for (uint32_t k = 0; k < blocks.n_parts; ++k) {
            const float * part = w.sums_of(squared, pair * blocks.n_parts + k);
            for (uint32_t j = cells.begin; j < cells.end; j += W) {
                v_store(sums + j, v_add(v_load(sums + j), v_load(part + j)));
            }
        }
    }
}

} // namespace
