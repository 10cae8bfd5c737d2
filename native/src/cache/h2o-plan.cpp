#include "cache/h2o-plan.h"

#include "cache/h2o-parallel.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

// Kept rows in every cell in use, over all heads.
static std::vector<uint32_t> count_kept(const llama_h2o_keep & keep) {
    std::vector<uint32_t> counts(keep.cells.size(), 0);

    for (uint32_t h = 0; h < keep.n_heads; ++h) {
        const uint8_t * kept = keep.head(h);
        for (size_t i = 0; i < counts.size(); ++i) {
            counts[i] += kept[i];
        }
    }

    return counts;
}

// Marks the n_freed cells in use with the fewest kept rows.
static std::vector<uint8_t> choose_freed(const std::vector<uint32_t> & counts, size_t n_freed) {
    std::vector<uint32_t> order(counts.size());
    std::iota(order.begin(), order.end(), 0);

    // of equally used cells the last one goes, which keeps the used cells at the front of the cache
    const auto less_used = [&](uint32_t a, uint32_t b) {
        return counts[a] != counts[b] ? counts[a] < counts[b] : a > b;
    };
    std::nth_element(order.begin(), order.begin() + n_freed, order.end(), less_used);

    std::vector<uint8_t> freed(counts.size(), 0);
    for (size_t i = 0; i < n_freed; ++i) {
        freed[order[i]] = 1;
    }

    return freed;
}

// The rows of a head that move, and those that come back to it.
static void place_rows(
        const llama_h2o_keep & keep, uint32_t h, const std::vector<uint8_t> & freed, llama_h2o_plan & plan) {
    const auto & cells   = keep.cells;
    const uint8_t * kept = keep.head(h);

    // a head has as many rows as cells stay, so there is a place for every one. More are pinned or
    // recent only where a list of rows is wrong
    size_t dst            = 0;
    const auto next_place = [&] {
        while (dst < cells.size() && (freed[dst] || kept[dst])) {
            ++dst;
        }
        if (dst == cells.size()) {
            throw std::runtime_error("a head has to keep more rows than its budget");
        }
        return cells[dst++];
    };

    for (size_t src = 0; src < cells.size(); ++src) {
        if (freed[src] && kept[src]) {
            plan.moves[h].push_back({ cells[src], next_place() });
        }
    }
    for (const int32_t pos : keep.missing[h]) {
        plan.restored[h].push_back({ pos, next_place() });
    }
}

llama_h2o_plan llama_h2o_make_plan(const llama_h2o_keep & keep, uint32_t n_threads) {
    const std::vector<uint8_t> freed = choose_freed(count_kept(keep), keep.cells.size() - keep.n_keep);

    llama_h2o_plan plan;

    for (size_t i = 0; i < freed.size(); ++i) {
        if (freed[i]) {
            plan.freed.push_back(keep.cells[i]);
        }
    }

    plan.moves.resize(keep.n_heads);
    plan.restored.resize(keep.n_heads);
    llama_h2o_parallel(
            keep.n_heads, keep.flags.size(), n_threads, [&](size_t h) { place_rows(keep, uint32_t(h), freed, plan); });
    for (const auto & moves : plan.moves) {
        plan.n_moves += moves.size();
    }

    return plan;
}
