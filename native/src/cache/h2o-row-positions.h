// Whose row lies where in one stream of the cache. Knows nothing of tensors.

#pragma once

#include "cache/h2o-plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// A row on its way to another position of its rotary embedding.
struct llama_h2o_row_rotation {
    uint32_t cell;
    int32_t by; // positions
};

// What came of a picture whose tokens have several positions each (M-RoPE): they all count as one, and their places in the
// picture are a part of their keys.
struct llama_h2o_picture {
    int32_t pos;    // of the first token
    int32_t number; // of that in the picture, row by row
    int32_t width;  // of the picture, in tokens
    int32_t height;
    int32_t n; // tokens that came

    int32_t end() const { return pos + n; }

    // positions up to what comes behind it
    int32_t size() const { return std::min(std::max(width, height), n); }
};

// Every row has a position of the text and the one that it is rotated to. All rows of a cell belong to the cell's own
// position, until a compaction or a re-base has seen it: from then on the cell is listed, row by row. Heads are the KV
// heads of all layers.
class llama_h2o_row_positions {
public:
    llama_h2o_row_positions(uint32_t n_heads, uint32_t n_cells);

    // a stream without rows, at the start of a text
    void reset();

    //
    // positions of the text
    //

    bool is_listed(uint32_t cell) const { return listed[cell]; }

    // whose row a head has in a cell that has this position
    int32_t pos(uint32_t head, uint32_t cell, int32_t cell_pos) const {
        return listed[cell] ? text[head * n_cells + cell] : cell_pos;
    }

    // those cells of the list that are not listed yet
    //   cell_pos   [cells.size()]
    void list(const std::vector<uint32_t> & cells, const std::vector<int32_t> & cell_pos);

    void unlist(uint32_t cell) { listed[cell] = 0; }

    // Copies, in order, rows of a head from cell to cell. All of these are listed.
    void move(uint32_t head, const std::vector<llama_h2o_move> & moves);

    // Takes the rows of listed cells to the first cells here; no other cell is listed then.
    void take(const llama_h2o_row_positions & from, const std::vector<uint32_t> & cells);

    //
    // positions of rotary embeddings
    //

    // grows with every re-base
    int32_t shift() const { return text_shift; }

    // those of new tokens are smaller than the text's by the shift, and by what the pictures before them do without
    int32_t rope_pos(int32_t pos) const { return pos - text_shift - spared(pos); }

    // of a page of n_page tokens: behind its first one
    int32_t in_page(int32_t pos, int32_t n_page) const { return rope_pos(pos) - rope_pos(pos - pos % n_page); }

    // a token of a picture comes: the only one of this picture
    void note(const llama_h2o_picture & token);

    // what came of pictures from a position on is gone
    void drop_pictures(int32_t p0);

    const std::vector<llama_h2o_picture> & pictures() const { return seen; }

    // New ones for the rows of a head in listed cells: `back` less, but never two at the same, unless they are of a picture,
    // below zero, or behind the next token's.
    //   cells   put in the order of the text
    //   next    rotary position of the next token then
    std::vector<llama_h2o_row_rotation> rotate_back(
            uint32_t head, std::vector<uint32_t> & cells, int32_t back, int32_t next);

    // Another row takes the place of one in a listed cell. It counts at its distance to the text, if there are so many
    // positions; rotate_back() gives it one of its own.
    void replace(uint32_t head, uint32_t cell, int32_t pos) {
        text[head * n_cells + cell] = pos;
        rope[head * n_cells + cell] = std::max(rope_pos(pos), 0);
    }

    // new tokens follow, after all heads
    void shift_back(int32_t back) { text_shift += back; }

    //
    // the lists as they are, for heads from this one on: [n_heads][n_cells]; only listed cells count
    //

    const int32_t * text_list(uint32_t head) const { return text.data() + head * n_cells; }
    const int32_t * rope_list(uint32_t head) const { return rope.data() + head * n_cells; }

    // what text_list() and rope_list() of a saved stream gave, or the like
    void set_lists(uint32_t head, const std::vector<int32_t> & text_list, const std::vector<int32_t> & rope_list);

    // of the saved stream, too
    void set_listed(uint32_t cell, bool is_listed) { listed[cell] = is_listed; }
    void set_shift(int32_t shift) { text_shift = shift; }
    void set_pictures(std::vector<llama_h2o_picture> pictures) { seen = std::move(pictures); }

private:
    size_t n_cells;
    size_t n_heads;

    std::vector<int32_t> text;   // [n_heads][n_cells]
    std::vector<int32_t> rope;   // [n_heads][n_cells]
    std::vector<uint8_t> listed; // [n_cells]

    int32_t text_shift = 0;

    std::vector<llama_h2o_picture> seen; // ascending and apart

    // rotary positions fewer than tokens
    int32_t spared(int32_t pos) const;
};
