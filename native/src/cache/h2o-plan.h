// The plan of one compaction: which cells stay, and which row moves where. Independent of tensors.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Moves a row of one head from a cell that is freed to a cell that stays.
struct llama_h2o_move {
    uint32_t src; // cell
    uint32_t dst; // cell
};

// Restores an archived row to a cell that stays.
struct llama_h2o_restored {
    int32_t pos; // of the text
    uint32_t cell;
};

// The rows that every head keeps: a bit mask of all cells per head. Cell i is bit i % 32 of word i / 32.
struct llama_h2o_keep {
    llama_h2o_keep(uint32_t n_heads, uint32_t n_cells, std::vector<uint32_t> used) :
        cells(std::move(used)), n_heads(n_heads), n_words((n_cells + 31) / 32), kept(size_t(n_heads) * n_words),
        missing(n_heads) {}

    std::vector<uint32_t> cells; // the cells in use

    uint32_t n_heads; // KV heads of all layers
    uint32_t n_words; // per mask

    std::vector<uint32_t> kept;                // [n_heads][n_words]
    std::vector<std::vector<int32_t>> missing; // [n_heads] positions of rows to restore

    uint32_t n_keep = 0; // rows of every head afterwards

    const uint32_t * head(uint32_t h) const { return kept.data() + size_t(h) * n_words; }
    uint32_t * head(uint32_t h) { return kept.data() + size_t(h) * n_words; }
};

struct llama_h2o_plan {
    std::vector<uint32_t> freed;                           // the cells that are freed
    std::vector<std::vector<llama_h2o_move>> moves;        // [n_heads]
    std::vector<std::vector<llama_h2o_restored>> restored; // [n_heads]

    uint64_t n_moves = 0;
};

// Frees the cells with the fewest kept rows until n_keep cells remain, so that few rows have to move. A cell whose rows are
// kept by every head, such as a recent one, is never freed. Throws std::runtime_error if a head keeps more than n_keep rows.
llama_h2o_plan llama_h2o_make_plan(const llama_h2o_keep & keep, uint32_t n_threads);
