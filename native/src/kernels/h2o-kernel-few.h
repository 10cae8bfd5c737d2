// The kernel for few queries, such as during generation: parts are ranges of cells, for all heads.

#pragma once

#include "kernels/h2o-search-impl.h"

#include <cfloat>
#include <type_traits>

namespace {

// Splits a stream's cells up to the last unmasked one into parts. Each part has separate sums, so short texts have few parts.
// Their number is a multiple of four, which most numbers of threads divide evenly.
struct few_parts {
    static constexpr uint32_t MAX       = 16;
    static constexpr uint32_t MIN_CELLS = 192;

    static uint32_t number(uint32_t n_cells) {
        const uint32_t n = min_u32(MAX, n_cells / MIN_CELLS);

        return max_u32(1, n < 4 ? n / 2 * 2 : n / 4 * 4);
    }

    uint32_t n_cells = 0;
    uint32_t n       = 0;

    few_parts(const llama_h2o_attention & a, uint32_t s) {
        for (uint32_t row = 0; row < a.n_rows(); row += a.n_group()) {
            const uint16_t * mask = reinterpret_cast<const uint16_t *>(mask_of(a, s, row));

            uint32_t end = a.n_kv;
            while (end > n_cells && mask[end - 1] == F16_MINUS_INF) {
                --end;
            }
            n_cells = end;
        }
        n = number(n_cells);
    }

    // the cells of consecutive parts
    range cells(range parts) const {
        return { share_cells(n_cells, parts.begin, n).begin, share_cells(n_cells, parts.end, n).begin };
    }
};

// sizes of the work space
struct few_sizes {
    // retrieved rows of a head are split, so that all threads have work even with few heads
    static constexpr uint32_t N_RETRIEVED_PARTS = 2;
    static constexpr uint32_t MAX_ROWS          = llama_h2o_attention::MAX_FEW_ROWS;

    size_t n_pairs;
    uint32_t n_kv;
    size_t n_rows;
    size_t n_all; // rows of all pairs
    size_t n_embd;
    size_t n_slots;
    size_t n_find;
    size_t n_searching;
    size_t n_lists; // of candidates
    bool searches;

    few_sizes(const llama_h2o_attention & a, size_t n_rows) :
        n_pairs(a.n_pairs()), n_kv(a.n_kv), n_rows(n_rows), n_all(n_pairs * n_rows), n_embd(a.n_embd_head_v),
        n_slots(a.n_slots), n_find(a.search ? a.search->n_find : 0), n_searching(a.search ? search_work::size(a) : 0),
        n_lists(a.search ? n_pairs * n_slots : 0), searches(a.search) {}

    size_t n_parts() const { return N_RETRIEVED_PARTS + few_parts::number(n_kv); }
    size_t n_choices() const { return candidates::padded(n_slots * n_find); } // of all threads
    size_t n_padded() const { return (n_find + 15) / 16 * 16 + 16; }          // each part padded to vectors

    size_t size() const {
        const size_t lists = n_lists * (2 * candidates::room(n_find) + 1) +
                             (searches ? n_pairs * N_RETRIEVED_PARTS * n_choices() : 0);

        return n_all * (n_kv + n_parts() * n_embd + (searches ? n_padded() : 0)) + 2 * n_parts() * n_pairs * MAX_ROWS +
               lists + n_slots * n_searching;
    }
};

struct few_work : few_sizes {
    // parts of retrieved rows come first, then parts of cells
    float * exps; // [n_pairs][n_rows][n_kv]              exp(logit - top of the part)
    float * tops; // [n_parts][n_pairs][MAX_ROWS]         largest logit of the part
    float * sums; // [n_parts][n_pairs][MAX_ROWS]         sum of exps
    float * outs; // [n_parts][n_pairs][n_rows][n_embd_v] sum of exps * V

    float * scores;         // [n_pairs][n_slots][room]       candidates of a thread
    uint32_t * best;        // [n_pairs][n_slots][room]       the rows
    uint32_t * n_best;      // [n_pairs][n_slots]
    uint32_t * retrieved;   // [n_pairs][N_RETRIEVED_PARTS][n_choices()] the best of all
    float * retrieved_exps; // [n_pairs][n_rows][n_padded]
    float * searching;      // [n_slots] of search_work

    explicit few_work(const llama_h2o_attention & a) : few_sizes(a, a.n_rows()) {
        exps = a.work;
        tops = exps + n_all * n_kv;
        sums = tops + n_parts() * n_pairs * MAX_ROWS;
        outs = sums + n_parts() * n_pairs * MAX_ROWS;

        scores         = outs + n_all * n_parts() * n_embd;
        best           = reinterpret_cast<uint32_t *>(scores + n_lists * candidates::room(n_find));
        retrieved      = best + n_lists * candidates::room(n_find);
        n_best         = retrieved + (searches ? n_pairs * N_RETRIEVED_PARTS * n_choices() : 0);
        retrieved_exps = reinterpret_cast<float *>(n_best + n_lists);
        searching      = retrieved_exps + (searches ? n_all * n_padded() : 0);
    }

    float * exps_of(size_t pair, size_t row) const { return exps + (pair * n_rows + row) * n_kv; }
    float * tops_of(size_t part, size_t pair) const { return tops + (part * n_pairs + pair) * MAX_ROWS; }
    float * sums_of(size_t part, size_t pair) const { return sums + (part * n_pairs + pair) * MAX_ROWS; }
    float * out(size_t part, size_t pair, size_t row) const {
        return outs + ((part * n_pairs + pair) * n_rows + row) * n_embd;
    }

    size_t first_of(size_t pair, size_t slot) const { return (pair * n_slots + slot) * candidates::room(n_find); }
    uint32_t * retrieved_of(size_t pair, size_t part) const {
        return retrieved + (pair * N_RETRIEVED_PARTS + part) * n_choices();
    }
};

// Prefetches the rows of the next strip of cells, in memory order. The rows of a head are scattered, and every head returns to
// the same cells, so the processor cannot predict the accesses. Without this, rows in memory take over three times as long.
struct strip_ahead {
    const char * next;
    size_t size; // of the row of one head

    strip_ahead(const llama_h2o_attention::operand & x, uint32_t s, range strip) :
        next(x.data + s * x.nb_stream + strip.end * x.nb_row), size(x.nb_head) {}

    void fetch() {
        for (size_t i = 0; i < size; i += 64) {
            __builtin_prefetch(next + i);
        }
        next += size;
    }
};

// Calls fn(strip) for strips of cells that fit the L1 cache together with the next one. Strips are equal, because each prefetches
// as many rows as it has.
template <typename F>
void for_strips(const llama_h2o_attention::operand & x, range cells, F fn) {
    constexpr uint32_t SIZE = 12 * 1024;

    const uint32_t n_cells  = cells.end - cells.begin;
    const uint32_t max_size = max_u32(4, min_u32(TILE, uint32_t(SIZE / x.nb_row)) / 4 * 4);
    const uint32_t n        = max_u32(1, (n_cells + max_size - 1) / max_size);
    const uint32_t size     = max_u32(1, (n_cells + 4 * n - 1) / (4 * n)) * 4;
    for (uint32_t i = cells.begin; i < cells.end; i += size) {
        fn(range { i, min_u32(i + size, cells.end) });
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
        ahead = nullptr; // prefetch each row once
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

// Calls fn(h, row, n, strip, ahead) for all strips, heads and groups of queries; ahead is null if nothing is to be prefetched.
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

// Adds V, weighted by the exps of the queries.
template <typename T>
void few_mix(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t part) {
    for_strip_queries(a, a.v, s, cells, [&](uint32_t h, uint32_t row, auto n, range strip, strip_ahead * ahead) {
        const uint32_t pair = s * a.n_head_kv + h;

        mix_whole_rows<T, n>(w.exps_of(pair, row) + strip.begin, w.n_kv, rows_of(a.v, s, h, strip.begin), a.v.nb_row,
                strip.end - strip.begin, w.out(part, pair, row), w.n_embd, ahead);
    });
}

// Replaces products by exps. In short parts the sums over lanes dominate, so no step waits for one.
void few_exps(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t part) {
    const auto for_rows = [&](auto fn) {
        for (uint32_t pair = s * a.n_head_kv; pair < (s + 1) * a.n_head_kv; ++pair) {
            for (uint32_t row = 0; row < a.n_rows(); ++row) {
                fn(w.exps_of(pair, row), w.tops_of(part, pair)[row], w.sums_of(part, pair)[row], mask_of(a, s, row));
            }
        }
    };

    for_rows([&](float * x, float & top, float &, const char * mask) {
        vec tops = v_set(MINUS_INF);
        for (uint32_t j = cells.begin; j < cells.end; j += W) {
            const vec y = v_add_mask(v_mul(v_load(x + j), v_set(a.scale)), v_load_f16(mask + j * sizeof(ggml_fp16_t)));
            v_store(x + j, y);
            tops = v_max(tops, y);
        }
        top = v_top(tops);
    });
    for_rows([&](float * x, float & top, float & sum, const char *) {
        // if all cells of a part are masked, a shift of 0 keeps its exps at 0
        const vec shift = v_set(top == MINUS_INF ? 0.0f : top);

        vec sums = v_set(0.0f);
        for (uint32_t j = cells.begin; j < cells.end; j += W) {
            const vec y = v_exp(v_sub(v_load(x + j), shift));
            v_store(x + j, y);
            sums = v_add(sums, y);
        }
        sum = v_sum(sums);
    });
}

void few_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);

    for (uint32_t s = 0; s < a.n_stream; ++s) {
        const few_parts parts(a, s);
        const range mine     = share(parts.n, ith, nth);
        const auto for_parts = [&](auto fn) {
            for (uint32_t i = mine.begin; i < mine.end; ++i) {
                fn(parts.cells({ i, i + 1 }), few_work::N_RETRIEVED_PARTS + i);
            }
        };

        row_types::with(a.k.type, [&](auto rows) { few_products<decltype(rows)>(a, w, s, parts.cells(mine)); });

        for_parts([&](range cells, uint32_t part) {
            few_exps(a, w, s, cells, part);
            std::memset(w.out(part, s * a.n_head_kv, 0), 0, a.n_head_kv * w.n_rows * w.n_embd * sizeof(float));
        });

        row_types::with(a.v.type, [&](auto rows) {
            for_parts([&](range cells, uint32_t part) { few_mix<decltype(rows)>(a, w, s, cells, part); });
        });
    }
}

// Totals of W queries of a KV head, from `row` on, over some parts and the sink.
struct few_total {
    vec top;
    vec sum;

    few_total(const llama_h2o_attention & a, const few_work & w, uint32_t pair, uint32_t row, range parts) {
        float sinks[W];
        for (uint32_t i = 0; i < W; ++i) {
            sinks[i] = sink_of(a, pair % a.n_head_kv, row + i);
        }
        const vec sink = v_load(sinks);

        // if all cells are masked, tops are -inf, so no sum counts
        top = v_max(sink, v_set(-FLT_MAX));
        for (uint32_t t = parts.begin; t < parts.end; ++t) {
            top = v_max(top, v_load(w.tops_of(t, pair) + row));
        }
        sum = v_exp(v_sub(sink, top));
        for (uint32_t t = parts.begin; t < parts.end; ++t) {
            const vec exp = v_exp(v_sub(v_load(w.tops_of(t, pair) + row), top));
            sum           = v_fma(v_load(w.sums_of(t, pair) + row), exp, sum);
        }
    }
};

} // namespace
