// The token positions and RoPE positions of all rows in one stream of the cache. Independent of tensors.

#pragma once

#include "cache/h2o-plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// Rotates a row to another RoPE position.
struct llama_h2o_row_rotation {
    uint32_t cell;
    int32_t by; // difference of the positions
};

// The decoded tokens of an image whose tokens have several positions each (M-RoPE). They share one RoPE position; row and column
// in the image are added to it in their keys.
struct llama_h2o_picture {
    int32_t pos;    // of the first token
    int32_t number; // index of the first token in the image, row by row
    int32_t width;  // of the image, in tokens
    int32_t height;
    int32_t n; // decoded tokens

    int32_t end() const { return pos + n; }

    // RoPE positions from its start to the next token
    int32_t size() const { return std::min(std::max(width, height), n); }
};

// Every row has a token position and a RoPE position, to which its key is rotated. At first all rows of a cell belong to the
// position of the cell. Compactions and re-bases list a cell: from then on both positions are stored for each of its rows.
// Heads are numbered over all layers.
class llama_h2o_row_positions {
public:
    llama_h2o_row_positions(uint32_t n_heads, uint32_t n_cells);

    void reset();

    //
    // token positions
    //

    bool is_listed(uint32_t cell) const { return listed[cell]; }

    // token position of a head's row in a cell; cell_pos is the position of the cell
    int32_t pos(uint32_t head, uint32_t cell, int32_t cell_pos) const {
        return listed[cell] ? text[head * n_cells + cell] : cell_pos;
    }

    // lists the cells that are not listed yet
    //   cell_pos   [cells.size()]
    void list(const std::vector<uint32_t> & cells, const std::vector<int32_t> & cell_pos);

    void unlist(uint32_t cell) { listed[cell] = 0; }

    // Copies rows of a head from cell to cell, in order. All cells must be listed.
    void move(uint32_t head, const std::vector<llama_h2o_move> & moves);

    // Copies the rows of listed cells to the first cells of this object; no other cell is listed afterwards.
    void take(const llama_h2o_row_positions & from, const std::vector<uint32_t> & cells);

    //
    // RoPE positions
    //

    // total shift of all re-bases
    int32_t shift() const { return text_shift; }

    // of a new token: its token position, minus the shift and the positions saved by earlier images
    int32_t rope_pos(int32_t pos) const { return pos - text_shift - spared(pos); }

    // relative to the first token of its page of n_page tokens
    int32_t in_page(int32_t pos, int32_t n_page) const { return rope_pos(pos) - rope_pos(pos - pos % n_page); }

    // records a token of an image: `token` describes an image with this token only
    void note(const llama_h2o_picture & token);

    // drops tokens of images from a position on
    void drop_pictures(int32_t p0);

    const std::vector<llama_h2o_picture> & pictures() const { return seen; }

    // Lowers the RoPE positions of a head's rows in listed cells by `back`. They stay distinct, except within an image, not
    // negative, and below `next`. Returns the rotations of the keys.
    //   cells   sorted into text order
    //   next    RoPE position of the next token afterwards
    std::vector<llama_h2o_row_rotation> rotate_back(
            uint32_t head, std::vector<uint32_t> & cells, int32_t back, int32_t next);

    // Replaces a row in a listed cell. The new row keeps its distance to the newest token if there are enough RoPE positions;
    // rotate_back() makes its position distinct.
    void replace(uint32_t head, uint32_t cell, int32_t pos) {
        text[head * n_cells + cell] = pos;
        rope[head * n_cells + cell] = std::max(rope_pos(pos), 0);
    }

    // lowers the positions of new tokens; call it after rotate_back() of all heads
    void shift_back(int32_t back) { text_shift += back; }

    //
    // the stored positions of heads from this one on, [n_heads][n_cells]; valid for listed cells only
    //

    const int32_t * text_list(uint32_t head) const { return text.data() + head * n_cells; }
    const int32_t * rope_list(uint32_t head) const { return rope.data() + head * n_cells; }

    // sets them, as text_list() and rope_list() returned them for a saved stream
    void set_lists(uint32_t head, const std::vector<int32_t> & text_list, const std::vector<int32_t> & rope_list);

    // also from a saved stream
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

    std::vector<llama_h2o_picture> seen; // ascending and disjoint

    // RoPE positions saved by images before pos
    int32_t spared(int32_t pos) const;
};
