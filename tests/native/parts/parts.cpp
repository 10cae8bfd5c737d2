// Parts of the native library that know nothing of tensors, for ctypes.

#include "cache/h2o-plan.h"
#include "cache/h2o-query-ring.h"
#include "cache/h2o-row-positions.h"
#include "policies/h2o-policy.h"
#include "policies/h2o-selection.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

extern "C" {

// keep[i] becomes 1 for the rows that stay and 0 for the others. sizes: budget, recent, pinned.
void select_rows(const uint32_t * sizes,
        const llama_h2o_span * spans,
        uint32_t n_spans,
        const int32_t * starts,
        uint32_t n_starts,
        const double * score,
        const int32_t * pos,
        uint32_t n_rows,
        uint8_t * keep) {
    llama_h2o_rule rule;
    rule.n_budget = sizes[0];
    rule.n_recent = sizes[1];
    rule.n_pinned = sizes[2];
    rule.spans.assign(spans, spans + n_spans);
    rule.starts.assign(starts, starts + n_starts);
    for (uint32_t i = 0; i < n_rows; ++i) {
        rule.newest = std::max<int64_t>(rule.newest, pos[i]);
    }

    llama_h2o_selection selection(rule);
    selection.set_rows(pos, n_rows);
    selection.choose(score, keep);
}

// Whether there is a plan for these flags, [n_heads][n_cells], with places for so many rows of each head.
int32_t make_plan(const uint8_t * flags, uint32_t n_heads, uint32_t n_cells, uint32_t n_keep) {
    llama_h2o_keep keep;
    keep.n_heads = n_heads;
    keep.n_keep  = n_keep;
    keep.flags.assign(flags, flags + size_t(n_heads) * n_cells);
    keep.missing.resize(n_heads);
    for (uint32_t i = 0; i < n_cells; ++i) {
        keep.cells.push_back(i);
    }

    try {
        llama_h2o_make_plan(keep, 1);
    } catch (const std::runtime_error &) {
        return false;
    }

    return true;
}

// Why there is no policy of this text; empty if there is one.
void read_policy(const char * text, char * reason, uint32_t size) {
    try {
        llama_h2o_new_policy(text, 8);
    } catch (const llama_h2o_policy_error & err) {
        std::strncpy(reason, err.what(), size);
    }
}

//
// whose row lies where
//

void * positions_new(uint32_t n_heads, uint32_t n_cells) {
    return new llama_h2o_row_positions(n_heads, n_cells);
}

void positions_delete(llama_h2o_row_positions * rows) {
    delete rows;
}

void positions_reset(llama_h2o_row_positions * rows) {
    rows->reset();
}

void positions_list(llama_h2o_row_positions * rows, const uint32_t * cells, const int32_t * pos, uint32_t n) {
    rows->list({ cells, cells + n }, { pos, pos + n });
}

void positions_unlist(llama_h2o_row_positions * rows, uint32_t cell) {
    rows->unlist(cell);
}

// moves: pairs of cells
void positions_move(llama_h2o_row_positions * rows, uint32_t head, const uint32_t * moves, uint32_t n) {
    std::vector<llama_h2o_move> all;
    for (uint32_t i = 0; i < n; ++i) {
        all.push_back({ moves[2 * i], moves[2 * i + 1] });
    }
    rows->move(head, all);
}

void positions_take(
        llama_h2o_row_positions * rows, const llama_h2o_row_positions * from, const uint32_t * cells, uint32_t n) {
    rows->take(*from, { cells, cells + n });
}

void positions_replace(llama_h2o_row_positions * rows, uint32_t head, uint32_t cell, int32_t pos) {
    rows->replace(head, cell, pos);
}

// Turns all heads; by [n_heads][n_cells] is 0 for the rows that stay.
void positions_turn_back(llama_h2o_row_positions * rows,
        uint32_t n_heads,
        uint32_t n_cells,
        const uint32_t * cells,
        uint32_t n,
        int32_t back,
        int32_t next,
        int32_t * by) {
    std::vector<uint32_t> order(cells, cells + n);
    for (uint32_t head = 0; head < n_heads; ++head) {
        for (const auto & turn : rows->turn_back(head, order, back, next)) {
            by[size_t(head) * n_cells + turn.cell] = turn.by;
        }
    }
    rows->shift_back(back);
}

int32_t positions_pos(const llama_h2o_row_positions * rows, uint32_t head, uint32_t cell, int32_t cell_pos) {
    return rows->pos(head, cell, cell_pos);
}

// of a listed cell
int32_t positions_rope_pos(const llama_h2o_row_positions * rows, uint32_t head, uint32_t cell) {
    return rows->is_listed(cell) ? rows->rope_list(head)[cell] : -1;
}

int32_t positions_next_rope_pos(const llama_h2o_row_positions * rows, int32_t pos) {
    return rows->rope_pos(pos);
}

// Reads what another one would write.
void positions_copy_lists(
        llama_h2o_row_positions * rows, const llama_h2o_row_positions * from, uint32_t n_heads, uint32_t n_cells) {
    const size_t n = size_t(n_heads) * n_cells;
    rows->set_lists(0, { from->text_list(0), from->text_list(0) + n }, { from->rope_list(0), from->rope_list(0) + n });
    rows->set_shift(from->shift());
    for (uint32_t cell = 0; cell < n_cells; ++cell) {
        rows->set_listed(cell, from->is_listed(cell));
    }
}

//
// the ring of queries
//

void * ring_new(uint32_t n_slots) {
    return new llama_h2o_query_ring(n_slots);
}

void ring_delete(llama_h2o_query_ring * ring) {
    delete ring;
}

void ring_note(llama_h2o_query_ring * ring, int32_t p_first, int32_t p_last, int32_t shift) {
    ring->note(p_first, p_last, shift);
}

void ring_forget(llama_h2o_query_ring * ring, int32_t p0) {
    ring->forget(p0);
}

// turned [n_slots] becomes 1 for the slots that are turned
void ring_turn_back(llama_h2o_query_ring * ring, int32_t back, uint8_t * turned) {
    for (const uint32_t slot : ring->turn_back(back)) {
        turned[slot] = 1;
    }
}

// slots [n_slots][2]: position, and the one it is rotated to
void ring_slots(const llama_h2o_query_ring * ring, int32_t * slots) {
    for (const auto & slot : ring->slots()) {
        *slots++ = slot.pos;
        *slots++ = slot.rope_pos;
    }
}
}
