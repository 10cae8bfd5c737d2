// Looking through codes, and attention to what was found, for vectors of any width.

#pragma once

#include "kernels/h2o-kernel-rows.h"
#include "kernels/h2o-search.h"
#include "kernels/h2o-turn-impl.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace {

constexpr uint32_t PAGE = LLAMA_H2O_PAGE;
constexpr uint32_t HALF = PAGE / 2;

constexpr uint32_t ALL_LANES = (1u << (W - 1) << 1) - 1;

// Values of a table: as many as let four of them be added in a byte.
constexpr float LEVELS     = 63.0f;
constexpr uint32_t AT_ONCE = 4; // tables that are added so

// Queries that look through a page together: as many as there are registers for their sums.
#if !defined(H2O_PORTABLE) && defined(__AVX512BW__)
constexpr int N_LOOK = 4;
#else
constexpr int N_LOOK = 1;
#endif
static_assert(N_LOOK <= 4, "see search_work");

// Floats in the order of whole numbers.
inline int32_t as_ordered(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));

    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

inline float from_ordered(int32_t bits) {
    bits = bits < 0 ? bits ^ 0x7fffffff : bits;

    float x;
    std::memcpy(&x, &bits, sizeof(x));

    return x;
}

// Rows that may be found, by their place among the pages and in this order, and how much they are looked at.
struct candidates {
    float * scores; // [room(n_find)]
    uint32_t * rows;
    uint32_t n_find;
    uint32_t n_asking;

    uint32_t n  = 0;
    float least = MINUS_INF; // a row has to have more than this to be one of the best

    // in whole vectors of any width
    static constexpr size_t padded(size_t n) { return (n + 15) / 16 * 16; }
    static constexpr size_t room(size_t n_find) { return padded(2 * n_find + 2 * PAGE + 16); }

    uint32_t count_above(float limit) const {
        uint32_t res = 0;
        uint32_t i   = 0;
        for (; i + W <= n; i += W) {
            res += uint32_t(__builtin_popcount(v_above(v_load(scores + i), limit)));
        }
        for (; i < n; ++i) {
            res += scores[i] > limit;
        }

        return res;
    }

    // Leaves the n_find best, of equal ones the first. Their worst score is found by halving: no branch depends on a score.
    void keep_best() {
        if (n <= n_find) {
            return;
        }

        int64_t low     = as_ordered(least);    // more than n_find are above
        int64_t high    = as_ordered(INFINITY); // no more than n_find are
        uint32_t n_high = 0;                    // as many
        while (high - low > 1 && n_high < n_find) {
            const int64_t mid      = low + (high - low) / 2;
            const uint32_t n_above = count_above(from_ordered(int32_t(mid)));
            if (n_above > n_find) {
                low = mid;
            } else {
                high   = mid;
                n_high = n_above;
            }
        }

        least            = from_ordered(int32_t(high));
        uint32_t n_equal = n_find - n_high; // of the worst score, that stay
        uint32_t n_all   = std::exchange(n, 0);
        for (uint32_t i = 0; i < n_all; i += W) {
            const vec x          = v_load(scores + i);
            const uint32_t lanes = n_all - i < W ? (1u << (n_all - i)) - 1 : ALL_LANES;

            uint32_t above = v_above(x, least) & lanes;
            uint32_t equal = ~(v_above(x, least) | v_above(v_sub(v_set(0.0f), x), -least)) & lanes;
            for (; equal != 0 && n_equal > 0; equal &= equal - 1, --n_equal) {
                above |= equal & -equal;
            }
            add(x, rows + i, above);
        }
    }

    // with room for a page
    void make_room() {
        if (n + PAGE + W > room(n_find)) {
            keep_best();
        }
    }

    // those of a vector that have a bit
    void add(vec x, const uint32_t * of, uint32_t bits) {
        v_store_some(scores + n, x, bits);
        v_store_some(reinterpret_cast<float *>(rows + n), v_load(reinterpret_cast<const float *>(of)), bits);
        n += uint32_t(__builtin_popcount(bits));
    }
};

// the signs of the four elements of a group, for each index of its table
constexpr float TABLE_SIGNS[4][16] = {
    { -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1 },
    { -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1 },
    { -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1 },
    { -1, -1, -1, -1, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1, 1 },
};

// What a thread needs to look.
struct search_work {
    float * queries;  // [max_asking][n_embd] unmixed
    float * mixed;    // [n_embd padded to a group]
    float * lse;      // [max_asking] of the logits of resident rows
    float * steps;    // [max_asking] of the tables
    float * offsets;  // [max_asking]
    float * tops;     // [PAGE] largest estimate of all queries, less lse
    uint8_t * tables; // [max_asking][n_groups][16]
    uint16_t * sums;  // [N_LOOK][PAGE]
    float * scores;   // of candidates, of all threads
    float * keys;     // [TILE][n_embd] of found rows
    float * values;   // [TILE][n_embd_v]

    // floats for the sums of as many queries as any kernel takes at a time: the size is the same for all
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
        tables  = reinterpret_cast<uint8_t *>(tops + PAGE); // n_groups*16 bytes: as many floats as n_padded
        keys    = tops + PAGE + max_asking * n_padded;
        values  = keys + TILE * n_padded;
        sums    = reinterpret_cast<uint16_t *>(values + TILE * a.n_embd_head_v);
        scores  = values + TILE * a.n_embd_head_v + N_SUMS;
    }
};

// A query as it was before it was mixed.
inline void unmixed_query(const llama_h2o_search & s, const float * query, uint32_t n_embd, float * res) {
    std::memcpy(res, query, n_embd * sizeof(float));
    if (s.n_query_mix > 0) {
        hadamard(res, n_embd, s.n_query_mix);
    }
}

inline const float * turn_of(const llama_h2o_search & s, const llama_h2o_search_text & text, uint32_t page) {
    return page < text.n_unturned ? nullptr : text.turns + size_t(page - text.n_unturned) * 2 * s.turning.n_dims;
}

// The tables of a query.
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

// The sums of the tables of N queries over the groups, for the keys of a page: [N][PAGE].
#if !defined(H2O_PORTABLE) && defined(__AVX512BW__)

// of the keys of a half, in their order
inline void store_sums(__m512i even, __m512i odd, uint16_t * sums) {
    const __m512i lo = _mm512_unpacklo_epi16(even, odd);
    const __m512i hi = _mm512_unpackhi_epi16(even, odd);

    // lanes of 16 bytes lie apart
    const __m512i first  = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    _mm512_storeu_si512(sums, _mm512_permutex2var_epi64(lo, first, hi));
    _mm512_storeu_si512(sums + 32, _mm512_permutex2var_epi64(lo, second, hi));
}

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i one = _mm512_set1_epi16(255);

    __m512i even[N][2];
    __m512i odd[N][2];
    for (int q = 0; q < N; ++q) {
        even[q][0] = even[q][1] = odd[q][0] = odd[q][1] = _mm512_setzero_si512();
    }
    for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
        __m512i a[N];
        __m512i b[N];
        for (int q = 0; q < N; ++q) {
            a[q] = b[q] = _mm512_setzero_si512();
        }
        for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
            const __m512i x = _mm512_loadu_si512(signs + k * HALF);
            const __m512i y = _mm512_and_si512(x, low);
            const __m512i z = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
            for (int q = 0; q < N; ++q) {
                const __m128i * table = reinterpret_cast<const __m128i *>(tables + (q * n_groups + k) * 16);
                const __m512i t       = _mm512_broadcast_i32x4(_mm_loadu_si128(table));

                a[q] = _mm512_add_epi8(a[q], _mm512_shuffle_epi8(t, y));
                b[q] = _mm512_add_epi8(b[q], _mm512_shuffle_epi8(t, z));
            }
        }
        for (int q = 0; q < N; ++q) {
            even[q][0] = _mm512_add_epi16(even[q][0], _mm512_and_si512(a[q], one));
            odd[q][0]  = _mm512_add_epi16(odd[q][0], _mm512_srli_epi16(a[q], 8));
            even[q][1] = _mm512_add_epi16(even[q][1], _mm512_and_si512(b[q], one));
            odd[q][1]  = _mm512_add_epi16(odd[q][1], _mm512_srli_epi16(b[q], 8));
        }
    }
    for (int q = 0; q < N; ++q) {
        store_sums(even[q][0], odd[q][0], sums + q * PAGE);
        store_sums(even[q][1], odd[q][1], sums + q * PAGE + HALF);
    }
}

#elif !defined(H2O_PORTABLE) && defined(__AVX2__)

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    const __m256i low = _mm256_set1_epi8(15);
    const __m256i one = _mm256_set1_epi16(255);

    // of 32 bytes at a time
    for (uint32_t first = 0; first < HALF; first += 32) {
        __m256i even[2] = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        __m256i odd[2]  = { _mm256_setzero_si256(), _mm256_setzero_si256() };
        for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
            __m256i a = _mm256_setzero_si256();
            __m256i b = _mm256_setzero_si256();
            for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
                const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(signs + k * HALF + first));
                const __m256i t = _mm256_broadcastsi128_si256(
                        _mm_loadu_si128(reinterpret_cast<const __m128i *>(tables + k * 16)));
                a = _mm256_add_epi8(a, _mm256_shuffle_epi8(t, _mm256_and_si256(x, low)));
                b = _mm256_add_epi8(b, _mm256_shuffle_epi8(t, _mm256_and_si256(_mm256_srli_epi16(x, 4), low)));
            }
            even[0] = _mm256_add_epi16(even[0], _mm256_and_si256(a, one));
            odd[0]  = _mm256_add_epi16(odd[0], _mm256_srli_epi16(a, 8));
            even[1] = _mm256_add_epi16(even[1], _mm256_and_si256(b, one));
            odd[1]  = _mm256_add_epi16(odd[1], _mm256_srli_epi16(b, 8));
        }
        for (uint32_t k = 0; k < 2; ++k) {
            const __m256i lo = _mm256_unpacklo_epi16(even[k], odd[k]);
            const __m256i hi = _mm256_unpackhi_epi16(even[k], odd[k]);

            auto * res = reinterpret_cast<__m128i *>(sums + k * HALF + first);
            _mm_storeu_si128(res + 0, _mm256_castsi256_si128(lo));
            _mm_storeu_si128(res + 1, _mm256_castsi256_si128(hi));
            _mm_storeu_si128(res + 2, _mm256_extracti128_si256(lo, 1));
            _mm_storeu_si128(res + 3, _mm256_extracti128_si256(hi, 1));
        }
    }
}

#elif !defined(H2O_PORTABLE) && defined(__ARM_NEON) && defined(__aarch64__)

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    // of 16 bytes at a time
    for (uint32_t first = 0; first < HALF; first += 16) {
        uint16x8_t total[4] = { vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0), vdupq_n_u16(0) };
        for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
            uint8x16_t a = vdupq_n_u8(0);
            uint8x16_t b = vdupq_n_u8(0);
            for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
                const uint8x16_t x = vld1q_u8(reinterpret_cast<const uint8_t *>(signs + k * HALF + first));
                const uint8x16_t t = vld1q_u8(tables + k * 16);
                a                  = vaddq_u8(a, vqtbl1q_u8(t, vandq_u8(x, vdupq_n_u8(15))));
                b                  = vaddq_u8(b, vqtbl1q_u8(t, vshrq_n_u8(x, 4)));
            }
            total[0] = vaddw_u8(total[0], vget_low_u8(a));
            total[1] = vaddw_u8(total[1], vget_high_u8(a));
            total[2] = vaddw_u8(total[2], vget_low_u8(b));
            total[3] = vaddw_u8(total[3], vget_high_u8(b));
        }
        vst1q_u16(sums + first, total[0]);
        vst1q_u16(sums + first + 8, total[1]);
        vst1q_u16(sums + HALF + first, total[2]);
        vst1q_u16(sums + HALF + first + 8, total[3]);
    }
}

#else

template <int N>
inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    static_assert(N == 1, "no registers for more");

    for (uint32_t j = 0; j < PAGE; ++j) {
        sums[j] = 0;
    }
    for (uint32_t g = 0; g < n_groups; ++g) {
        for (uint32_t j = 0; j < HALF; ++j) {
            const uint8_t x = uint8_t(signs[g * HALF + j]);
            sums[j]         = uint16_t(sums[j] + tables[g * 16 + (x & 15)]);
            sums[HALF + j]  = uint16_t(sums[HALF + j] + tables[g * 16 + (x >> 4)]);
        }
    }
}

#endif

// The centre of a page times N queries: four products.
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

// A row's score is the logit that the query which looks at it most is said to give it, beside what that query has among the
// resident rows. Raises the scores of a page's rows to those that N queries from i on give them.
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

// The scores of the rows of a page.
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
    for (; i + N_LOOK <= n_asking; i += N_LOOK) {
        raise_tops<N_LOOK>(s, w, codes, i, n_embd, scale);
    }
    if constexpr (N_LOOK > 1) {
        if (n_asking - i == 3) {
            raise_tops<3>(s, w, codes, i, n_embd, scale);
        } else if (n_asking - i == 2) {
            raise_tops<2>(s, w, codes, i, n_embd, scale);
        } else if (n_asking - i == 1) {
            raise_tops<1>(s, w, codes, i, n_embd, scale);
        }
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

// Looks through some pages of a head for what the queries that ask would attend to.
inline void search_pages(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        const search_work & w,
        uint32_t n_embd,
        float scale,
        uint32_t head,
        range pages,
        candidates & best) {
    const llama_h2o_code_layout layout { n_embd };

    for (uint32_t i = 0; i < best.n_asking && pages.begin < pages.end; ++i) {
        make_tables(w, i, n_embd);
    }
    for (uint32_t page = pages.begin; page < pages.end; ++page) {
        const char * codes = text.codes[head] + page * layout.size();
        for (size_t i = 0; i < layout.size() && page + 1 < pages.end; i += 64) {
            __builtin_prefetch(codes + layout.size() + i); // of the next one
        }

        const auto * hidden = reinterpret_cast<const uint64_t *>(codes + layout.hidden());
        if ((hidden[0] | hidden[1]) == 0) {
            continue;
        }

        score_page(s, w, codes, best.n_asking, n_embd, scale);
        add_page(w, hidden, page * PAGE, best);
    }
    best.keep_best();
}

// Reads keys of found rows as floats, turned on to where they count: [n][n_embd].
inline void read_found_keys(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * found,
        uint32_t n,
        uint32_t n_embd,
        float * res) {
    row_types::with(s.type, [&](auto rows) {
        for (uint32_t j = 0; j < n; ++j) {
            const uint32_t page = found[j] / PAGE;
            const char * row    = text.pages[page] + text.keys[head] + found[j] % PAGE * s.nb_row;
            for (uint32_t i = 0; i < n_embd; i += W) {
                v_store(res + j * n_embd + i, decltype(rows)::load(row, i));
            }
            if (const float * turn = turn_of(s, text, page)) {
                turn_row(s.turning, turn, res + j * n_embd);
            }
        }
    });
}

inline void read_found_values(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * found,
        uint32_t n,
        uint32_t n_embd,
        float * res) {
    row_types::with(s.type, [&](auto rows) {
        for (uint32_t j = 0; j < n; ++j) {
            const char * row = text.pages[found[j] / PAGE] + text.values[head] + found[j] % PAGE * s.nb_row;
            for (uint32_t i = 0; i < n_embd; i += W) {
                v_store(res + j * n_embd + i, decltype(rows)::load(row, i));
            }
        }
    });
}

// What lies apart in memory is there in time.
inline void fetch_found(const llama_h2o_search & s,
        const llama_h2o_search_text & text,
        uint32_t head,
        const uint32_t * found,
        uint32_t n) {
    for (uint32_t j = 0; j < n; ++j) {
        const char * row = text.pages[found[j] / PAGE] + text.keys[head] + found[j] % PAGE * s.nb_row;
        for (size_t i = 0; i < s.nb_row; i += 64) {
            __builtin_prefetch(row + i);
        }
    }
}

// The codes of the keys i0 <= i < i1 of a page.
void encode_page(const float * keys, uint32_t i0, uint32_t i1, uint32_t n_embd, char * codes, float * space) {
    const llama_h2o_code_layout layout { n_embd };

    std::memset(codes, 0, layout.size());
    if (i0 >= i1) {
        return;
    }

    auto * scales = reinterpret_cast<ggml_fp16_t *>(codes + layout.scales());
    auto * centre = reinterpret_cast<ggml_fp16_t *>(codes + layout.centre());
    auto * signs  = reinterpret_cast<uint8_t *>(codes + layout.signs());

    float * mean = space;
    float * row  = space + n_embd;
    for (uint32_t i = 0; i < n_embd; ++i) {
        double sum = 0.0;
        for (uint32_t j = i0; j < i1; ++j) {
            sum += keys[j * n_embd + i];
        }
        mean[i] = float(sum / (i1 - i0));
    }
    ggml_fp32_to_fp16_row(mean, centre, n_embd);
    ggml_fp16_to_fp32_row(centre, mean, n_embd);

    for (uint32_t j = i0; j < i1; ++j) {
        for (uint32_t i = 0; i < n_embd; ++i) {
            row[i] = keys[j * n_embd + i] - mean[i];
        }
        hadamard(row, n_embd, layout.n_mix());

        vec sum     = v_set(0.0f);
        vec squares = v_set(0.0f);
        for (uint32_t i = 0; i < n_embd; i += W) {
            const vec x = v_load(row + i);
            sum         = v_add(sum, v_max(x, v_sub(v_set(0.0f), x)));
            squares     = v_fma(x, x, squares);
        }
        const float all = v_sum(sum);
        scales[j]       = ggml_fp32_to_fp16(all > 0.0f ? v_sum(squares) / all : 0.0f);

        const uint32_t shift = j / HALF * 4;
        for (uint32_t i = 0; i < n_embd; i += 4) {
            uint32_t bits = 0;
            for (uint32_t k = 0; k < 4 && i + k < n_embd; ++k) {
                bits |= uint32_t(row[i + k] >= 0.0f) << k;
            }
            signs[size_t(i / 4) * HALF + j % HALF] |= uint8_t(bits << shift);
        }
    }
}

} // namespace
