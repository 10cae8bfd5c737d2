// Attention to retrieved rows if another op attends to the cells and passes the log-sum-exp of their logits.

#pragma once

#include "kernels/h2o-kernel-few.h"

namespace {

// Queries of a KV head that search together.
struct alongside_group {
    uint32_t s;
    uint32_t h;
    uint32_t row; // first query
    uint32_t n;
};

struct alongside_work {
    uint32_t * best;   // [room]
    float * logits;    // [max_asking][n_find]
    float * searching; // of search_work

    static size_t size(const llama_h2o_attention & a) {
        return candidates::room(a.search->n_find) + size_t(a.max_asking()) * a.search->n_find + search_work::size(a);
    }

    alongside_work(const llama_h2o_attention & a, uint32_t ith) {
        best      = reinterpret_cast<uint32_t *>(a.work + ith * size(a));
        logits    = reinterpret_cast<float *>(best + candidates::room(a.search->n_find));
        searching = logits + size_t(a.max_asking()) * a.search->n_find;
    }
};

inline float cap_logit(const llama_h2o_attention & a, float x) {
    const float cap = a.search->cap;

    return cap > 0.0f ? cap * std::tanh(x / cap) : x;
}

// the result of a query, followed by the share of attention left to the cells
inline float * alongside_output(const llama_h2o_attention & a, const alongside_group & g, uint32_t r) {
    const uint32_t token = (g.row + r) / a.n_group();
    const uint32_t head  = g.h * a.n_group() + (g.row + r) % a.n_group();

    return a.out + (size_t(g.s * a.n_tokens + token) * a.n_head + head) * (a.n_embd_head_v + 1);
}

uint32_t alongside_search(const llama_h2o_attention & a,
        const alongside_work & w,
        const search_work & search,
        const alongside_group & g) {
    return search_together(a, search, g, w.best, [&](uint32_t r) {
        const uint32_t head = g.h * a.n_group() + (g.row + r) % a.n_group();

        return a.lse[size_t(g.s * a.n_head + head) * a.n_tokens + (g.row + r) / a.n_group()];
    });
}

void alongside_group_of(
        const llama_h2o_attention & a, const alongside_work & w, const alongside_group & g, uint32_t ith) {
    const search_work search(w.searching, a);

    const auto & text          = *a.search->texts[g.s];
    const uint32_t n_embd      = a.n_embd_head_k;
    const uint32_t n_embd_v    = a.n_embd_head_v;
    const uint32_t n_find      = a.search->n_find;
    const uint32_t n_retrieved = alongside_search(a, w, search, g);

    for (uint32_t first = 0; first < n_retrieved; first += TILE) {
        const uint32_t n = min_u32(TILE, n_retrieved - first);
        read_retrieved_keys(*a.search, text, g.h, w.best + first, n, n_embd, search.keys);
        for (uint32_t r = 0; r < g.n; ++r) {
            const float * q = search.queries;
            unmixed_query(*a.search, query(a, g.s, g.h, g.row + r), n_embd, search.queries);
            float x[TILE]; // undefined from element n on
            for (uint32_t j = 0; j < n; j += 4) {
                dot_four<rows_f32, 1>(&q, reinterpret_cast<const char *>(search.keys + j * n_embd),
                        n_embd * sizeof(float), n_embd, x + j, 0);
            }
            for (uint32_t j = 0; j < n; ++j) {
                w.logits[size_t(r) * n_find + first + j] = cap_logit(a, x[j] * a.scale);
            }
        }
    }

    // probabilities of the retrieved rows
    for (uint32_t r = 0; r < g.n; ++r) {
        float * x       = w.logits + size_t(r) * n_find;
        float * out     = alongside_output(a, g, r);
        const float lse = n_retrieved > 0 ? search.lse[r] : 0.0f;

        float top = lse;
        for (uint32_t j = 0; j < n_retrieved; ++j) {
            top = x[j] > top ? x[j] : top;
        }
        float sum = std::exp(lse - top);
        for (uint32_t j = 0; j < n_retrieved; ++j) {
            x[j]  = std::exp(x[j] - top);
            sum  += x[j];
        }
        for (uint32_t j = 0; j < n_retrieved; ++j) {
            x[j] /= sum;
        }
        for (uint32_t i = 0; i < n_embd_v; ++i) {
            out[i] = 0.0f;
        }
        out[n_embd_v] = std::exp(lse - top) / sum;
    }

    // the sums of all threads are adjacent in memory (false sharing), so each is written rarely
    float of_all = 0.0f;
    for (uint32_t j = 0; j < n_retrieved; ++j) {
        float squares = 0.0f;
        for (uint32_t r = 0; r < g.n; ++r) {
            const float share  = w.logits[size_t(r) * n_find + j];
            squares           += share * share;
            of_all            += share;
        }
        text.note(ith, a.n_head_kv, g.h, w.best[j], squares);
    }
    text.note_share(ith, of_all);

    for (uint32_t first = 0; first < n_retrieved; first += TILE) {
        const uint32_t n = min_u32(TILE, n_retrieved - first);
        read_retrieved_values(*a.search, text, g.h, w.best + first, n, n_embd_v, search.values);
        for (uint32_t r = 0; r < g.n; ++r) {
            mix_whole_rows<rows_f32, 1>(w.logits + size_t(r) * n_find + first, 0,
                    reinterpret_cast<const char *>(search.values), n_embd_v * sizeof(float), n,
                    alongside_output(a, g, r), n_embd_v, nullptr);
        }
    }
}

void alongside_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const alongside_work w(a, ith);

    const uint32_t size     = a.is_few() ? a.n_rows() : a.n_together() * a.n_group();
    const uint32_t n_groups = (a.n_rows() + size - 1) / size;
    const range mine        = share(a.n_pairs() * n_groups, ith, nth);

    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        const uint32_t pair = i / n_groups;
        const uint32_t row  = i % n_groups * size;

        alongside_group_of(a, w, { pair / a.n_head_kv, pair % a.n_head_kv, row, min_u32(size, a.n_rows() - row) }, ith);
    }
}

} // namespace
