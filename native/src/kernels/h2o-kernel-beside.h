// Found rows for those who attend to the cells in another way, and only know how much attention these have.

#pragma once

#include "kernels/h2o-search-impl.h"

namespace {

// Tokens that look together, of a KV head.
struct beside_group {
    uint32_t s;
    uint32_t h;
    uint32_t row; // first query
    uint32_t n;
};

struct beside_work {
    uint32_t * best; // [room]
    float * logits;  // [max_asking][n_find]
    float * looking; // of search_work

    static size_t size(const llama_h2o_attention & a) {
        return candidates::room(a.search->n_find) + size_t(a.max_asking()) * a.search->n_find + search_work::size(a);
    }

    beside_work(const llama_h2o_attention & a, uint32_t ith) {
        best    = reinterpret_cast<uint32_t *>(a.work + ith * size(a));
        logits  = reinterpret_cast<float *>(best + candidates::room(a.search->n_find));
        looking = logits + size_t(a.max_asking()) * a.search->n_find;
    }
};

inline float cap_logit(const llama_h2o_attention & a, float x) {
    const float cap = a.search->cap;

    return cap > 0.0f ? cap * std::tanh(x / cap) : x;
}

// the result of a query; what is left to the cells comes behind it
inline float * beside_output(const llama_h2o_attention & a, const beside_group & g, uint32_t r) {
    const uint32_t token = (g.row + r) / a.n_group();
    const uint32_t head  = g.h * a.n_group() + (g.row + r) % a.n_group();

    return a.out + (size_t(g.s * a.n_tokens + token) * a.n_head + head) * (a.n_embd_head_v + 1);
}

// Products of a query with found keys, [TILE][n_embd], four at a time; those behind the n-th mean nothing.
inline void beside_dots(const float * q, const float * keys, uint32_t n, uint32_t n_embd, float * res) {
    for (uint32_t j = 0; j < n; j += 4) {
        vec sums[4] = { v_set(0.0f), v_set(0.0f), v_set(0.0f), v_set(0.0f) };
        for (uint32_t i = 0; i < n_embd; i += W) {
            for (uint32_t k = 0; k < 4; ++k) {
                sums[k] = v_fma(v_load(q + i), v_load(keys + (j + k) * n_embd + i), sums[k]);
            }
        }
        v_store_sums(res + j, sums[0], sums[1], sums[2], sums[3]);
    }
}

// Adds N vectors of found values, [n][n_embd], each by its share.
template <uint32_t N>
inline void beside_mix(const float * values, const float * shares, uint32_t n, uint32_t n_embd, float * out) {
    vec sums[N];
    for (uint32_t k = 0; k < N; ++k) {
        sums[k] = v_load(out + k * W);
    }
    for (uint32_t j = 0; j < n; ++j) {
        for (uint32_t k = 0; k < N; ++k) {
            sums[k] = v_fma(v_load(values + j * n_embd + k * W), v_set(shares[j]), sums[k]);
        }
    }
    for (uint32_t k = 0; k < N; ++k) {
        v_store(out + k * W, sums[k]);
    }
}

uint32_t beside_look(
        const llama_h2o_attention & a, const beside_work & w, const search_work & look, const beside_group & g) {
    const auto & text     = *a.search->texts[g.s];
    const uint32_t n_embd = a.n_embd_head_k;
    const uint32_t n_find = text.n_find(g.h, g.n / a.n_group());
    if (n_find == 0) {
        return 0;
    }

    for (uint32_t r = 0; r < g.n; ++r) {
        unmixed_query(*a.search, query(a, g.s, g.h, g.row + r), n_embd, look.queries + r * n_embd);

        const uint32_t head = g.h * a.n_group() + (g.row + r) % a.n_group();
        look.lse[r]         = a.lse[size_t(g.s * a.n_head + head) * a.n_tokens + (g.row + r) / a.n_group()];
    }

    candidates best { look.scores, w.best, n_find, g.n };
    add_focus(text, g.h, best);
    search_pages(*a.search, text, look, n_embd, a.scale, g.h, { 0, text.n_pages }, best);

    return best.n;
}

void beside_group_of(const llama_h2o_attention & a, const beside_work & w, const beside_group & g, uint32_t ith) {
    const search_work look(w.looking, a);

    const auto & text       = *a.search->texts[g.s];
    const uint32_t n_embd   = a.n_embd_head_k;
    const uint32_t n_embd_v = a.n_embd_head_v;
    const uint32_t n_find   = a.search->n_find;
    const uint32_t n_found  = beside_look(a, w, look, g);

    for (uint32_t first = 0; first < n_found; first += TILE) {
        const uint32_t n = min_u32(TILE, n_found - first);
        read_found_keys(*a.search, text, g.h, w.best + first, n, n_embd, look.keys);
        for (uint32_t r = 0; r < g.n; ++r) {
            float * q = look.queries;
            unmixed_query(*a.search, query(a, g.s, g.h, g.row + r), n_embd, q);
            float x[TILE];
            beside_dots(q, look.keys, n, n_embd, x);
            for (uint32_t j = 0; j < n; ++j) {
                w.logits[size_t(r) * n_find + first + j] = cap_logit(a, x[j] * a.scale);
            }
        }
    }

    // shares of the found rows
    for (uint32_t r = 0; r < g.n; ++r) {
        float * x       = w.logits + size_t(r) * n_find;
        float * out     = beside_output(a, g, r);
        const float lse = n_found > 0 ? look.lse[r] : 0.0f;

        float top = lse;
        for (uint32_t j = 0; j < n_found; ++j) {
            top = x[j] > top ? x[j] : top;
        }
        float sum = std::exp(lse - top);
        for (uint32_t j = 0; j < n_found; ++j) {
            x[j]  = std::exp(x[j] - top);
            sum  += x[j];
        }
        for (uint32_t j = 0; j < n_found; ++j) {
            x[j] /= sum;
        }
        for (uint32_t i = 0; i < n_embd_v; ++i) {
            out[i] = 0.0f;
        }
        out[n_embd_v] = std::exp(lse - top) / sum;
    }

    // threads have their sums side by side in memory, so each is written to as seldom as can be
    float of_all = 0.0f;
    for (uint32_t j = 0; j < n_found; ++j) {
        float squares = 0.0f;
        for (uint32_t r = 0; r < g.n; ++r) {
            const float share  = w.logits[size_t(r) * n_find + j];
            squares           += share * share;
            of_all            += share;
        }
        text.note(ith, a.n_head_kv, g.h, w.best[j], squares);
    }
    text.note_share(ith, of_all);

    for (uint32_t first = 0; first < n_found; first += TILE) {
        const uint32_t n = min_u32(TILE, n_found - first);
        read_found_values(*a.search, text, g.h, w.best + first, n, n_embd_v, look.values);
        for (uint32_t r = 0; r < g.n; ++r) {
            float * out          = beside_output(a, g, r);
            const float * shares = w.logits + size_t(r) * n_find + first;

            uint32_t i = 0;
            for (; i + 4 * W <= n_embd_v; i += 4 * W) {
                beside_mix<4>(look.values + i, shares, n, n_embd_v, out + i);
            }
            for (; i < n_embd_v; i += W) {
                beside_mix<1>(look.values + i, shares, n, n_embd_v, out + i);
            }
        }
    }
}

void beside_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const beside_work w(a, ith);

    const uint32_t size     = a.is_few() ? a.n_rows() : a.n_together() * a.n_group();
    const uint32_t n_groups = (a.n_rows() + size - 1) / size;
    const range mine        = share(a.n_pairs() * n_groups, ith, nth);

    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        const uint32_t pair = i / n_groups;
        const uint32_t row  = i % n_groups * size;

        beside_group_of(a, w, { pair / a.n_head_kv, pair % a.n_head_kv, row, min_u32(size, a.n_rows() - row) }, ith);
    }
}

} // namespace
