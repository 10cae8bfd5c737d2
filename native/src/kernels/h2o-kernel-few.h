// The kernel for few queries, such as when generating: each thread takes a range of cells, of all heads.

#pragma once

#include "kernels/h2o-search-impl.h"

#include <type_traits>

namespace {

// how much of what there is
struct few_sizes {
    // found rows of a head are split, so that few heads are work for all threads
    static constexpr uint32_t N_FOUND_PARTS = 2;

    size_t n_pairs;
    size_t n_kv;
    size_t n_rows;
    size_t n_all; // rows of all pairs
    size_t n_embd;
    size_t n_slots;
    size_t n_find;
    size_t n_looking;
    size_t n_lists; // of what threads have found
    bool searches;

    few_sizes(const llama_h2o_attention & a, size_t n_rows) :
        n_pairs(a.n_pairs()), n_kv(a.n_kv), n_rows(n_rows), n_all(n_pairs * n_rows), n_embd(a.n_embd_head_v),
        n_slots(a.n_slots), n_find(a.search ? a.search->n_find : 0), n_looking(a.search ? search_work::size(a) : 0),
        n_lists(a.search ? n_pairs * n_slots : 0), searches(a.search) {}

    size_t n_parts() const { return n_slots + (n_looking > 0 ? N_FOUND_PARTS : 0); }
    size_t n_choices() const { return candidates::padded(n_slots * n_find); } // of all threads
    size_t n_padded() const { return (n_find + 15) / 16 * 16 + 16; }          // each part in whole vectors

    size_t size() const {
        const size_t lists =
                n_lists * (2 * candidates::room(n_find) + 1) + (searches ? n_pairs * N_FOUND_PARTS * n_choices() : 0);

        return n_all * (n_kv + n_parts() * (2 + n_embd) + (searches ? n_padded() : 0)) + lists + n_slots * n_looking;
    }
};

struct few_work : few_sizes {
    float * exps; // [n_pairs][n_rows][n_kv]              exp(logit - top of the thread)
    float * tops; // [n_parts][n_pairs][n_rows]           largest logit of the part
    float * sums; // [n_parts][n_pairs][n_rows]           sum of exps
    float * outs; // [n_parts][n_pairs][n_rows][n_embd_v] sum of exps * V

    float * scores;     // [n_pairs][n_slots][room]       of what a thread has found
    uint32_t * best;    // [n_pairs][n_slots][room]       the rows
    uint32_t * n_best;  // [n_pairs][n_slots]
    uint32_t * found;   // [n_pairs][N_FOUND_PARTS][n_choices()] the best of all
    float * found_exps; // [n_pairs][n_rows][n_padded]
    float * looking;    // [n_slots] of search_work

    explicit few_work(const llama_h2o_attention & a) : few_sizes(a, a.n_rows()) {
        exps = a.work;
        tops = exps + n_all * n_kv;
        sums = tops + n_all * n_parts();
        outs = sums + n_all * n_parts();

        scores     = outs + n_all * n_parts() * n_embd;
        best       = reinterpret_cast<uint32_t *>(scores + n_lists * candidates::room(n_find));
        found      = best + n_lists * candidates::room(n_find);
        n_best     = found + (searches ? n_pairs * N_FOUND_PARTS * n_choices() : 0);
        found_exps = reinterpret_cast<float *>(n_best + n_lists);
        looking    = found_exps + (searches ? n_all * n_padded() : 0);
    }

    float * exps_of(size_t pair, size_t row) const { return exps + (pair * n_rows + row) * n_kv; }
    float & top(size_t part, size_t i) const { return tops[part * n_all + i]; }
    float & sum(size_t part, size_t i) const { return sums[part * n_all + i]; }
    float * out(size_t part, size_t i) const { return outs + (part * n_all + i) * n_embd; }

    size_t first_of(size_t pair, size_t slot) const { return (pair * n_slots + slot) * candidates::room(n_find); }
    uint32_t * found_of(size_t pair, size_t part) const { return found + (pair * N_FOUND_PARTS + part) * n_choices(); }
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

// The same for all elements of the rows.
template <typename T, int NQ>
inline void mix_whole_rows(const float * p,
        size_t ld_p,
        const char * rows,
        size_t nb_row,
        uint32_t n_rows,
        float * out,
        uint32_t n_embd,
        strip_ahead * ahead) {
    uint32_t i = 0;
    for (; i + SIDE_BY_SIDE * W <= n_embd; i += SIDE_BY_SIDE * W) {
        mix_rows<T, NQ, SIDE_BY_SIDE>(p, ld_p, rows, nb_row, n_rows, i, out, n_embd, ahead);
        ahead = nullptr; // once for a row is enough
    }
    for (; i < n_embd; i += W) {
        mix_rows<T, NQ, 1>(p, ld_p, rows, nb_row, n_rows, i, out, n_embd, ahead);
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

// Calls fn(h, row, n, strip, ahead) for all strips, heads and groups of queries; ahead is null where it is not to be fetched.
template <typename F>
void for_strip_queries(
        const llama_h2o_attention & a, const llama_h2o_attention::operand & x, uint32_t s, range cells, F fn) {
    for_strips(x, cells, [&](range strip) {
        strip_ahead ahead(x, s, strip);
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            for_query_groups(
                    a.n_rows(), [&](uint32_t row, auto n) { fn(h, row, n, strip, row == 0 ? &ahead : nullptr); });
        }
    });
}

// Products of K and the queries.
template <typename T>
void few_products(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells) {
    for_strip_queries(a, a.k, s, cells, [&](uint32_t h, uint32_t row, auto n, range strip, strip_ahead * ahead) {
        const float * q[n];
        for (int iq = 0; iq < n; ++iq) {
            q[iq] = query(a, s, h, row + iq);
        }

        float * res = w.exps_of(s * a.n_head_kv + h, row);
        for (uint32_t j = strip.begin; j < strip.end; j += 4) {
            for (int k = 0; ahead && k < 4; ++k) {
                ahead->fetch();
            }
            dot_four<T, n>(q, rows_of(a.k, s, h, j), a.k.nb_row, a.n_embd_head_k, res + j, w.n_kv);
        }
    });
}

// Adds V, weighted with the exps of the queries.
template <typename T>
void few_mix(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t slot) {
    for_strip_queries(a, a.v, s, cells, [&](uint32_t h, uint32_t row, auto n, range strip, strip_ahead * ahead) {
        const uint32_t pair = s * a.n_head_kv + h;

        mix_whole_rows<T, n>(w.exps_of(pair, row) + strip.begin, w.n_kv, rows_of(a.v, s, h, strip.begin), a.v.nb_row,
                strip.end - strip.begin, w.out(slot, pair * w.n_rows + row), w.n_embd, ahead);
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

    std::memset(w.out(ith, 0), 0, w.n_all * w.n_embd * sizeof(float));

    for (uint32_t s = 0; s < a.n_stream; ++s) {
        const range cells = own_cells(a, s, ith, nth);

        row_types::with(a.k.type, [&](auto rows) { few_products<decltype(rows)>(a, w, s, cells); });

        few_exps(a, w, s, cells, ith);

        row_types::with(a.v.type, [&](auto rows) { few_mix<decltype(rows)>(a, w, s, cells, ith); });
    }
}

// A query over some of the parts.
struct few_total {
    float top = MINUS_INF;
    float sum = 0.0f;

    few_total(const few_work & w, size_t i, size_t n_parts) {
        for (uint32_t t = 0; t < n_parts; ++t) {
            top = w.top(t, i) > top ? w.top(t, i) : top;
        }
        for (uint32_t t = 0; t < n_parts; ++t) {
            sum += w.sum(t, i) == 0.0f ? 0.0f : w.sum(t, i) * std::exp(w.top(t, i) - top);
        }
    }

    // what the exps of a part have to be multiplied with to become probabilities
    float factor(const few_work & w, size_t i, size_t part) const {
        return w.sum(part, i) == 0.0f ? 0.0f : std::exp(w.top(part, i) - top) / sum;
    }
};

} // namespace
