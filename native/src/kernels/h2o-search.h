// Rows beside the cells: which of the archived keys of a KV head its queries would attend to most. The queries of every
// token look for them, as far as a bit an element says; attention to those that are found is exact.
//
// The code of a key k, turned to where it counts, is the signs of r = H(k - c), where c is the mean key of its page and H the
// Hadamard transform, and the scale
// |r|^2 / sum|r|. With it a query q has the logit q.c + scale * (Hq . signs), give or take: the estimate of RaBitQ (Gao and
// Long, SIGMOD 2024), with that transform for its random rotation. Of four elements' signs there are sixteen kinds, so a table
// that is made once for a query gives four elements at a time, for a vector of keys (the fast scan of André,
// Kermarrec and Le Scouarnec, VLDB 2015).

#pragma once

#include "kernels/h2o-rotation.h"

#include "ggml.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

// keys of a page of the archive
constexpr uint32_t LLAMA_H2O_PAGE = 128;

// keys of a passage: pages are whole passages
constexpr uint32_t LLAMA_H2O_PASSAGE = 32;

// How the codes of a page lie, of one KV head with keys of n_embd elements: in one piece.
struct llama_h2o_code_layout {
    uint32_t n_embd;

    // elements of a row that are mixed at a time: the largest power of two that divides them
    constexpr uint32_t n_mix() const { return n_embd & (~n_embd + 1); }
    // of four elements
    constexpr uint32_t n_groups() const { return (n_embd + 3) / 4; }

    // [n_groups][PAGE/2] the signs of a group, 1 for what is not negative: those of key j in the low half of byte j, those of
    // key j + PAGE/2 in the high one
    static constexpr size_t signs() { return 0; }
    // F16 [PAGE], 0 where there is no key
    constexpr size_t scales() const { return size_t(n_groups()) * LLAMA_H2O_PAGE / 2; }
    // F16 [n_embd]
    constexpr size_t centre() const { return scales() + LLAMA_H2O_PAGE * sizeof(uint16_t); }

    constexpr size_t size() const { return (centre() + n_embd * sizeof(uint16_t) + 63) / 64 * 64; }
};

// What the queries of a text look at. Pages count from its first one.
struct llama_h2o_search_text {
    uint32_t n_pages;
    const char * const * pages; // [n_pages] of the archive

    // [n_head_kv] codes of the head's pages, one after the other; null where the head does not look
    const char * const * codes;
    // [n_head_kv] of each of the head's pages PAGE/64 numbers: a bit for every row that the head does not hold itself
    const uint64_t * const * hidden;
    // [n_head_kv] where the rows of a head begin in a page, K and V side by side
    const uint64_t * keys;
    const uint64_t * values;

    // Keys of a page count as if they were turned on to its place in the text, by these factors. Pages before n_unrotated
    // stay as they are.
    uint32_t n_unrotated;
    const float * factors; // [n_pages - n_unrotated][2][n_dims]

    // [n_head_kv] rows that a head finds at most: for a token alone, and for tokens that look together
    const uint32_t * n_alone;
    const uint32_t * n_together;

    // The passage that all heads read whole, those that look and the others: its first row; NO_FOCUS: there is none.
    static constexpr uint32_t NO_FOCUS = UINT32_MAX;
    uint32_t focus;

    // How much rows were looked at: squared shares of attention, by row, by KV head and, of heads that look, by passage, and
    // all shares. All of them are sums over query heads, in whole 2^-32: doubles add those up exactly, in whatever order
    // threads come.
    double * const * weights;  // [n_slots][n_pages*PAGE]
    double * gains;            // [n_slots][n_head_kv]
    double * const * interest; // [n_slots][n_pages*PAGE/PASSAGE]
    double * shares;           // [n_slots]

    // the hidden rows in focus: a bit each
    uint32_t in_focus(uint32_t head) const {
        return focus == NO_FOCUS ? 0 : uint32_t(hidden[head][focus / 64] >> focus % 64);
    }

    uint32_t n_focus(uint32_t head) const { return uint32_t(__builtin_popcount(in_focus(head))); }

    uint32_t n_search(uint32_t head, uint32_t n_tokens) const {
        const uint64_t n = uint64_t(n_tokens) * n_alone[head];

        return n < n_together[head] ? uint32_t(n) : n_together[head];
    }

    uint32_t n_find(uint32_t head, uint32_t n_tokens) const { return n_search(head, n_tokens) + n_focus(head); }

    static double whole(float x) { return std::trunc(x * 4294967296.0) / 4294967296.0; }

    void note_share(uint32_t ith, float x) const { shares[ith] += whole(x); }

    // Notes what queries of a head gave to a row: squared shares.
    void note(uint32_t ith, uint32_t n_head_kv, uint32_t head, uint32_t row, float x) const {
        const double squares = whole(x);

        weights[ith][row]             += squares;
        gains[ith * n_head_kv + head] += squares;
        if (codes[head]) {
            interest[ith][row / LLAMA_H2O_PASSAGE] += squares;
        }
    }
};

// The same, of one layer, where a device reads it. What was looked at are whole numbers there, of 2^-32 each: their sums do not
// depend on an order.
struct llama_h2o_device_text {
    struct head {
        int32_t codes; // place among the heads that look; -1: it does not
        uint32_t n_alone;
        uint32_t n_together;
        uint64_t keys;
        uint64_t values;
    };

    uint32_t n_pages;
    uint32_t n_unrotated;
    uint32_t focus;
    uint32_t first_slot; // codes of a page lie in a ring of max_pages
    uint32_t max_pages;

    const char * const * pages; // [n_pages] on the host

    // Rows of the heads that look, of the newest pages, in the memory of the device as well: of pages from first_near on, in a
    // ring of n_near.
    uint32_t first_near;
    uint32_t near_slot; // of page 0
    uint32_t n_near;
    uint64_t nb_near;  // of a page
    const char * near; // [n_near][looking heads][PAGE], K and V side by side

    const char * codes;      // [looking heads][max_pages]
    const uint64_t * hidden; // [n_head_kv][n_pages*PAGE/64]
    const float * factors;   // [n_pages - n_unrotated][2][n_dims]
    const head * heads;      // [n_head_kv]

    unsigned long long * shares;   // [1]
    unsigned long long * gains;    // [n_head_kv]
    unsigned long long * interest; // [n_pages*PAGE/PASSAGE]
    unsigned long long * weights;  // [n_pages*PAGE]

    // Scores of rows have these first bits in common: zero between two searches.
    static constexpr uint32_t N_COUNTS = 2048;

    // work space of a search by a head that looks, for as many groups of queries that ask together
    uint32_t max_groups;
    uint32_t * scores; // [looking heads][max_groups][max_pages*PAGE]
    uint32_t * counts; // [looking heads][max_groups][N_COUNTS]
};

// What the queries of a layer look for.
struct llama_h2o_search {
    uint32_t n_find; // rows that any KV head finds at most

    ggml_type type; // of archived rows: F32, F16, Q8_0 or Q4_0
    size_t nb_row;  // from token to token

    llama_h2o_rotation rotation; // of keys; of no elements where they are not turned

    // Queries, unlike archived keys, are mixed by a Hadamard matrix in blocks of so many elements; 0: they are not.
    uint32_t n_query_mix;

    float cap; // soft cap of the logits; 0: none

    const llama_h2o_search_text * const * texts; // [n_stream]

    // [n_stream], so many apart, in the memory of the layer's device; null: the CPU looks
    const llama_h2o_device_text * on_device;
    uint32_t device_stride;
};
