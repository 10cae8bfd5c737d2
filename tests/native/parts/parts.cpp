// Parts of the native library that do not depend on tensors, for ctypes.

#include "cache/h2o-plan.h"
#include "cache/h2o-row-positions.h"
#include "policies/h2o-policy.h"
#include "policies/h2o-selection.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

extern "C" {

// Sets keep[i] to 1 for kept rows and 0 for the others. sizes: budget, recent, pinned.
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

// Whether there is a plan for these flags, [n_heads][n_cells], with n_keep cells.
int32_t make_plan(const uint8_t * flags, uint32_t n_heads, uint32_t n_cells, uint32_t n_keep) {
    std::vector<uint32_t> cells(n_cells);
    std::iota(cells.begin(), cells.end(), 0);

    llama_h2o_keep keep(n_heads, n_cells, cells);
    keep.n_keep = n_keep;
    for (uint32_t h = 0; h < n_heads; ++h) {
        for (const uint32_t cell : cells) {
            keep.head(h)[cell / 32] |= uint32_t(flags[h * n_cells + cell]) << cell % 32;
        }
    }

    try {
        llama_h2o_make_plan(keep, 1);
    } catch (const std::runtime_error &) {
        return false;
    }

    return true;
}

// The RoPE positions of a head's rows in these cells after re-bases, and of the next token: places, [n_cells + 1].
//   tokens   [n_tokens][4] position, index in an image, width and height of the image; width 0: no image. Each removes earlier
//            tokens from its position on
//   cells    [n_cells] positions, ascending
//   backs    [n_backs] shift of each re-base
void place_rows(const int32_t * tokens,
        uint32_t n_tokens,
        const int32_t * cells,
        uint32_t n_cells,
        const int32_t * backs,
        uint32_t n_backs,
        int32_t * places) {
    llama_h2o_row_positions rows(1, n_cells);

    int32_t next = 0;
    for (const int32_t * token = tokens; token < tokens + 4 * n_tokens; token += 4) {
        rows.drop_pictures(token[0]);
        if (token[2] > 0) {
            rows.note({ token[0], token[1], token[2], token[3], 1 });
        }
        next = token[0] + 1;
    }

    std::vector<uint32_t> used(n_cells);
    std::iota(used.begin(), used.end(), 0);
    rows.list(used, std::vector<int32_t>(cells, cells + n_cells));
    for (uint32_t i = 0; i < n_backs; ++i) {
        rows.rotate_back(0, used, backs[i], rows.rope_pos(next) - backs[i]);
        rows.shift_back(backs[i]);
    }

    std::copy_n(rows.rope_list(0), n_cells, places);
    places[n_cells] = rows.rope_pos(next);
}

// The error of a policy text, or empty.
void read_policy(const char * text, char * reason, uint32_t size) {
    try {
        llama_h2o_new_policy(text, 8);
    } catch (const llama_h2o_policy_error & err) {
        std::strncpy(reason, err.what(), size);
    }
}
}
