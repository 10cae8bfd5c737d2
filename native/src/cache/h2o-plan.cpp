#include "cache/h2o-plan.h"

#include "cache/h2o-parallel.h"

#include <algorithm>
#include <stdexcept>

// Number of kept rows in every cell, over all heads.
static std::vector<uint32_t> count_kept(const llama_h2o_keep & keep) {
    std::vector<uint32_t> counts(32 * size_t(keep.n_words), 0);
    for (uint32_t h = 0; h < keep.n_heads; ++h) {
        const uint32_t * kept = keep.head(h);
        for (size_t i = 0; i < counts.size(); ++i) {
            counts[i] += kept[i / 32] >> i % 32 & 1;
        }
    }

    return counts;
}

// A bit mask of these cells.
template <typename IT>
static std::vector<uint32_t> line_of(IT begin, IT end, uint32_t n_words) {
    std::vector<uint32_t> res(n_words);
    for (IT cell = begin; cell != end; ++cell) {
        res[*cell / 32] |= 1u << *cell % 32;
    }

    return res;
}

// Plans the moves and the restored rows of a head.
//   freed, staying   bit masks
static void place_rows(const llama_h2o_keep & keep,
        uint32_t h,
        const std::vector<uint32_t> & freed,
        const std::vector<uint32_t> & staying,
        llama_h2o_plan & plan) {
    const uint32_t * kept = keep.head(h);

    // a head keeps as many rows as cells stay, so there is a cell for each. Only corrupt row lists have more pinned or
    // recent rows
    uint32_t dst          = 0; // word
    uint32_t open         = staying[0] & ~kept[0];
    const auto next_place = [&] {
        while (open == 0 && ++dst < keep.n_words) {
            open = staying[dst] & ~kept[dst];
        }
        if (open == 0) {
            throw std::runtime_error("a head would keep more rows than its budget");
        }
        const uint32_t res  = 32 * dst + uint32_t(__builtin_ctz(open));
        open               &= open - 1;
        return res;
    };

    plan.moves[h].reserve(plan.freed.size());
    for (uint32_t src = 0; src < keep.n_words; ++src) {
        for (uint32_t moved = freed[src] & kept[src]; moved != 0; moved &= moved - 1) {
            plan.moves[h].push_back({ 32 * src + uint32_t(__builtin_ctz(moved)), next_place() });
        }
    }
    for (const int32_t pos : keep.missing[h]) {
        plan.restored[h].push_back({ pos, next_place() });
    }
}

llama_h2o_plan llama_h2o_make_plan(const llama_h2o_keep & keep, uint32_t n_threads) {
    const std::vector<uint32_t> counts = count_kept(keep);

    // of equally used cells the last one is freed, so that the used cells stay at the front of the cache
    const auto less_used = [&](uint32_t a, uint32_t b) {
        return counts[a] != counts[b] ? counts[a] < counts[b] : a > b;
    };
    std::vector<uint32_t> cells = keep.cells;
    const auto end              = cells.end() - keep.n_keep; // of the freed cells
    std::nth_element(cells.begin(), end, cells.end(), less_used);

    const std::vector<uint32_t> freed   = line_of(cells.begin(), end, keep.n_words);
    const std::vector<uint32_t> staying = line_of(end, cells.end(), keep.n_words);

    llama_h2o_plan plan;

    plan.freed.assign(cells.begin(), end);
    std::sort(plan.freed.begin(), plan.freed.end());

    plan.moves.resize(keep.n_heads);
    plan.restored.resize(keep.n_heads);
    // planning a row costs a quarter of reading it
    llama_h2o_parallel(keep.n_heads, 8 * keep.kept.size(), n_threads,
            [&](size_t h) { place_rows(keep, uint32_t(h), freed, staying, plan); });
    for (const auto & moves : plan.moves) {
        plan.n_moves += moves.size();
    }

    return plan;
}
