// The kernel, written once for vectors of any width. Included by one source file per instruction set.

#pragma once

#include "h2o-kernel.h"
#include "h2o-simd.h"

namespace {

constexpr uint32_t W     = vec::n;
constexpr uint32_t TILE  = LLAMA_H2O_TILE;
constexpr uint32_t BLOCK = LLAMA_H2O_BLOCK;

// vectors that are accumulated side by side: as many as there are registers for
constexpr int SIDE_BY_SIDE = W == 8 ? 2 : 4;

constexpr float MINUS_INF = -INFINITY;

inline uint32_t min_u32(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}
inline uint32_t max_u32(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

//
// rows as they lie in the cache: load(row, i) has the elements from i on, i a multiple of W
//

struct rows_f32 {
    static vec load(const char * row, uint32_t i) { return v_load(reinterpret_cast<const float *>(row) + i); }
};

struct rows_f16 {
    static vec load(const char * row, uint32_t i) { return v_load_f16(row + i * sizeof(ggml_fp16_t)); }
};

inline float load_f16(const char * p) {
#if !defined(H2O_PORTABLE) && (defined(__AVX512F__) || defined(__AVX2__))
    uint16_t x;
    std::memcpy(&x, p, sizeof(x));
    return _cvtsh_ss(x);
#else
    ggml_fp16_t x;
    std::memcpy(&x, p, sizeof(x));
    return ggml_fp16_to_fp32(x);
#endif
}

// blocks of 32 elements: the scale, then the elements
struct rows_q8_0 {
    static vec load(const char * row, uint32_t i) {
        const char * block = row + i / 32 * (2 + 32);
        return v_mul(v_set(load_f16(block)), v_load_i8(block + 2 + i % 32));
    }
};

// likewise, elements i and i + 16 in one byte
struct rows_q4_0 {
    static vec load(const char * row, uint32_t i) {
        const char * block = row + i / 32 * (2 + 16);
        return v_mul(v_set(load_f16(block)), v_load_i4(block + 2 + i % 16, i % 32 >= 16));
    }
};

//
// where things lie
//

// the queries of a KV head, token by token, the heads of its group side by side
inline const float * query(const llama_h2o_attention & a, uint32_t s, uint32_t head_kv, uint32_t row) {
    const uint32_t token = row / a.n_group();
    const uint32_t head  = head_kv * a.n_group() + row % a.n_group();
    return reinterpret_cast<const float *>(a.q.data + s * a.q.nb_stream + head * a.q.nb_head + token * a.q.nb_row);
}

inline float * output(const llama_h2o_attention & a, uint32_t s, uint32_t head_kv, uint32_t row) {
    const uint32_t token = row / a.n_group();
    const uint32_t head  = head_kv * a.n_group() + row % a.n_group();
    return a.out + (size_t(s * a.n_tokens + token) * a.n_head + head) * a.n_embd_head_v;
}

inline const char * rows_of(const llama_h2o_attention::operand & x, uint32_t s, uint32_t head_kv, uint32_t cell) {
    return x.data + s * x.nb_stream + head_kv * x.nb_head + cell * x.nb_row;
}

inline const char * mask_of(const llama_h2o_attention & a, uint32_t s, uint32_t row) {
    return a.mask.data + s * a.mask.nb_stream + row / a.n_group() * a.mask.nb_row;
}

inline float * scores_of(const llama_h2o_attention & a, uint32_t s, uint32_t head_kv) {
    return reinterpret_cast<float *>(
            reinterpret_cast<char *>(a.scores) + s * a.nb_score_stream + head_kv * a.nb_score_head);
}

struct range {
    uint32_t begin;
    uint32_t end;
};

// the part of n things that belongs to one of the threads
inline range share(uint32_t n, uint32_t ith, uint32_t nth) {
    return { uint32_t(uint64_t(n) * ith / nth), uint32_t(uint64_t(n) * (ith + 1) / nth) };
}

//
// few queries, such as when generating: each thread takes a range of cells, of all heads
//

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

// Calls fn(row, n) for all queries of a KV head, n of them at a time.
template <typename F>
void for_query_groups(uint32_t n_rows, F fn) {
    constexpr uint32_t MOST = 4;

    for (uint32_t row = 0; row < n_rows; row += MOST) {
        fn(row, min_u32(MOST, n_rows - row));
    }
}

template <typename T>
void few_products_all(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells) {
    for_strips(a.k, cells, [&](range strip) {
        strip_ahead ahead(a.k, s, strip);
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            for_query_groups(a.n_rows(), [&](uint32_t row, uint32_t n) {
                strip_ahead * fetched = row == 0 ? &ahead : nullptr;
                switch (n) {
                    case 1:
                        few_products<T, 1>(a, w, s, h, row, strip, fetched);
                        break;
                    case 2:
                        few_products<T, 2>(a, w, s, h, row, strip, fetched);
                        break;
                    case 3:
                        few_products<T, 3>(a, w, s, h, row, strip, fetched);
                        break;
                    default:
                        few_products<T, 4>(a, w, s, h, row, strip, fetched);
                        break;
                }
            });
        }
    });
}

template <typename T>
void few_mix_all(const llama_h2o_attention & a, const few_work & w, uint32_t s, range cells, uint32_t slot) {
    for_strips(a.v, cells, [&](range strip) {
        strip_ahead ahead(a.v, s, strip);
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            for_query_groups(a.n_rows(), [&](uint32_t row, uint32_t n) {
                strip_ahead * fetched = row == 0 ? &ahead : nullptr;
                switch (n) {
                    case 1:
                        few_mix<T, 1>(a, w, s, h, row, strip, slot, fetched);
                        break;
                    case 2:
                        few_mix<T, 2>(a, w, s, h, row, strip, slot, fetched);
                        break;
                    case 3:
                        few_mix<T, 3>(a, w, s, h, row, strip, slot, fetched);
                        break;
                    default:
                        few_mix<T, 4>(a, w, s, h, row, strip, slot, fetched);
                        break;
                }
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
                const vec y = v_fma(v_load(x + j), v_set(a.scale), v_load_f16(mask + j * sizeof(ggml_fp16_t)));
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

// cells of a thread, in whole cache lines of scores
inline range few_cells(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    constexpr uint32_t LINE = 16;

    const range r = share(a.n_kv / LINE, ith, nth);
    return { r.begin * LINE, r.end * LINE };
}

void few_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const range cells = few_cells(a, ith, nth);

    for (size_t i = 0; i < w.n_all * w.n_embd; ++i) {
        w.out(ith, 0)[i] = 0.0f;
    }

    for (uint32_t s = 0; s < a.n_stream; ++s) {
        switch (a.k.type) {
            case GGML_TYPE_F16:
                few_products_all<rows_f16>(a, w, s, cells);
                break;
            case GGML_TYPE_Q8_0:
                few_products_all<rows_q8_0>(a, w, s, cells);
                break;
            case GGML_TYPE_Q4_0:
                few_products_all<rows_q4_0>(a, w, s, cells);
                break;
            default:
                few_products_all<rows_f32>(a, w, s, cells);
                break;
        }

        few_exps(a, w, s, cells, ith);

        switch (a.v.type) {
            case GGML_TYPE_F16:
                few_mix_all<rows_f16>(a, w, s, cells, ith);
                break;
            case GGML_TYPE_Q8_0:
                few_mix_all<rows_q8_0>(a, w, s, cells, ith);
                break;
            case GGML_TYPE_Q4_0:
                few_mix_all<rows_q4_0>(a, w, s, cells, ith);
                break;
            default:
                few_mix_all<rows_f32>(a, w, s, cells, ith);
                break;
        }
    }
}

// What the exps of a thread have to be multiplied with to become probabilities.
float few_factor(const few_work & w, size_t i, uint32_t slot, uint32_t nth) {
    float top = MINUS_INF;
    for (uint32_t t = 0; t < nth; ++t) {
        top = w.top(t, i) > top ? w.top(t, i) : top;
    }

    float sum = 0.0f;
    for (uint32_t t = 0; t < nth; ++t) {
        sum += w.sum(t, i) > 0.0f ? w.sum(t, i) * std::exp(w.top(t, i) - top) : 0.0f;
    }

    return w.sum(slot, i) > 0.0f ? std::exp(w.top(slot, i) - top) / sum : 0.0f;
}

void few_combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const few_work w(a);
    const range cells = few_cells(a, ith, nth);

    for (uint32_t s = 0; s < a.n_stream; ++s) {
        for (uint32_t h = 0; h < a.n_head_kv; ++h) {
            float * scores      = scores_of(a, s, h);
            const uint32_t pair = s * a.n_head_kv + h;

            for (uint32_t row = 0; row < w.n_rows; ++row) {
                const vec f     = v_set(few_factor(w, pair * w.n_rows + row, ith, nth) / a.n_group());
                const float * x = w.exps_of(pair, row);
                for (uint32_t j = cells.begin; j < cells.end; j += W) {
                    v_store(scores + j, v_fma(v_load(x + j), f, v_load(scores + j)));
                }
            }
        }
    }

    const range mine = share(w.n_all, ith, nth);
    for (uint32_t i = mine.begin; i < mine.end; ++i) {
        const uint32_t pair = i / w.n_rows;

        float * out = output(a, pair / a.n_head_kv, pair % a.n_head_kv, i % w.n_rows);
        for (uint32_t k = 0; k < w.n_embd; k += W) {
            v_store(out + k, v_set(0.0f));
        }
        for (uint32_t t = 0; t < nth; ++t) {
            const vec f = v_set(few_factor(w, i, t, nth));
            for (uint32_t k = 0; k < w.n_embd; k += W) {
                v_store(out + k, v_fma(v_load(w.out(t, i) + k), f, v_load(out + k)));
            }
        }
    }
}

//
// many queries, such as when reading a prompt: each thread takes some, of all cells. A block of queries
// lies side by side, one in each lane, so that its rows need no transposing and no sums across lanes
//

struct many_work {
    float * exps;   // [n_kv][BLOCK]                   exp(logit - top)
    float * q;      // [n_embd_k][BLOCK]               queries, scaled
    float * out;    // [n_embd_v][BLOCK]               sum of exps * V
    float * rows;   // [TILE][max(n_embd_k, n_embd_v)] K or V
    float * mask;   // [TILE][BLOCK]
    float * scores; // [n_pairs + n_slots][n_kv]       of all slots

    size_t n_kv;

    many_work(const llama_h2o_attention & a, uint32_t slot) : n_kv(a.n_kv) {
        const size_t n_embd = max_u32(a.n_embd_head_k, a.n_embd_head_v);
        const size_t n_slot = n_kv * BLOCK + (a.n_embd_head_k + a.n_embd_head_v) * BLOCK + n_embd * TILE + TILE * BLOCK;

        scores = a.work;
        exps   = scores + (a.n_pairs() + a.n_slots) * n_kv + slot * n_slot;
        q      = exps + n_kv * BLOCK;
        out    = q + a.n_embd_head_k * BLOCK;
        rows   = out + a.n_embd_head_v * BLOCK;
        mask   = rows + n_embd * TILE;
    }

    // no two threads have the same place, because a thread goes on with the pair where the last one ended
    float * scores_of(uint32_t pair, uint32_t slot) const { return scores + (pair + slot) * n_kv; }
};

// c[k][r] (+)= sum over i of a[k*step_k + i*step_i] * b[i][r], for NK rows and NR vectors of r; b and c have
// BLOCK columns.
template <int NK, int NR, bool ADD>
inline void outer(const float * a, size_t step_k, size_t step_i, const float * b, uint32_t n, float * c) {
    vec acc[NK][NR];
    for (int k = 0; k < NK; ++k) {
        for (int r = 0; r < NR; ++r) {
            acc[k][r] = ADD ? v_load(c + k * BLOCK + r * W) : v_set(0.0f);
        }
    }

    for (uint32_t i = 0; i < n; ++i) {
        vec x[NR];
        for (int r = 0; r < NR; ++r) {
            x[r] = v_load(b + i * BLOCK + r * W);
        }
        for (int k = 0; k < NK; ++k) {
            const vec y = v_set(a[k * step_k + i * step_i]);
            for (int r = 0; r < NR; ++r) {
                acc[k][r] = v_fma(y, x[r], acc[k][r]);
            }
        }
    }

    for (int k = 0; k < NK; ++k) {
        for (int r = 0; r < NR; ++r) {
            v_store(c + k * BLOCK + r * W, acc[k][r]);
        }
    }
}

// The same for n_k rows, a multiple of four, and n_r columns, a multiple of W.
template <bool ADD>
void product(const float * a,
        size_t step_k,
        size_t step_i,
        const float * b,
        uint32_t n,
        float * c,
        uint32_t n_k,
        uint32_t n_r) {
    uint32_t r = 0;
    for (; r + SIDE_BY_SIDE * W <= n_r; r += SIDE_BY_SIDE * W) {
        for (uint32_t k = 0; k < n_k; k += 4) {
            outer<4, SIDE_BY_SIDE, ADD>(a + k * step_k, step_k, step_i, b + r, n, c + k * BLOCK + r);
        }
    }
    for (; r < n_r; r += W) {
        for (uint32_t k = 0; k < n_k; k += 4) {
            outer<4, 1, ADD>(a + k * step_k, step_k, step_i, b + r, n, c + k * BLOCK + r);
        }
    }
}

template <typename T>
void read_rows(const char * rows, size_t nb_row, uint32_t n, float * res) {
    for (uint32_t j = 0; j < TILE; ++j) {
        for (uint32_t i = 0; i < n; i += W) {
            v_store(res + j * n + i, T::load(rows + j * nb_row, i));
        }
    }
}

// A tile of K or V as floats, [TILE][n].
void read_tile(const llama_h2o_attention::operand & x, uint32_t s, uint32_t h, uint32_t cell, uint32_t n, float * res) {
    const char * rows = rows_of(x, s, h, cell);
    switch (x.type) {
        case GGML_TYPE_F16:
            read_rows<rows_f16>(rows, x.nb_row, n, res);
            break;
        case GGML_TYPE_Q8_0:
            read_rows<rows_q8_0>(rows, x.nb_row, n, res);
            break;
        case GGML_TYPE_Q4_0:
            read_rows<rows_q4_0>(rows, x.nb_row, n, res);
            break;
        default:
            read_rows<rows_f32>(rows, x.nb_row, n, res);
            break;
    }
}

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
tile_mask look_at_mask(const llama_h2o_attention & a, const block & b, uint32_t cell) {
    constexpr uint16_t F16_MINUS_INF = 0xfc00;

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
            v_store(x + r, v_add(v_load(x + r), v_load(w.mask + j * BLOCK + r)));
        }
    }
}

void many_logits(const llama_h2o_attention & a, const many_work & w, const block & b, float * tops) {
    for (uint32_t r = 0; r < b.n_lanes(); ++r) {
        const float * q = query(a, b.s, b.h, b.row + min_u32(r, b.n - 1));
        for (uint32_t i = 0; i < a.n_embd_head_k; ++i) {
            w.q[i * BLOCK + r] = q[i] * a.scale;
        }
        tops[r] = MINUS_INF;
    }

    for (uint32_t cell = 0; cell < a.n_kv; cell += TILE) {
        float * x = w.exps + cell * BLOCK;

        const tile_mask mask = look_at_mask(a, b, cell);
        if (mask == tile_mask::all) {
            for (uint32_t i = 0; i < TILE * BLOCK; ++i) {
                x[i] = MINUS_INF;
            }
            continue;
        }

        read_tile(a.k, b.s, b.h, cell, a.n_embd_head_k, w.rows);
        product<false>(w.rows, a.n_embd_head_k, 1, w.q, a.n_embd_head_k, x, TILE, b.n_lanes());

        if (mask == tile_mask::some) {
            add_mask(a, w, b, cell);
        }

        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            vec top = v_load(tops + r);
            for (uint32_t j = 0; j < TILE; ++j) {
                top = v_max(top, v_load(x + j * BLOCK + r));
            }
            v_store(tops + r, top);
        }
    }
}

// Turns logits into exps in place, and mixes V.
void many_mix(const llama_h2o_attention & a, const many_work & w, const block & b, const float * tops, float * sums) {
    for (uint32_t i = 0; i < a.n_embd_head_v * BLOCK; ++i) {
        w.out[i] = 0.0f;
    }
    for (uint32_t r = 0; r < BLOCK; ++r) {
        sums[r] = 0.0f;
    }

    for (uint32_t cell = 0; cell < a.n_kv; cell += TILE) {
        float * x = w.exps + cell * BLOCK;

        bool is_zero = true;
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            const vec top = v_load(tops + r);

            vec sum = v_set(0.0f);
            for (uint32_t j = 0; j < TILE; ++j) {
                const vec y = v_exp(v_sub(v_load(x + j * BLOCK + r), top));
                v_store(x + j * BLOCK + r, y);
                sum = v_add(sum, y);
            }
            v_store(sums + r, v_add(v_load(sums + r), sum));
            is_zero = is_zero && v_top(sum) == 0.0f;
        }

        if (!is_zero) {
            read_tile(a.v, b.s, b.h, cell, a.n_embd_head_v, w.rows);
            product<true>(w.rows, 1, a.n_embd_head_v, x, TILE, w.out, a.n_embd_head_v, b.n_lanes());
        }
    }
}

void many_scores(const llama_h2o_attention & a, const many_work & w, const block & b, const float * sums, float * res) {
    float weights[BLOCK] = {};
    for (uint32_t r = 0; r < b.n; ++r) {
        weights[r] = 1.0f / (sums[r] * a.n_group());
    }

    for (uint32_t j = 0; j < a.n_kv; ++j) {
        vec sum = v_set(0.0f);
        for (uint32_t r = 0; r < b.n_lanes(); r += W) {
            sum = v_fma(v_load(w.exps + j * BLOCK + r), v_load(weights + r), sum);
        }
        res[j] += v_sum(sum);
    }
}

void many_output(const llama_h2o_attention & a, const many_work & w, const block & b, const float * sums) {
    for (uint32_t r = 0; r < b.n; ++r) {
        float * out = output(a, b.s, b.h, b.row + r);
        for (uint32_t i = 0; i < a.n_embd_head_v; ++i) {
            out[i] = w.out[i * BLOCK + r] / sums[r];
        }
    }
}

// Queries are dealt out W at a time; these are the groups of one pair.
inline uint32_t many_groups(const llama_h2o_attention & a) {
    return (a.n_rows() + W - 1) / W;
}

void many_attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const many_work w(a, ith);

    const uint32_t n_groups = many_groups(a);
    const range mine        = share(a.n_pairs() * n_groups, ith, nth);

    for (uint32_t g = mine.begin; g < mine.end;) {
        const uint32_t pair  = g / n_groups;
        const uint32_t first = g % n_groups;
        const uint32_t last  = min_u32(min_u32(first + BLOCK / W, n_groups), first + mine.end - g);

        const uint32_t row = first * W;
        const block b      = { pair / a.n_head_kv, pair % a.n_head_kv, row, min_u32(last * W, a.n_rows()) - row };

        float * scores = w.scores_of(pair, ith);
        if (g == mine.begin || first == 0) {
            for (uint32_t j = 0; j < a.n_kv; ++j) {
                scores[j] = 0.0f;
            }
        }

        float tops[BLOCK];
        float sums[BLOCK];
        many_logits(a, w, b, tops);
        many_mix(a, w, b, tops, sums);
        many_scores(a, w, b, sums, scores);
        many_output(a, w, b, sums);

        g += last - first;
    }
}

void many_combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    const many_work w(a, ith);
    const range cells = few_cells(a, ith, nth);

    const uint32_t n_groups = many_groups(a);

    for (uint32_t pair = 0; pair < a.n_pairs(); ++pair) {
        float * scores = scores_of(a, pair / a.n_head_kv, pair % a.n_head_kv);

        for (uint32_t t = 0; t < nth; ++t) {
            const range theirs = share(a.n_pairs() * n_groups, t, nth);
            if (theirs.begin >= (pair + 1) * n_groups || theirs.end <= pair * n_groups) {
                continue;
            }
            const float * part = w.scores_of(pair, t);
            for (uint32_t j = cells.begin; j < cells.end; j += W) {
                v_store(scores + j, v_add(v_load(scores + j), v_load(part + j)));
            }
        }
    }
}

//
// the kernel
//

void attend(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    nth = min_u32(nth, a.n_slots);
    if (ith < nth) {
        a.is_few() ? few_attend(a, ith, nth) : many_attend(a, ith, nth);
    }
}

void combine(const llama_h2o_attention & a, uint32_t ith, uint32_t nth) {
    nth = min_u32(nth, a.n_slots);
    if (ith < nth) {
        a.is_few() ? few_combine(a, ith, nth) : many_combine(a, ith, nth);
    }
}

} // namespace
