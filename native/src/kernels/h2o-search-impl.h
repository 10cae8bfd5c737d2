// Looking through codes, and attention to what was found, for vectors of any width.

#pragma once

#include "kernels/h2o-hadamard.h"
#include "kernels/h2o-kernel-rows.h"
#include "kernels/h2o-search.h"

#include <algorithm>
#include <cmath>

namespace {

constexpr uint32_t PAGE = LLAMA_H2O_PAGE;
constexpr uint32_t HALF = PAGE / 2;

// Values of a table: as many as let four of them be added in a byte.
constexpr float LEVELS     = 63.0f;
constexpr uint32_t AT_ONCE = 4; // tables that are added so

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

    // in whole vectors
    static constexpr size_t room(size_t n_find) { return (2 * n_find + 2 * PAGE + 15) / 16 * 16; }

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
        uint32_t k       = 0;
        for (uint32_t i = 0; i < n; ++i) {
            const bool equal  = scores[i] == least && n_equal > 0;
            const bool stays  = scores[i] > least || equal;
            scores[k]         = scores[i];
            rows[k]           = rows[i];
            n_equal          -= equal;
            k                += stays;
        }
        n = k;
    }

    // with room for a page
    void make_room() {
        if (n + PAGE > room(n_find)) {
            keep_best();
        }
    }

    void add(float score, uint32_t row) {
        scores[n] = score;
        rows[n++] = row;
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
    float * logits;   // [max_asking][PAGE] estimates, less lse
    uint8_t * tables; // [max_asking][n_groups][16]
    uint16_t * sums;  // [PAGE]
    float * scores;   // of candidates, of all threads
    float * keys;     // [TILE][n_embd] of found rows
    float * values;   // [TILE][n_embd_v]

    static size_t size(const llama_h2o_attention & a) {
        const size_t n_padded   = (a.n_embd_head_k + 15) / 16 * 16;
        const size_t max_asking = a.max_asking();
        return max_asking * (2 * n_padded + 3 + PAGE) + n_padded + PAGE / 2 +
               TILE * (n_padded + size_t(a.n_embd_head_v)) + n_scores(a);
    }

    static size_t n_scores(const llama_h2o_attention & a) {
        return std::max(candidates::room(a.search->n_find), size_t(a.n_slots) * a.search->n_find);
    }

    search_work(float * space, const llama_h2o_attention & a) {
        const size_t n_padded   = (a.n_embd_head_k + 15) / 16 * 16;
        const size_t max_asking = a.max_asking();

        queries = space;
        mixed   = queries + max_asking * n_padded;
        lse     = mixed + n_padded;
        steps   = lse + max_asking;
        offsets = steps + max_asking;
        logits  = offsets + max_asking;
        tables  = reinterpret_cast<uint8_t *>(
                logits + max_asking * PAGE); // n_groups*16 bytes: as many floats as n_padded
        sums   = reinterpret_cast<uint16_t *>(logits + max_asking * (PAGE + n_padded));
        keys   = logits + max_asking * (PAGE + n_padded) + PAGE / 2;
        values = keys + TILE * n_padded;
        scores = values + TILE * a.n_embd_head_v;
    }
};

// Turns a row on by the factors of a page.
inline void turn_row(const llama_h2o_search & s, const float * factors, float * row) {
    const uint32_t n    = s.n_turn_dims;
    const float * sines = factors + n;
    float * x           = row + s.first_turn;

    if (!s.turn_neox && n % W == 0) {
        for (uint32_t i = 0; i < n; i += W) {
            const vec a = v_load(x + i);
            v_store(x + i, v_fma(v_swap<1>(a), v_load(sines + i), v_mul(a, v_load(factors + i))));
        }
        return;
    }

    const uint32_t half = s.turn_neox ? n / 2 : 1; // from an element to its partner
    const uint32_t step = s.turn_neox ? 1 : 2;     // from pair to pair
    for (uint32_t k = 0; k < n / 2; ++k) {
        const uint32_t i = k * step;
        const uint32_t j = i + half;
        const float a    = x[i];
        const float b    = x[j];
        x[i]             = a * factors[i] + b * sines[i];
        x[j]             = b * factors[j] + a * sines[j];
    }
}

// A query as it was before it was mixed.
inline void unmixed_query(const llama_h2o_search & s, const float * query, uint32_t n_embd, float * res) {
    std::memcpy(res, query, n_embd * sizeof(float));
    if (s.n_query_mix > 0) {
        hadamard(res, n_embd, s.n_query_mix);
    }
}

inline const float * turn_of(const llama_h2o_search & s, const llama_h2o_search_text & text, uint32_t page) {
    return page < text.n_unturned ? nullptr : text.turns + size_t(page - text.n_unturned) * 2 * s.n_turn_dims;
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

// The sums of a query's tables over the groups, for the keys of a page.
#if !defined(H2O_PORTABLE) && defined(__AVX512BW__)

inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i one = _mm512_set1_epi16(255);

    __m512i even[2] = { _mm512_setzero_si512(), _mm512_setzero_si512() };
    __m512i odd[2]  = { _mm512_setzero_si512(), _mm512_setzero_si512() };
    for (uint32_t g = 0; g < n_groups; g += AT_ONCE) {
        __m512i a = _mm512_setzero_si512();
        __m512i b = _mm512_setzero_si512();
        for (uint32_t k = g; k < min_u32(g + AT_ONCE, n_groups); ++k) {
            const __m512i x = _mm512_loadu_si512(signs + k * HALF);
            const __m512i t =
                    _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i *>(tables + k * 16)));
            a = _mm512_add_epi8(a, _mm512_shuffle_epi8(t, _mm512_and_si512(x, low)));
            b = _mm512_add_epi8(b, _mm512_shuffle_epi8(t, _mm512_and_si512(_mm512_srli_epi16(x, 4), low)));
        }
        even[0] = _mm512_add_epi16(even[0], _mm512_and_si512(a, one));
        odd[0]  = _mm512_add_epi16(odd[0], _mm512_srli_epi16(a, 8));
        even[1] = _mm512_add_epi16(even[1], _mm512_and_si512(b, one));
        odd[1]  = _mm512_add_epi16(odd[1], _mm512_srli_epi16(b, 8));
    }
    for (uint32_t k = 0; k < 2; ++k) {
        const __m512i lo = _mm512_unpacklo_epi16(even[k], odd[k]);
        const __m512i hi = _mm512_unpackhi_epi16(even[k], odd[k]);

        auto * res = reinterpret_cast<__m128i *>(sums + k * HALF);
        _mm_storeu_si128(res + 0, _mm512_castsi512_si128(lo));
        _mm_storeu_si128(res + 1, _mm512_castsi512_si128(hi));
        _mm_storeu_si128(res + 2, _mm512_extracti32x4_epi32(lo, 1));
        _mm_storeu_si128(res + 3, _mm512_extracti32x4_epi32(hi, 1));
        _mm_storeu_si128(res + 4, _mm512_extracti32x4_epi32(lo, 2));
        _mm_storeu_si128(res + 5, _mm512_extracti32x4_epi32(hi, 2));
        _mm_storeu_si128(res + 6, _mm512_extracti32x4_epi32(lo, 3));
        _mm_storeu_si128(res + 7, _mm512_extracti32x4_epi32(hi, 3));
    }
}

#elif !defined(H2O_PORTABLE) && defined(__AVX2__)

inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
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

inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
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

inline void add_tables(const uint8_t * tables, const char * signs, uint32_t n_groups, uint16_t * sums) {
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

// q.c, with the centre of a page
inline float dot_centre(const float * q, const char * centre, uint32_t n_embd) {
    vec sum = v_set(0.0f);
    for (uint32_t i = 0; i < n_embd; i += W) {
        sum = v_fma(v_load(q + i), v_load_f16(centre + i * sizeof(ggml_fp16_t)), sum);
    }

    return v_sum(sum);
}

// Estimates of the logits of a page's keys for a query, less what resident rows have.
inline void estimate_logits(const llama_h2o_search & s,
        const search_work & w,
        const char * codes,
        uint32_t i,
        uint32_t n_embd,
        float scale,
        float * res) {
    const llama_h2o_code_layout layout { n_embd };

    add_tables(w.tables + size_t(i) * layout.n_groups() * 16, codes + layout.signs(), layout.n_groups(), w.sums);

    const float of_centre = dot_centre(w.queries + i * n_embd, codes + layout.centre(), n_embd) * scale;
    const vec constant    = v_set(s.cap > 0.0f ? of_centre : of_centre - w.lse[i]);
    const vec step        = v_set(w.steps[i] * scale);
    const vec offset      = v_set(-w.offsets[i] * scale);

    for (uint32_t j = 0; j < PAGE; j += W) {
        const vec k = v_load_f16(codes + layout.scales() + j * sizeof(ggml_fp16_t));
        v_store(res + j, v_fma(k, v_fma(v_load_u16(w.sums + j), step, offset), constant));
    }
    for (uint32_t j = 0; j < PAGE && s.cap > 0.0f; j += W) {
        const vec capped = v_mul(v_tanh(v_mul(v_load(res + j), v_set(1.0f / s.cap))), v_set(s.cap));
        v_store(res + j, v_sub(capped, v_set(w.lse[i])));
    }
}

// Adds the rows of a page that may be among the best. A row's score is the logit that the query which looks at it most is said to
// give it, beside what that query has among the resident rows.
inline void add_page(const search_work & w, const uint64_t * hidden, uint32_t first_row, candidates & best) {
    best.make_room();

    for (uint32_t j = 0; j < PAGE; j += W) {
        uint32_t bits = uint32_t(hidden[j / 64] >> j % 64) & ((1u << (W - 1) << 1) - 1);
        if (bits == 0) {
            continue;
        }

        vec top = v_load(w.logits + j);
        for (uint32_t i = 1; i < best.n_asking; ++i) {
            top = v_max(top, v_load(w.logits + i * PAGE + j));
        }

        float scores[W];
        v_store(scores, top);
        for (bits &= v_above(top, best.least); bits != 0; bits &= bits - 1) {
            const uint32_t k = uint32_t(__builtin_ctz(bits));
            best.add(scores[k], first_row + j + k);
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

        for (uint32_t i = 0; i < best.n_asking; ++i) {
            estimate_logits(s, w, codes, i, n_embd, scale, w.logits + i * PAGE);
        }
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
            const char * row    = text.pages[page] + text.keys[head] + found[j] % PAGE * s.nb_k;
            for (uint32_t i = 0; i < n_embd; i += W) {
                v_store(res + j * n_embd + i, decltype(rows)::load(row, i));
            }
            if (const float * turn = turn_of(s, text, page)) {
                turn_row(s, turn, res + j * n_embd);
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
            const char * row = text.pages[found[j] / PAGE] + text.values[head] + found[j] % PAGE * s.nb_v;
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
        const char * page = text.pages[found[j] / PAGE];
        const char * k    = page + text.keys[head] + found[j] % PAGE * s.nb_k;
        const char * v    = page + text.values[head] + found[j] % PAGE * s.nb_v;
        for (size_t i = 0; i < s.nb_k; i += 64) {
            __builtin_prefetch(k + i);
        }
        for (size_t i = 0; i < s.nb_v; i += 64) {
            __builtin_prefetch(v + i);
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
