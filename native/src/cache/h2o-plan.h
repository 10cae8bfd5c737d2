// What one compaction does, worked out before anything is moved: which cells stay, and which row
// goes where. Knows nothing of tensors.

#pragma once

#include <cstdint>
#include <vector>

// A row of one head on its way from a cell that is freed to a cell that stays.
struct llama_h2o_move {
    uint32_t src; // cell
    uint32_t dst; // cell
};

// An archived row on its way to a cell that stays.
struct llama_h2o_restored {
    int32_t pos; // of the text
    uint32_t cell;
};

// Which rows every head keeps: one line of flags per head, over the cells in use.
struct llama_h2o_keep {
    std::vector<uint32_t> cells; // the cells in use
    std::vector<uint8_t> flags;  // [n_heads][cells.size()]

    std::vector<std::vector<int32_t>> missing; // [n_heads] positions of rows that come back to it

    uint32_t n_heads = 0; // KV heads of all layers
    uint32_t n_keep  = 0; // rows that every head has then

    const uint8_t * head(uint32_t h) const { return flags.data() + h * cells.size(); }
    uint8_t * head(uint32_t h) { return flags.data() + h * cells.size(); }
};

struct llama_h2o_plan {
    std::vector<uint32_t> freed;                           // the cells that are freed
    std::vector<std::vector<llama_h2o_move>> moves;        // [n_heads]
    std::vector<std::vector<llama_h2o_restored>> restored; // [n_heads]

    uint64_t n_moves = 0;
};

// Frees all but n_keep cells, those with the fewest kept rows, so that few rows have to move. A
// cell whose rows every head keeps, such as a recent one, is never among them. Throws std::runtime_error if a head has
// more than n_keep rows.
llama_h2o_plan llama_h2o_make_plan(const llama_h2o_keep & keep, uint32_t n_threads);
