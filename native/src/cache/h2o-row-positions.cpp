#include "cache/h2o-row-positions.h"

#include <algorithm>

llama_h2o_row_positions::llama_h2o_row_positions(uint32_t n_heads, uint32_t n_cells) :
    n_cells(n_cells), n_heads(n_heads), text(this->n_heads * n_cells, -1), rope(this->n_heads * n_cells, -1),
    listed(n_cells, 0) {}

void llama_h2o_row_positions::reset() {
    std::fill(listed.begin(), listed.end(), 0);
    text_shift = 0;
    seen.clear();
}

void llama_h2o_row_positions::list(const std::vector<uint32_t> & cells, const std::vector<int32_t> & cell_pos) {
    std::vector<size_t> added;
    std::vector<int32_t> now(cells.size());
    for (size_t i = 0; i < cells.size(); ++i) {
        if (!listed[cells[i]]) {
            added.push_back(i);
            now[i] = rope_pos(cell_pos[i]);
        }
    }

    // head by head, the memory order of the lists
    for (size_t head = 0; head < n_heads; ++head) {
        int32_t * text_of = text.data() + head * n_cells;
        int32_t * rope_of = rope.data() + head * n_cells;
        for (const size_t i : added) {
            text_of[cells[i]] = cell_pos[i];
            rope_of[cells[i]] = now[i];
        }
    }
    for (const size_t i : added) {
        listed[cells[i]] = 1;
    }
}

void llama_h2o_row_positions::move(uint32_t head, const std::vector<llama_h2o_move> & moves) {
    int32_t * text_of = text.data() + head * n_cells;
    int32_t * rope_of = rope.data() + head * n_cells;
    for (const auto & move : moves) {
        text_of[move.dst] = text_of[move.src];
        rope_of[move.dst] = rope_of[move.src];
    }
}

void llama_h2o_row_positions::take(const llama_h2o_row_positions & from, const std::vector<uint32_t> & cells) {
    std::fill(listed.begin(), listed.end(), 0);
    std::fill_n(listed.begin(), cells.size(), 1);
    for (size_t head = 0; head < n_heads; ++head) {
        for (size_t i = 0; i < cells.size(); ++i) {
            text[head * n_cells + i] = from.text[head * from.n_cells + cells[i]];
            rope[head * n_cells + i] = from.rope[head * from.n_cells + cells[i]];
        }
    }
    text_shift = from.text_shift;
    seen       = from.seen;
}

int32_t llama_h2o_row_positions::spared(int32_t pos) const {
    int32_t res = 0;
    for (const auto & one : seen) {
        if (pos < one.end()) {
            return res + std::max(pos - one.pos, 0);
        }
        res += one.n - one.size();
    }

    return res;
}

void llama_h2o_row_positions::note(const llama_h2o_picture & token) {
    const auto goes_on = [&](const llama_h2o_picture & one) {
        return one.end() == token.pos && one.number + one.n == token.number && one.width == token.width &&
               one.height == token.height;
    };
    if (!seen.empty() && goes_on(seen.back())) {
        ++seen.back().n;
    } else {
        seen.push_back(token);
    }
}

void llama_h2o_row_positions::drop_pictures(int32_t p0) {
    while (!seen.empty() && seen.back().pos >= p0) {
        seen.pop_back();
    }
    if (!seen.empty()) {
        seen.back().n = std::min(seen.back().n, p0 - seen.back().pos);
    }
}

std::vector<llama_h2o_row_rotation> llama_h2o_row_positions::rotate_back(
        uint32_t head, std::vector<uint32_t> & cells, int32_t back, int32_t next) {
    const int32_t * text_of = text.data() + head * n_cells;
    int32_t * rope_of       = rope.data() + head * n_cells;

    std::sort(cells.begin(), cells.end(), [&](uint32_t a, uint32_t b) { return text_of[a] < text_of[b]; });

    std::vector<int32_t> now; // rows of an image share one
    for (const uint32_t cell : cells) {
        now.push_back(rope_pos(text_of[cell]));
    }
    now.push_back(next + back);

    std::vector<int32_t> places(cells.size());
    for (size_t i = 0; i < cells.size(); ++i) {
        const int32_t first = i == 0 ? 0 : places[i - 1] + std::min(now[i] - now[i - 1], 1);

        places[i] = std::max(first, rope_of[cells[i]] - back);
    }
    for (size_t i = cells.size(); i-- > 0;) {
        places[i] = std::min(places[i], next - std::min(now[i + 1] - now[i], 1));
        next      = places[i];
    }

    std::vector<llama_h2o_row_rotation> rotations;
    for (size_t i = 0; i < cells.size(); ++i) {
        if (places[i] != rope_of[cells[i]]) {
            rotations.push_back({ cells[i], places[i] - rope_of[cells[i]] });
            rope_of[cells[i]] = places[i];
        }
    }

    return rotations;
}

void llama_h2o_row_positions::set_lists(
        uint32_t head, const std::vector<int32_t> & text_list, const std::vector<int32_t> & rope_list) {
    std::copy(text_list.begin(), text_list.end(), text.begin() + head * n_cells);
    std::copy(rope_list.begin(), rope_list.end(), rope.begin() + head * n_cells);
}
