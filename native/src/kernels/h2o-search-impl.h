// Searching codes, and reading retrieved rows, in vectors of any width.

#pragma once

#include "kernels/h2o-candidates.h"
#include "kernels/h2o-codes-impl.h"
#include "kernels/h2o-rotation-impl.h"

#include <algorithm>
#include <cmath>

namespace {

// Queries per pass over a page, limited by the registers for their sums.
#if !defined(H2O_PORTABLE) && defined(__AVX512BW__)
constexpr int N_AT_ONCE = 4;
#else
constexpr int N_AT_ONCE = 1;
#endif
static_assert(N_AT_ONCE <= 4, "see search_work");

// the signs of the four elements of a group, for each index of its table
constexpr float TABLE_SIGNS[4][16] = {
    { -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1 },
    { -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1 },
    { -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1 },
    { -1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1 },
};

// Work space of a thread that searches.
struct search_work {
    float * queries;  // [max_asking][n_embd] without Hadamard transform
    float * mixed;    // [n_embd padded to a group]
    float * lse;      // [max_asking] log-sum-exp of the logits of the cells
    float * steps;    // [max_asking] of the tables
    float * offsets;  // [max_asking]
    float * tops;     // [PAGE] largest estimate of all queries, minus lse
    uint8_t * tables; // [max_asking][n_groups][16]
    uint16_t * sums;  // [N_AT_ONCE][PAGE]
    float * scores;   // of candidates
    float * keys;     // [TILE][n_embd] of retrieved rows
    float * values;   // [TILE][n_embd_v]

    // floats for the sums of four queries, the maximum of all kernels, so that the size is the same for all
    static constexpr size_t N_SUMS = 4 * PAGE / 2;

    static size_t size(const llama_h2o_attention & a) {
        const size_t n_padded   = (a.n_embd_head_k + 15) / 16 * 16;
        const size_t max_asking = a.max_asking();
        return max_asking * (2 * n_padded + 3) + n_padded + PAGE + N_SUMS +
               TILE * (n_padded + size_t(a.n_embd_head_v)) + n_scores(a);
    }

    static size_t n_scores(const llama_h2o_attention & a) {
        return std::max(candidates::room(a.search->n_find), candidates::padded(size_t(a.n_slots) * a.search->n_find));
    }

    search_work(float * space, const llama_h2o_attention & a) {
        const size_t n_padded   = (a.n_embd_head_k + 15) / 16 * 16;
        const size_t max_asking = a.max_asking();

        queries = space;
        mixed   = queries + max_asking * n_padded;
        lse     = mixed + n_padded;
        steps   = lse + max_asking;
        offsets = steps + max_asking;
        tops    = offsets + max_asking;
        tables  = reinterpret_cast<uint8_t *>(tops + PAGE); // n_groups*16 bytes = n_padded floats
        keys    = tops + PAGE + max_asking * n_padded;
        values  = keys + TILE * n_padded;
        sums    = reinterpret_cast<uint16_t *>(values + TILE * a.n_embd_head_v);
        scores  = values + TILE * a.n_embd_head_v + N_SUMS;
    }
};

// Undoes the Hadamard transform of a query.
inline void unmixed_query(const llama_h2o_search & s, const float * query, uint32_t n_embd, float * res) {
    std::memcpy(res, query, n_embd * sizeof(float));
    if (s.n_query_mix > 0) {
        hadamard(res, n_embd, s.n_query_mix);
    }
}

inline const float * rotation_of(const llama_h2o_search & s, const llama_h2o_search_text & text, uint32_t page) {
    return page < text.n_unrotated ? nullptr : text.factors + size_t(page - text.n_unrotated) * 2 * s.rotation.n_dims;
}

// Makes the lookup tables of a query.
inline void make_tables(const search_work & w, uint32_t i, uint32_t n_embd) {
    const llama_h2o_code_layout layout { n_embd };
    const uint32_t n_groups = layout.n_groups();

    float * h = w.mixed;
    std::memcpy(h, w.queries + i * n_embd, n_embd * sizeof(float));
    for (uint32_t k = n_embd; k < 4 * n_groups; ++k) {
        h[k] = 0.0f;
    }
    hadamard(h, n_embd, layout.n_mix());

    float most = 0.0f;
    float all  = 0.0f;
    for (uint32_t g = 0; g < n_groups; ++g) {
        const float * x  = h + 4 * g;
        const float sum  = std::fabs(x[0]) + std::fabs(x[1]) + std::fabs(x[2]) + std::fabs(x[3]);
        most             = sum > most ? sum : most;
        all             += sum;
    }
    const float step = 2.0f * most / LEVELS;
    const float by   = step > 0.0f ? 1.0f / step : 0.0f;
    uint8_t * table  = w.tables + size_t(i) * n_groups * 16;

    for (uint32_t g = 0; g < n_groups; ++g, table += 16) {
        const float * x = h + 4 * g;
        const float sum = std::fabs(x[0]) + std::fabs(x[1]) + std::fabs(x[2]) + std::fabs(x[3]);
        for (uint32_t m = 0; m < 16; m += W) {
            vec value = v_set(sum * by + 0.5f);
            for (uint32_t k = 0; k < 4; ++k) {
                value = v_fma(v_load(TABLE_SIGNS[k] + m), v_set(x[k] * by), value);
            }
            v_store_u8(table + m, value);
        }
    }
    w.steps[i]   = step;
    w.offsets[i] = all;
}

// The products of the centre of a page with N queries.
template <int N>
inline void dot_centre(const float * q, const char * centre, uint32_t n_embd, float * res) {
    vec sums[4] = { v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f) };
    for (uint32_t i = 0; i < n_embd; i += W) {
        const vec c = v_load_f16(centre + i * sizeof(ggml_fp16_t));
        for (int k = 0; k < N; ++k) {
            sums[k] = v_fma(v_load(q + k * n_embd + i), c, sums[k]);
        }
    }
    v_store_sums(res, sums[0], sums[1], sums[2], sums[3]);
}

// The score of a row is its largest estimated logit over the queries, minus the log-sum-exp of the query's logits in the cells.
// Raises the scores of a page's rows to those of N queries from i on.
template <int N>
inline void raise_tops(const llama_h2o_search & s,
        const search_work & w,
        const char * codes,
        uint32_t i,
        uint32_t n_embd,
        float scale) {
    static_assert(N <= 4, "a vector of sums");

    const llama_h2o_code_layout layout { n_embd };

    add_tables<N>(w.tables + size_t(i) * layout.n_groups() * 16, codes + layout.signs(), layout.n_groups(), w.sums);

    float of_centre[4];
    dot_centre<N>(w.queries + size_t(i) * n_embd, codes + layout.centre(), n_embd, of_centre);

    vec step[N];
    vec offset[N];
    vec constant[N];
    for (int k = 0; k < N; ++k) {
        step[k]     = v_set(w.steps[i + k] * scale);
        offset[k]   = v_set(-w.offsets[i + k] * scale);
        constant[k] = v_set(of_centre[k] * scale - (s.cap > 0.0f ? 0.0f : w.lse[i + k]));
    }
    for (uint32_t j = 0; j < PAGE; j += W) {
        const vec factor = v_load_f16(codes + layout.scales() + j * sizeof(ggml_fp16_t));

        vec top = v_load(w.tops + j);
        for (int k = 0; k < N; ++k) {
            vec logit = v_fma(factor, v_fma(v_load_u16(w.sums + k * PAGE + j), step[k], offset[k]), constant[k]);
            if (s.cap > 0.0f) {
                const vec capped = v_mul(v_tanh(v_mul(logit, v_set(1.0f / s.cap))), v_set(s.cap));
                logit            = v_sub(capped, v_set(w.lse[i + k]));
            }
            top = v_max(top, logit);
        }
        v_store(w.tops + j, top);
    }
}

// Scores the rows of a page.
inline void score_page(const llama_h2o_search & s,
        const search_work & w,
        const char * codes,
        uint32_t n_asking,
        uint32_t n_embd,
        float scale) {
    for (uint32_t j = 0; j < PAGE; j += W) {
        v_store(w.tops + j, v_set(MINUS_INF));
    }

    uint32_t i = 0;
    for (; i + N_AT_ONCE <= n_asking; i += N_AT_ONCE) {
        raise_tops<N_AT_ONCE>(s, w, codes, i, n_embd, scale);
    }
    if constexpr (N_AT_ONCE > 1) {
        if (n_asking - i == 3) {
            raise_tops<3>(s, w, codes, i, n_embd, scale);
        } else if (n_asking - i == 2) {
            raise_tops<2>(s, w, codes, i, n_embd, scale);
        } else if (n_asking - i == 1) {
            raise_tops<1>(s, w, codes, i, n_embd, scale);
        }
    }
}

// Adds the hidden rows in focus before all others, whatever their score.
inline void add_focus(const llama_h2o_search_text & text, uint32_t head, candidates & best) {
    for (uint32_t bits = text.in_focus(head); bits != 0; bits &= bits - 1) {
        best.scores[best.n] = INFINITY;
        best.rows[best.n++] = text.focus + uint32_t(__builtin_ctz(bits));
    }
}

// Adds the rows of a page that may be among the best.
inline void add_page(const search_work & w, const uint64_t * hidden, uint32_t first_row, candidates & best) {
    best.make_room();

    uint32_t rows[PAGE];
    for (uint32_t j = 0; j < PAGE; ++j) {
        rows[j] = first_row + j;
    }
    for (uint32_t j = 0; j < PAGE; j += W) {
        const vec x         = v_load(w.tops + j);
        const uint32_t bits = uint32_t(hidden[j / 64] >> j % 64) & ALL_LANES & v_above(x, best.least);
        if (bits != 0) {
            best.add(x, rows + j, bits);
        }
    }
}

// Searches some pages of a head for the rows that the queries would attend to most.
inline void search_pages(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        const search_work & w,
        uint32_t n_embd,
        float scale,
        uint32_t head,
        range pages,
        candidates & best) {
    if (!text.codes[head]) {
        return;
    }

    const llama_h2o_code_layout layout { n_embd };

    for (uint32_t i = 0; i < best.n_asking && pages.begin < pages.end; ++i) {
        make_tables(w, i, n_embd);
    }
    for (uint32_t page = pages.begin; page < pages.end; ++page) {
        const char * codes = text.codes[head] + page * layout.size();
        for (size_t i = 0; i < layout.size() && page + 1 < pages.end; i += 64) {
            __builtin_prefetch(codes + layout.size() + i); // of the next page
        }

        uint64_t hidden[PAGE / 64];
        std::memcpy(hidden, text.hidden[head] + page * (PAGE / 64), sizeof(hidden));
        if (text.focus / PAGE == page) {
            hidden[text.focus % PAGE / 64] &= ~(0xffffffffull << text.focus % 64);
        }
        if ((hidden[0] | hidden[1]) == 0) {
            continue;
        }

        score_page(s, w, codes, best.n_asking, n_embd, scale);
        add_page(w, hidden, page * PAGE, best);
    }
    best.keep_best();
}

// Reads retrieved keys as floats, rotated to their RoPE positions: [n][n_embd].
inline void read_retrieved_keys(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * retrieved,
        uint32_t n,
        uint32_t n_embd,
        float * res) {
    row_types::with(s.type, [&](auto rows) {
        for (uint32_t j = 0; j < n; ++j) {
            const uint32_t page = retrieved[j] / PAGE;
            const char * row    = text.pages[page] + text.keys[head] + retrieved[j] % PAGE * s.nb_row;
            for (uint32_t i = 0; i < n_embd; i += W) {
                v_store(res + j * n_embd + i, decltype(rows)::load(row, i));
            }
            if (const float * factors = rotation_of(s, text, page)) {
                rotate_row(s.rotation, factors, res + j * n_embd);
            }
        }
    });
}

inline void read_retrieved_values(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * retrieved,
        uint32_t n,
        uint32_t n_embd,
        float * res) {
    row_types::with(s.type, [&](auto rows) {
        for (uint32_t j = 0; j < n; ++j) {
            const char * row = text.pages[retrieved[j] / PAGE] + text.values[head] + retrieved[j] % PAGE * s.nb_row;
            for (uint32_t i = 0; i < n_embd; i += W) {
                v_store(res + j * n_embd + i, decltype(rows)::load(row, i));
            }
        }
    });
}

// Prefetches retrieved rows, which are scattered in memory.
inline void fetch_retrieved(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * retrieved,
        uint32_t n) {
    for (uint32_t j = 0; j < n; ++j) {
        const char * row = text.pages[retrieved[j] / PAGE] + text.keys[head] + retrieved[j] % PAGE * s.nb_row;
        for (size_t i = 0; i < s.nb_row; i += 64) {
            __builtin_prefetch(row + i);
        }
    }
}

// Retrieves rows for queries of a KV head that search together. Returns their number.
//   group  {s, h, row, n}: stream, KV head, first query, number of queries
//   rows   output
//   lse    (r): log-sum-exp of the logits of the cells
template <typename GROUP, typename F>
uint32_t search_together(
        const llama_h2o_attention & a, const search_work & search, const GROUP & group, uint32_t * rows, F lse) {
    const auto & text     = *a.search->texts[group.s];
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t n_find = text.n_find(group.h, group.n / a.n_group());
    if (n_find == 0) {
        return 0;
    }

    for (uint32_t r = 0; r < group.n; ++r) {
        unmixed_query(*a.search, query(a, group.s, group.h, group.row + r), n_embd, search.queries + r * n_embd);
        search.lse[r] = lse(r);
    }

    candidates best { search.scores, rows, n_find, group.n };
    add_focus(text, group.h, best);
    search_pages(*a.search, text, search, n_embd, a.scale, group.h, { 0, text.n_pages }, best);

    return best.n;
}

} // namespace
