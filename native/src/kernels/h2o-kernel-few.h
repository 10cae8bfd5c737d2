// The kernel for few queries, such as when generating: each thread takes a range of cells, of all heads, and the
// second step puts the parts together.

#pragma once

#include "kernels/h2o-kernel-rows.h"

#include <type_traits>

namespace {

struct few_work {
    float * exps; // [n_pairs][n_rows][n_kv]              exp(logit - top of the thread)
    float * tops; // [n_slots][n_pairs][n_rows]           largest logit of the thread
    float * sums; // [n_slots][n_pairs][n_rows]           sum of exps
    float * outs; // [n_slots][n_pairs][n_rows][n_embd_v] sum of exps * V

    size_t n_kv;
    size_t n_rows;
    size_t n_all; // rows of all pairs
    size_t n_embd;

    explicit few_work(const llama_h2o_attention & a) :
        n_kv(a.n_kv), n_rows(a.n_rows()), n_all(a.n_pairs() * n_rows), n_embd(a.n_embd_head_v) {
        exps = a.work;
        tops = exps + n_all * n_kv;
        sums = tops + n_all * a.n_slots;
        outs = sums + n_all * a.n_slots;
    }

    float * exps_of(size_t pair, size_t row) const { return exps + (pair * n_rows + row) * n_kv; }
    float & top(size_t slot, size_t i) const { return tops[slot * n_all + i]; }
    float & sum(size_t slot, size_t i) const { return sums[slot * n_all + i]; }
    float * out(size_t slot, size_t i) const { return outs + (slot * n_all + i) * n_embd; }
};

// The rows of a strip of cells, one strip ahead. A head's rows lie apart, and every head comes back to the same
// cells, so the processor cannot guess what is next. Asked for piece by piece, in the order of the memory, they are
// there in time: without this, rows in memory cost more than three times as much.
struct strip_ahead {
    const char * next;
    size_t size; // of a piece: the row of one head

    strip_ahead(const llama_h2o_attention::operand & x, uint32_t s, range strip) :
        next(x.data + s * x.nb_stream + strip.end * x.nb_row), size(x.nb_head) {}

    void fetch() {
        for (size_t i = 0; i < size; i += 64) {
            __builtin_prefetch(next + i);
        }
        next += size;
    }
};

// Calls fn(strip) for strips of cells that fit the L1 cache together with the next one.
template <typename F>
void for_strips(const llama_h2o_attention::operand & x, range cells, F fn) {
    constexpr uint32_t SIZE = 12 * 1024;

    const uint32_t n_cells = max_u32(4, min_u32(TILE, uint32_t(SIZE / x.nb_row)) / 4 * 4);
    for (uint32_t i = cells.begin; i < cells.end; i += n_cells) {
        fn(range { i, min_u32(i + n_cells, cells.end) });
    }
}

// Products of NQ queries and four rows: res[q][4].
template <typename T, int NQ>
inline void dot_four(const float * const * q, const char * rows, size_t nb_row, uint32_t n, float * res, size_t ld) {
    vec acc[NQ][4];
    for (int iq = 0; iq < NQ; ++iq) {
        for (int j = 0; j < 4; ++j) {
            acc[iq][j] = v_set(0.0f);
        }
    }

    for (uint32_t i = 0; i < n; i += W) {
        vec x[4];
        for (int j = 0; j < 4; ++j) {
            x[j] = T::load(rows + j * nb_row, i);
        }
        for (int iq = 0; iq < NQ; ++iq) {
            const vec y = v_load(q[iq] + i);
            for (int j = 0; j < 4; ++j) {
                acc[iq][j] = v_fma(x[j], y, acc[iq][j]);
            }
        }
    }

    for (int iq = 0; iq < NQ; ++iq) {
        v_store_sums(res + iq * ld, acc[iq][0], acc[iq][1], acc[iq][2], acc[iq][3]);
    }
}

// Adds p[q][j] * rows[j] to out[q], over n_rows rows j, for NV vectors from element i on.
template <typename T, int NQ, int NV>
inline void mix_rows(const float * p,
        size_t ld_p,
        const char * rows,
        size_t nb_row,
        uint32_t n_rows,
        uint32_t i,
        float * out,
        size_t ld_out,
        strip_ahead * ahead) {
    vec acc[NQ][NV];
    for (int iq = 0; iq < NQ; ++iq) {
        for (int k = 0; k < NV; ++k) {
            acc[iq][k] = v_load(out + iq * ld_out + i + k * W);
        }
    }

    for (uint32_t j = 0; j < n_rows; ++j) {
        if (ahead) {
            ahead->fetch();
        }
        vec x[NV];
        for (int k = 0; k < NV; ++k) {
            x[k] = T::load(rows + j * nb_row, i + k * W);
        }
        for (int iq = 0; iq < NQ; ++iq) {
            const vec y = v_set(p[iq * ld_p + j]);
            for (int k = 0; k < NV; ++k) {
                acc[iq][k] = v_fma(x[k], y, acc[iq][k]);
            }
        }
    }

    for (int iq = 0; iq < NQ; ++iq) {
        for (int k = 0; k < NV; ++k) {
            v_store(out + iq * ld_out + i + k * W, acc[iq][k]);
        }
    }
}

// Products of the K of a strip and NQ queries from `row` on.
template <typename T, int NQ>
void few_products(const llama_h2o_attention & a,
        const few_work & w,
        uint32_t s,
        uint32_t h,
        uint32_t row,
        range strip,
        strip_ahead * ahead) {
    const float * q[NQ];
    for (int iq = 0; iq < NQ; ++iq) {
        q[iq] = query(a, s, h, row + iq);
    }

    float * res = w.exps_of(s * a.n_head_kv + h, row);
    for (uint32_t j = strip.begin; j < strip.end; j += 4) {
        for (int k = 0; ahead && k < 4; ++k) {
            ahead->fetch();
        }
        dot_four<T, NQ>(q, rows_of(a.k, s, h, j), a.k.nb_row, a.n_embd_head_k, res + j, w.n_kv);
    }
}

// Adds the V of a strip, weighted with the exps of NQ queries.
template <typename T, int NQ>
void few_mix(const llama_h2o_attention & a,
        const few_work & w,
        uint32_t s,
        uint32_t h,
        uint32_t row,
        range strip,
        uint32_t slot,
        strip_ahead * ahead) {
    const uint32_t pair = s * a.n_head_kv + h;
    const uint32_t n    = strip.end - strip.begin;
    const char * rows   = rows_of(a.v, s, h, strip.begin);
    const float * p     = w.exps_of(pair, row) + strip.begin;
    float * out         = w.out(slot, pair * w.n_rows + row);

    uint32_t i = 0;
    for (; i + SIDE_BY_SIDE * W <= a.n_embd_head_v; i += SIDE_BY_SIDE * W) {
        mix_rows<T, NQ, SIDE_BY_SIDE>(p, w.n_kv, rows, a.v.nb_row, n, i, out, w.n_embd, ahead);
        ahead = nullptr; // once for a row is enough
    }
    for (; i < a.n_embd_head_v; i += W) {
        mix_rows<T, NQ, 1>(p, w.n_kv, rows, a.v.nb_row, n, i, out, w.n_embd, ahead);
        ahead = nullptr;
    }
}

// Calls fn(row, n) for all queries of a KV head, n of them at a time; n is a constant for the compiler.
template <typename F>
void for_query_groups(uint32_t n_rows, F fn) {
    for (uint32_t row = 0; row < n_rows; row += 4) {
        switch (n_rows - row) {
            case 1:
                fn(row, std::integral_constant<int, 1>());
                break;
            case 2:
                fn(row, std::integral_constant<int, 2>());
                break;
            case 3:
                fn(row, std::integral_constant<int, 3>());
                break;
            default:
                fn(row, std::integral_constant<int, 4>());
                break;
        }
    }
}

template <typename T>
void few_products_all(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells) {
    for_strips(a.k, cells, [&](range strip) {
        strip_ahead ahead(a.k, s, strip);
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            for_query_groups(a.n_rows(), [&](uint32_t row, auto n) {
                few_products<T, n>(a, w, s, h, row, strip, row == 0 ? &ahead : nullptr);
            });
        }
    });
}

template <typename T>
void few_mix_all(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t slot) {
    for_strips(a.v, cells, [&](range strip) {
        strip_ahead ahead(a.v, s, strip);
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            for_query_groups(a.n_rows(), [&](uint32_t row, auto n) {
                few_mix<T, n>(a, w, s, h, row, strip, slot, row == 0 ? &ahead : nullptr);
            });
        }
    });
}

// Turns products into exps, in place.
void few_exps(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t slot) {
    for (uint32_t h = 0; h < a.n_head_kv; ++h) {
        const uint32_t pair = s * a.n_head_kv + h;
        for (uint32_t row = 0; row < a.n_rows(); ++row) {
            float * x         = w.exps_of(pair, row);
            const char * mask = mask_of(a, s, row);

            vec top = v_set(MINUS_INF);
            for (uint32_t j = cells.begin; j < cells.end; j += W) {
                const vec y =
                        v_add_mask(v_mul(v_load(x + j), v_set(a.scale)), v_load_f16(mask + j * sizeof(ggml_fp16_t)));
                v_store(x + j, y);
                top = v_max(top, y);
            }

            // a thread may have no cell that is not masked; then 0 - minus infinity keeps its exps at 0
            const float top_all = v_top(top);
            const vec shift     = v_set(top_all == MINUS_INF ? 0.0f : top_all);

            vec sum = v_set(0.0f);
            for (uint32_t j = cells.begin; j < cells.end; j += W) {
                const vec y = v_exp(v_sub(v_load(x + j), shift));
                v_store(x + j, y);
                sum = v_add(sum, y);
            }

            w.top(slot, pair * w.n_rows + row) = top_all;
            w.sum(slot, pair * w.n_rows + row) = v_sum(sum);
        }
    }
}

// The cells of a thread: its part of those up to the last one that a query of the stream may see. The others are free.
range own_cells(const llama_h2o_attention & a, uint32_t s, uint32_t ith, uint32_t nth) {
    uint32_t n_cells = 0;
    for (uint32_t row = 0; row < a.n_rows(); row += a.n_group()) {
        const uint16_t * mask = reinterpret_cast<const uint16_t *>(mask_of(a, s, row));

        uint32_t n = a.n_kv;
        while (n > n_cells && mask[n - 1] == F16_MINUS_INF) {
            --n;
        }
        n_cells = n;
    }

    return share_cells(n_cells, ith, nth);
}

void few_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);

    for (size_t i = 0; i < w.n_all * w.n_embd; ++i) {
        w.out(ith, 0)[i] = 0.0f;
    }

    for (uint32_t s = 0; s < a.n_stream; ++s) {
        const range cells = own_cells(a, s, ith, nth);

        row_types::with(a.k.type, [&](auto rows) { few_products_all<decltype(rows)>(a, w, s, cells); });

        few_exps(a, w, s, cells, ith);

        row_types::with(a.v.type, [&](auto rows) { few_mix_all<decltype(rows)>(a, w, s, cells, ith); });
    }
}

// A query over the cells of all threads.
struct few_total {
    float top = MINUS_INF;
    float sum = 0.0f;

    few_total(const few_work & w, size_t i, uint32_t nth) {
        for (uint32_t t = 0; t < nth; ++t) {
            top = w.top(t, i) > top ? w.top(t, i) : top;
        }
        for (uint32_t t = 0; t < nth; ++t) {
            sum += w.sum(t, i) == 0.0f ? 0.0f : w.sum(t, i) * std::exp(w.top(t, i) - top);
        }
    }

    // what the exps of a thread have to be multiplied with to become probabilities
    float factor(const few_work & w, size_t i, uint32_t slot) const {
        return w.sum(slot, i) == 0.0f ? 0.0f : std::exp(w.top(slot, i) - top) / sum;
    }
};

// Adds the probabilities of a KV head's queries, or their squares, as means over the KV group.
template <bool SQUARED>
void few_collect(
        const llama_h2o_attention & a, const few_work & w, uint32_t pair, range cells, uint32_t ith, uint32_t nth) {
    float * sums = of_head(a, SQUARED ? a.squares : a.scores, pair / a.n_head_kv, pair % a.n_head_kv);

    for (uint32_t row = 0; row < w.n_rows; ++row) {
        const size_t i     = pair * w.n_rows + row;
        const float factor = few_total(w, i, nth).factor(w, i, ith);
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

        few_collect<false>(a, w, pair, cells, ith, nth);
        if (a.squares) {
            few_collect<true>(a, w, pair, cells, ith, nth);
        }
    }

    const range mine = share(w.n_all, ith, nth);
    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        const uint32_t pair = i / w.n_rows;

        float * out = output(a, pair / a.n_head_kv, pair % a.n_head_kv, i % w.n_rows);
        for (uint32_t k = 0; k < w.n_embd; k += W) {
            v_store(out + k, v_set(0.0f));
        }
        const few_total total(w, i, nth);
        for (uint32_t t = 0; t < nth; ++t) {
            const vec f = v_set(total.factor(w, i, t));
            for (uint32_t k = 0; k < w.n_embd; k += W) {
                v_store(out + k, v_fma(v_load(w.out(t, i) + k), f, v_load(out + k)));
            }
        }
    }
}

} // namespace
