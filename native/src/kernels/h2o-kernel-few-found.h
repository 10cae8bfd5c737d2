// The kernel for few queries, behind the cells: found rows are parts of their own, and the last step puts all parts together.

#pragma once

#include "kernels/h2o-kernel-few.h"

namespace {

// Each thread looks through its share of the pages, for all heads.
void few_look(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const search_work look(w.looking + ith * w.n_looking, a);

    for (uint32_t pair = 0; pair < a.n_pairs(); ++pair) {
        const uint32_t s  = pair / a.n_head_kv;
        const uint32_t h  = pair % a.n_head_kv;
        const auto & text = *a.search->texts[s];

        const size_t first = w.first_of(pair, ith);
        candidates best { w.scores + first, w.best + first, text.n_find(h, a.n_tokens), uint32_t(w.n_rows) };

        const range pages = share(best.n_find > 0 ? text.n_pages : 0, ith, nth);
        if (pages.begin < pages.end) {
            for (uint32_t row = 0; text.codes[h] && row < w.n_rows; ++row) {
                unmixed_query(*a.search, query(a, s, h, row), a.n_embd_head_k, look.queries + row * a.n_embd_head_k);

                const few_total total(w, pair * w.n_rows + row, w.n_slots);
                look.lse[row] = total.top + std::log(total.sum);
            }
            search_pages(*a.search, text, look, a.n_embd_head_k, a.scale, h, pages, best);
        }
        w.n_best[pair * w.n_slots + ith] = best.n;
        fetch_found(*a.search, text, h, best.rows, best.n); // while the next head is looked through
    }
}

// The best rows of all threads, in their order, and which of them belong to a part.
range few_choose(const few_work & w, const search_work & look, uint32_t pair, uint32_t part, uint32_t n_find) {
    candidates all { look.scores, w.found_of(pair, part), n_find, uint32_t(w.n_rows) };
    for (uint32_t t = 0; t < w.n_slots; ++t) {
        const uint32_t n_best = w.n_best[pair * w.n_slots + t];
        std::copy_n(w.scores + w.first_of(pair, t), n_best, all.scores + all.n);
        std::copy_n(w.best + w.first_of(pair, t), n_best, all.rows + all.n);
        all.n += n_best;
    }
    all.keep_best();

    return share(all.n, part, few_work::N_FOUND_PARTS);
}

// where the exps of a part begin: in whole vectors
inline uint32_t few_first_exp(range mine) {
    return (mine.begin + 15) / 16 * 16;
}

// Products of found keys with all queries, as exps.
void few_found_exps(const llama_h2o_attention & a,
        const few_work & w,
        const search_work & look,
        uint32_t pair,
        uint32_t part,
        range mine) {
    const uint32_t h      = pair % a.n_head_kv;
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t n      = mine.end - mine.begin;
    const auto & text     = *a.search->texts[pair / a.n_head_kv];

    const uint32_t * rows = w.found_of(pair, part) + mine.begin;
    float * exps          = w.found_exps + pair * w.n_rows * w.n_padded() + few_first_exp(mine);

    for (uint32_t row = 0; row < w.n_rows; ++row) {
        const float * q = query(a, pair / a.n_head_kv, h, row);
        unmixed_query(*a.search, q, n_embd, look.queries + row * n_embd);
    }
    for (uint32_t first = 0; first < n; first += TILE) {
        const uint32_t n_tile = min_u32(TILE, n - first);
        read_found_keys(*a.search, text, h, rows + first, n_tile, n_embd, look.keys);
        // four at a time, so that the last ones need company
        const uint32_t n_four = (n_tile + 3) / 4 * 4;
        for (uint32_t j = n_tile; j < n_four; ++j) {
            std::memcpy(look.keys + j * n_embd, look.keys, n_embd * sizeof(float));
        }
        for_query_groups(w.n_rows, [&](uint32_t row, auto n_rows) {
            const float * q[n_rows];
            for (int iq = 0; iq < n_rows; ++iq) {
                q[iq] = look.queries + (row + iq) * n_embd;
            }
            for (uint32_t j = 0; j < n_four; j += 4) {
                dot_four<rows_f32, n_rows>(q, reinterpret_cast<const char *>(look.keys + j * n_embd),
                        n_embd * sizeof(float), n_embd, exps + row * w.n_padded() + first + j, w.n_padded());
            }
        });
    }

    for (uint32_t row = 0; row < w.n_rows; ++row) {
        float * x = exps + row * w.n_padded();

        for (uint32_t j = n; j < (n + W - 1) / W * W; ++j) {
            x[j] = MINUS_INF;
        }
        vec tops = v_set(MINUS_INF);
        for (uint32_t j = 0; j < n; j += W) {
            tops = v_max(tops, v_load(x + j));
        }
        const float top = v_top(tops) * a.scale;

        vec sum = v_set(0.0f);
        for (uint32_t j = 0; j < n; j += W) {
            const vec y = v_exp(v_fma(v_load(x + j), v_set(a.scale), v_set(-top)));
            v_store(x + j, y);
            sum = v_add(sum, y);
        }
        w.top(w.n_slots + part, pair * w.n_rows + row) = top;
        w.sum(w.n_slots + part, pair * w.n_rows + row) = v_sum(sum);
    }
}

// Attention to a part of the rows that a KV head has found.
void few_found_part(
        const llama_h2o_attention & a, const few_work & w, const search_work & look, uint32_t pair, uint32_t part) {
    const uint32_t h      = pair % a.n_head_kv;
    const uint32_t n_embd = a.n_embd_head_v;
    const size_t i        = pair * w.n_rows;
    const auto & text     = *a.search->texts[pair / a.n_head_kv];

    const range mine = few_choose(w, look, pair, part, text.n_find(h, a.n_tokens));
    const uint32_t n = mine.end - mine.begin;

    float * out = w.out(w.n_slots + part, i);
    std::memset(out, 0, w.n_rows * n_embd * sizeof(float));
    if (n == 0) {
        for (uint32_t row = 0; row < w.n_rows; ++row) {
            w.top(w.n_slots + part, i + row) = MINUS_INF;
            w.sum(w.n_slots + part, i + row) = 0.0f;
        }
        return;
    }

    const uint32_t * rows = w.found_of(pair, part) + mine.begin;
    few_found_exps(a, w, look, pair, part, mine);

    const float * exps = w.found_exps + i * w.n_padded() + few_first_exp(mine);
    for (uint32_t first = 0; first < n; first += TILE) {
        const uint32_t n_tile = min_u32(TILE, n - first);
        read_found_values(*a.search, text, h, rows + first, n_tile, n_embd, look.values);
        for_query_groups(w.n_rows, [&](uint32_t row, auto n_rows) {
            mix_whole_rows<rows_f32, n_rows>(exps + row * w.n_padded() + first, w.n_padded(),
                    reinterpret_cast<const char *>(look.values), n_embd * sizeof(float), n_tile, out + row * n_embd,
                    n_embd, nullptr);
        });
    }
}

void few_found(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const search_work look(w.looking + ith * w.n_looking, a);

    const range mine = share(a.n_pairs() * few_work::N_FOUND_PARTS, ith, nth);
    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        few_found_part(a, w, look, i / few_work::N_FOUND_PARTS, i % few_work::N_FOUND_PARTS);
    }
}

// Notes how much found rows were looked at.
void few_note(const llama_h2o_attention & a, const few_work & w, uint32_t pair, uint32_t ith) {
    const uint32_t h  = pair % a.n_head_kv;
    const auto & text = *a.search->texts[pair / a.n_head_kv];

    uint32_t n_found = 0;
    for (uint32_t t = 0; t < w.n_slots; ++t) {
        n_found += w.n_best[pair * w.n_slots + t];
    }
    n_found = min_u32(n_found, text.n_find(h, a.n_tokens));

    for (uint32_t part = 0; part < few_work::N_FOUND_PARTS; ++part) {
        const range mine      = share(n_found, part, few_work::N_FOUND_PARTS);
        const uint32_t * rows = w.found_of(pair, part) + mine.begin;
        const float * exps    = w.found_exps + pair * w.n_rows * w.n_padded() + few_first_exp(mine);

        float factors[llama_h2o_attention::MAX_FEW_ROWS];
        for (uint32_t row = 0; row < w.n_rows; ++row) {
            const size_t i    = pair * w.n_rows + row;
            factors[row]      = few_total(w, i, w.n_parts()).factor(w, i, w.n_slots + part);
            text.shares[ith] += w.sum(w.n_slots + part, i) * factors[row];
        }
        for (uint32_t j = 0; j < mine.end - mine.begin; j += W) {
            vec sum = v_set(0.0f);
            for (uint32_t row = 0; row < w.n_rows; ++row) {
                const vec share = v_mul(v_load(exps + row * w.n_padded() + j), v_set(factors[row]));
                sum             = v_fma(share, share, sum);
            }
            float squares[W];
            v_store(squares, sum);
            for (uint32_t k = 0; k < W && j + k < mine.end - mine.begin; ++k) {
                text.note(ith, a.n_head_kv, h, rows[j + k], squares[k]);
            }
        }
    }
}

// Adds the probabilities of a KV head's queries, or their squares, as means over the KV group.
template <bool SQUARED>
void few_collect(const llama_h2o_attention & a, const few_work & w, uint32_t pair, range cells, uint32_t ith) {
    float * sums = of_head(a, SQUARED ? a.squares : a.scores, pair / a.n_head_kv, pair % a.n_head_kv);

    for (uint32_t row = 0; row < w.n_rows; ++row) {
        const size_t i     = pair * w.n_rows + row;
        const float factor = few_total(w, i, w.n_parts()).factor(w, i, ith);
        const vec f        = v_set((SQUARED ? factor * factor : factor) / a.n_group());
        const float * x    = w.exps_of(pair, row);
        const float * c    = credit_of(a, pair / a.n_head_kv, row);
        for (uint32_t j = cells.begin; j < cells.end; j += W) {
            vec y = v_load(x + j);
            y     = SQUARED ? v_mul(y, y) : y;
            y     = c ? v_mul(y, v_load(c + j)) : y;
            v_store(sums + j, v_fma(y, f, v_load(sums + j)));
        }
    }
}

void few_combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);

    for (uint32_t pair = 0; a.scores && pair < a.n_pairs(); ++pair) {
        const range cells = own_cells(a, pair / a.n_head_kv, ith, nth);

        few_collect<false>(a, w, pair, cells, ith);
        if (a.squares) {
            few_collect<true>(a, w, pair, cells, ith);
        }
    }

    if (a.search) {
        const range pairs = share(a.n_pairs(), ith, nth);
        for (uint32_t pair = pairs.begin; pair < pairs.end; ++pair) {
            few_note(a, w, pair, ith);
        }
    }

    const range mine = share(w.n_all, ith, nth);
    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        const uint32_t pair = i / w.n_rows;

        float * out = output(a, pair / a.n_head_kv, pair % a.n_head_kv, i % w.n_rows);
        std::memset(out, 0, w.n_embd * sizeof(float));
        const few_total total(w, i, w.n_parts());
        for (uint32_t t = 0; t < w.n_parts(); ++t) {
            const vec f = v_set(total.factor(w, i, t));
            for (uint32_t k = 0; k < w.n_embd; k += W) {
                v_store(out + k, v_fma(v_load(w.out(t, i) + k), f, v_load(out + k)));
            }
        }
    }
}

} // namespace
