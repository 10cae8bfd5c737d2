// Search of the archive: the queries of every token search the archived keys of their KV head for those that they would attend
// to most. The search estimates logits from codes of one bit per element; attention to the retrieved rows is exact.
//
// The code of a key k, rotated to its RoPE position, consists of the signs of r = H(k - c) and the scale |r|^2 / sum|r|, where c
// is the mean key of its page and H the Hadamard transform. The estimated logit of a query q is q.c + scale * (Hq . signs).
// This is RaBitQ (Gao and Long, SIGMOD 2024) with the Hadamard transform as its random rotation. The signs of four elements
// have 16 combinations: a lookup table per query yields four elements at a time for a vector of keys (the fast scan of André,
// Kermarrec and Le Scouarnec, VLDB 2015).

#pragma once

#include "kernels/h2o-rotation.h"

#include "ggml.h"

#include <cmath>
#include <cstddef>
#include <cstdint>

// keys per page of the archive
constexpr uint32_t LLAMA_H2O_PAGE = 128;

// keys per passage, which divides a page
constexpr uint32_t LLAMA_H2O_PASSAGE = 32;

// Memory layout of the codes of a page, for one KV head with keys of n_embd elements.
struct llama_h2o_code_layout {
    uint32_t n_embd;

    // block size of the Hadamard transform: the largest power of two that divides n_embd
    constexpr uint32_t n_mix() const { return n_embd & (~n_embd + 1); }
    // groups of four elements
    constexpr uint32_t n_groups() const { return (n_embd + 3) / 4; }

    // [n_groups][PAGE/2] the signs of a group, 1 if not negative: byte j has those of key j in its low half and those of key
    // j + PAGE/2 in its high half
    static constexpr size_t signs() { return 0; }
    // F16 [PAGE], 0 if there is no key
    constexpr size_t scales() const { return size_t(n_groups()) * LLAMA_H2O_PAGE / 2; }
    // F16 [n_embd]
    constexpr size_t centre() const { return scales() + LLAMA_H2O_PAGE * sizeof(uint16_t); }

    constexpr size_t size() const { return (centre() + n_embd * sizeof(uint16_t) + 63) / 64 * 64; }
};

// The archive of a text, as its queries search it. Page numbers are relative to the first page.
struct llama_h2o_search_text {
    uint32_t n_pages;
    const char * const * pages; // [n_pages] of the archive

    // [n_head_kv] codes of the head's pages, adjacent; null if the head does not search
    const char * const * codes;
    // [n_head_kv][n_pages][PAGE/64] a bit for every row that the head does not hold in its cells
    const uint64_t * const * hidden;
    // [n_head_kv] offset of the rows of a head in a page; K and V are adjacent
    const uint64_t * keys;
    const uint64_t * values;

    // These factors rotate the keys of a page to its RoPE position. Pages before n_unrotated need no rotation.
    uint32_t n_unrotated;
    const float * factors; // [n_pages - n_unrotated][2][n_dims]

    // [n_head_kv] maximum retrieved rows per head: for a single token, and for tokens that search together
    const uint32_t * n_alone;
    const uint32_t * n_together;

    // First row of the passage in focus, to which all heads attend, even those that do not search; NO_FOCUS: none.
    static constexpr uint32_t NO_FOCUS = UINT32_MAX;
    uint32_t focus;

    // Attention to retrieved rows: sums of squared probabilities by row, by KV head and (of heads that search) by passage, and
    // the sum of all probabilities. Over all query heads, in multiples of 2^-32, which doubles add exactly in any order of
    // the threads.
    double * const * weights;  // [n_slots][n_pages*PAGE]
    double * gains;            // [n_slots][n_head_kv]
    double * const * interest; // [n_slots][n_pages*PAGE/PASSAGE]
    double * shares;           // [n_slots]

    // bit mask of the hidden rows in focus
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

    // Adds the squared probabilities that queries of a head gave to a row.
    void note(uint32_t ith, uint32_t n_head_kv, uint32_t head, uint32_t row, float x) const {
        const double squares = whole(x);

        weights[ith][row]             += squares;
        gains[ith * n_head_kv + head] += squares;
        if (codes[head]) {
            interest[ith][row / LLAMA_H2O_PASSAGE] += squares;
        }
    }
};

// The same for one layer, in the memory of a device. Attention sums are integers, in multiples of 2^-32, so that they do not
// depend on the order.
struct llama_h2o_device_text {
    struct head {
        int32_t codes; // index among the heads that search; -1: it does not
        uint32_t n_alone;
        uint32_t n_together;
        uint64_t keys;
        uint64_t values;
    };

    uint32_t n_pages;
    uint32_t n_unrotated;
    uint32_t focus;
    uint32_t first_slot; // of a ring of max_pages codes
    uint32_t max_pages;

    const char * const * pages; // [n_pages] on the host

    // Copies of the newest pages in device memory, for heads that search: pages from first_near on, in a ring of n_near.
    uint32_t first_near;
    uint32_t near_slot; // of page 0
    uint32_t n_near;
    uint64_t nb_near;  // of a page
    const char * near; // [n_near][searching heads][PAGE], K and V adjacent

    const char * codes;      // [searching heads][max_pages]
    const uint64_t * hidden; // [n_head_kv][n_pages*PAGE/64]
    const float * factors;   // [n_pages - n_unrotated][2][n_dims]
    const head * heads;      // [n_head_kv]

    unsigned long long * shares;   // [1]
    unsigned long long * gains;    // [n_head_kv]
    unsigned long long * interest; // [n_pages*PAGE/PASSAGE]
    unsigned long long * weights;  // [n_pages*PAGE]

    // Number of classes of scores with equal leading bits. Their counts are zero between two searches.
    static constexpr uint32_t N_COUNTS = 2048;

    // work space of a search, for max_groups groups of queries that search together
    uint32_t max_groups;
    uint32_t * scores; // [searching heads][max_groups][max_pages*PAGE]
    uint32_t * counts; // [searching heads][max_groups][N_COUNTS]
};

// The search of a layer.
struct llama_h2o_search {
    uint32_t n_find; // maximum retrieved rows of any KV head

    ggml_type type; // of archived rows: F32, F16, Q8_0 or Q4_0
    size_t nb_row;  // from token to token

    llama_h2o_rotation rotation; // of keys; n_dims = 0 if they are not rotated

    // Block size of the Hadamard transform of queries (archived keys have none); 0: none.
    uint32_t n_query_mix;

    float cap; // soft cap of the logits; 0: none

    const llama_h2o_search_text * const * texts; // [n_stream]

    // [n_stream] at this stride, in the memory of the layer's device; null: the CPU searches
    const llama_h2o_device_text * on_device;
    uint32_t device_stride;
};
