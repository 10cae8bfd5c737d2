// The kernel for few queries, continued: retrieved rows are additional parts, and the last step merges all parts.

#pragma once

#include "kernels/h2o-kernel-few.h"

namespace {

// Each thread searches its share of the pages, for all heads.
void few_search(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const search_work search(w.searching + ith * w.n_searching, a);

    for (uint32_t pair = 0; pair < a.n_pairs(); ++pair) {
        const uint32_t s  = pair / a.n_head_kv;
        const uint32_t h  = pair % a.n_head_kv;
        const auto & text = *a.search->texts[s];

        const size_t first = w.first_of(pair, ith);
        candidates best { w.scores + first, w.best + first, text.n_search(h, a.n_tokens), uint32_t(w.n_rows) };

        const range parts = { few_work::N_RETRIEVED_PARTS, few_work::N_RETRIEVED_PARTS + few_parts(a, s).n };
        const range pages = share(best.n_find > 0 && text.codes[h] ? text.n_pages : 0, ith, nth);
        if (pages.begin < pages.end) {
            float tops[few_work::MAX_ROWS];
            float sums[few_work::MAX_ROWS];
            for (uint32_t row = 0; row < w.n_rows; row += W) {
                const few_total total(a, w, pair, row, parts);
                v_store(tops + row, total.top);
                v_store(sums + row, total.sum);
            }
            for (uint32_t row = 0; row < w.n_rows; ++row) {
                unmixed_query(*a.search, query(a, s, h, row), a.n_embd_head_k, search.queries + row * a.n_embd_head_k);
                search.lse[row] = tops[row] + std::log(sums[row]);
            }
            search_pages(*a.search, text, search, a.n_embd_head_k, a.scale, h, pages, best);
        }
        w.n_best[pair * w.n_slots + ith] = best.n;
        fetch_retrieved(*a.search, text, h, best.rows, best.n); // while the next head is searched
    }
}

// Merges the best rows of all threads: rows in focus, then the others in text order. Returns the range of a part.
range few_choose(const llama_h2o_attention & a,
        const few_work & w,
        const search_work & search,
        uint32_t pair,
        uint32_t part,
        uint32_t nth) {
    const uint32_t h  = pair % a.n_head_kv;
    const auto & text = *a.search->texts[pair / a.n_head_kv];

    candidates all { search.scores, w.retrieved_of(pair, part), text.n_find(h, a.n_tokens), uint32_t(w.n_rows) };
    add_focus(text, h, all);
    fetch_retrieved(*a.search, text, h, all.rows, all.n);
    for (uint32_t t = 0; t < nth; ++t) {
        const uint32_t n_best = w.n_best[pair * w.n_slots + t];
        std::copy_n(w.scores + w.first_of(pair, t), n_best, all.scores + all.n);
        std::copy_n(w.best + w.first_of(pair, t), n_best, all.rows + all.n);
        all.n += n_best;
    }
    all.keep_best();

    return share(all.n, part, few_work::N_RETRIEVED_PARTS);
}

// start of the exps of a part, a multiple of the vector size
inline uint32_t few_first_exp(range mine) {
    return (mine.begin + 15) / 16 * 16;
}

// The exps of retrieved keys for all queries.
void few_retrieved_exps(const llama_h2o_attention & a,
        const few_work & w,
        const search_work & search,
        uint32_t pair,
        uint32_t part,
        range mine) {
    const uint32_t h      = pair % a.n_head_kv;
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t n      = mine.end - mine.begin;
    const auto & text     = *a.search->texts[pair / a.n_head_kv];

    const uint32_t * rows = w.retrieved_of(pair, part) + mine.begin;
    float * exps          = w.retrieved_exps + pair * w.n_rows * w.n_padded() + few_first_exp(mine);

    for (uint32_t row = 0; row < w.n_rows; ++row) {
        const float * q = query(a, pair / a.n_head_kv, h, row);
        unmixed_query(*a.search, q, n_embd, search.queries + row * n_embd);
    }
    for (uint32_t first = 0; first < n; first += TILE) {
        const uint32_t n_tile = min_u32(TILE, n - first);
        read_retrieved_keys(*a.search, text, h, rows + first, n_tile, n_embd, search.keys);
        // keys are multiplied four at a time, so the last ones are padded
        const uint32_t n_four = (n_tile + 3) / 4 * 4;
        for (uint32_t j = n_tile; j < n_four; ++j) {
            std::memcpy(search.keys + j * n_embd, search.keys, n_embd * sizeof(float));
        }
        for_query_groups(w.n_rows, [&](uint32_t row, auto n_rows) {
            const float * q[n_rows];
            for (int iq = 0; iq < n_rows; ++iq) {
                q[iq] = search.queries + (row + iq) * n_embd;
            }
            for (uint32_t j = 0; j < n_four; j += 4) {
                dot_four<rows_f32, n_rows>(q, reinterpret_cast<const char *>(search.keys + j * n_embd),
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
        w.tops_of(part, pair)[row] = top;
        w.sums_of(part, pair)[row] = v_sum(sum);
    }
}

// Attention to a part of the retrieved rows of a KV head.
void few_retrieved_part(const llama_h2o_attention & a,
        const few_work & w,
        const search_work & search,
        uint32_t pair,
        uint32_t part,
        uint32_t nth) {
    const uint32_t h      = pair % a.n_head_kv;
    const uint32_t n_embd = a.n_embd_head_v;
    const auto & text     = *a.search->texts[pair / a.n_head_kv];

    const range mine = few_choose(a, w, search, pair, part, nth);
    const uint32_t n = mine.end - mine.begin;

    float * out = w.out(part, pair, 0);
    std::memset(out, 0, w.n_rows * n_embd * sizeof(float));
    if (n == 0) {
        for (uint32_t row = 0; row < w.n_rows; ++row) {
            w.tops_of(part, pair)[row] = MINUS_INF;
            w.sums_of(part, pair)[row] = 0.0f;
        }
        return;
    }

    const uint32_t * rows = w.retrieved_of(pair, part) + mine.begin;
    few_retrieved_exps(a, w, search, pair, part, mine);

    const float * exps = w.retrieved_exps + pair * w.n_rows * w.n_padded() + few_first_exp(mine);
    for (uint32_t first = 0; first < n; first += TILE) {
        const uint32_t n_tile = min_u32(TILE, n - first);
        read_retrieved_values(*a.search, text, h, rows + first, n_tile, n_embd, search.values);
        for_query_groups(w.n_rows, [&](uint32_t row, auto n_rows) {
            mix_whole_rows<rows_f32, n_rows>(exps + row * w.n_padded() + first, w.n_padded(),
                    reinterpret_cast<const char *>(search.values), n_embd * sizeof(float), n_tile, out + row * n_embd,
                    n_embd, nullptr);
        });
    }
}

void few_retrieved(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const search_work search(w.searching + ith * w.n_searching, a);

    const range mine = share(a.n_pairs() * few_work::N_RETRIEVED_PARTS, ith, nth);
    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        few_retrieved_part(a, w, search, i / few_work::N_RETRIEVED_PARTS, i % few_work::N_RETRIEVED_PARTS, nth);
    }
}

// Factors that turn the exps of each part into probabilities.
struct few_factors {
    float of[few_work::N_RETRIEVED_PARTS + few_parts::MAX][few_work::MAX_ROWS];

    few_factors(const llama_h2o_attention & a, const few_work & w, uint32_t pair, range parts) {
        for (uint32_t row = 0; row < w.n_rows; row += W) {
            const few_total total(a, w, pair, row, parts);
            for (uint32_t t = parts.begin; t < parts.end; ++t) {
                // the sum of a part is at least 1 unless all of it is masked
                const vec exp = v_exp(v_sub(v_load(w.tops_of(t, pair) + row), total.top));
                v_store(of[t] + row, v_unless_below(v_load(w.sums_of(t, pair) + row), 0.5f, v_div(exp, total.sum)));
            }
        }
    }
};

// Records the attention to retrieved rows.
void few_note(const llama_h2o_attention & a,
        const few_work & w,
        uint32_t pair,
        const few_factors & factors,
        uint32_t ith,
        uint32_t nth) {
    const uint32_t h  = pair % a.n_head_kv;
    const auto & text = *a.search->texts[pair / a.n_head_kv];

    uint32_t n_retrieved = text.n_focus(h);
    for (uint32_t t = 0; t < nth; ++t) {
        n_retrieved += w.n_best[pair * w.n_slots + t];
    }
    n_retrieved = min_u32(n_retrieved, text.n_find(h, a.n_tokens));

    for (uint32_t part = 0; part < few_work::N_RETRIEVED_PARTS; ++part) {
        const range mine      = share(n_retrieved, part, few_work::N_RETRIEVED_PARTS);
        const uint32_t * rows = w.retrieved_of(pair, part) + mine.begin;
        const float * exps    = w.retrieved_exps + pair * w.n_rows * w.n_padded() + few_first_exp(mine);

        for (uint32_t row = 0; row < w.n_rows; ++row) {
            text.note_share(ith, w.sums_of(part, pair)[row] * factors.of[part][row]);
        }
        for (uint32_t j = 0; j < mine.end - mine.begin; j += W) {
            vec sum = v_set(0.0f);
            for (uint32_t row = 0; row < w.n_rows; ++row) {
                const vec share = v_mul(v_load(exps + row * w.n_padded() + j), v_set(factors.of[part][row]));
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
void few_collect(const llama_h2o_attention & a, const few_work & w, uint32_t pair, range cells, const float * factors) {
    float * sums = of_head(a, SQUARED ? a.squares : a.scores, pair / a.n_head_kv, pair % a.n_head_kv);

    float f[few_work::MAX_ROWS];
    const float * credit[few_work::MAX_ROWS];
    for (uint32_t row = 0; row < w.n_rows; ++row) {
        f[row]      = (SQUARED ? factors[row] * factors[row] : factors[row]) / a.n_group();
        credit[row] = credit_of(a, pair / a.n_head_kv, row);
    }
    for (uint32_t j = cells.begin; j < cells.end; j += W) {
        vec sum = v_load(sums + j);
        for (uint32_t row = 0; row < w.n_rows; ++row) {
            vec y = v_load(w.exps_of(pair, row) + j);
            y     = SQUARED ? v_mul(y, y) : y;
            y     = credit[row] ? v_mul(y, v_load(credit[row] + j)) : y;
            sum   = v_fma(y, v_set(f[row]), sum);
        }
        v_store(sums + j, sum);
    }
}

// Merges the parts of a query.
void few_output(const llama_h2o_attention & a,
        const few_work & w,
        uint32_t pair,
        uint32_t row,
        const few_factors & factors,
        range parts) {
    float * out = output(a, pair / a.n_head_kv, pair % a.n_head_kv, row);
    for (uint32_t k = 0; k < w.n_embd; k += W) {
        vec sum = v_set(0.0f);
        for (uint32_t t = parts.begin; t < parts.end; ++t) {
            sum = v_fma(v_load(w.out(t, pair, row) + k), v_set(factors.of[t][row]), sum);
        }
        v_store(out + k, sum);
    }
}

void few_combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);

    for (uint32_t pair = 0; pair < a.n_pairs(); ++pair) {
        const few_parts cells(a, pair / a.n_head_kv);
        const range parts = { a.search ? 0 : few_work::N_RETRIEVED_PARTS, few_work::N_RETRIEVED_PARTS + cells.n };
        const range mine  = share(a.scores ? cells.n : 0, ith, nth);

        const few_factors factors(a, w, pair, parts);
        for (uint32_t i = mine.begin; i < mine.end; ++i) {
            const float * f = factors.of[few_work::N_RETRIEVED_PARTS + i];
            few_collect<false>(a, w, pair, cells.cells({ i, i + 1 }), f);
            if (a.squares) {
                few_collect<true>(a, w, pair, cells.cells({ i, i + 1 }), f);
            }
        }
        for (uint32_t row = 0; row < w.n_rows; ++row) {
            if ((pair * w.n_rows + row) % nth == ith) {
                few_output(a, w, pair, row, factors, parts);
            }
        }
        if (a.search && pair % nth == ith) {
            few_note(a, w, pair, factors, ith, nth);
        }
    }
}

} // namespace
