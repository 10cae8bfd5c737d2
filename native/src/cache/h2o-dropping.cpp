#include "cache/h2o-dropping.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-compaction.h"

#include "llama-context.h"

#include <algorithm>

// The cells of the dropped rows of a head, oldest row first.
static std::vector<uint32_t> dropped_by(
        const llama_h2o_parts & parts, uint32_t s, uint32_t head, const std::vector<uint32_t> & used) {
    const auto & st = parts.streams[s];

    const auto pos_of = [&](uint32_t cell) {
        return st.rows.pos(head, cell, parts.cells[s].pos_get(cell));
    };

    std::vector<uint32_t> res;
    for (const uint32_t cell : used) {
        if (st.claims.is_dropped(pos_of(cell))) {
            res.push_back(cell);
        }
    }
    std::sort(res.begin(), res.end(), [&](uint32_t a, uint32_t b) { return pos_of(a) < pos_of(b); });

    return res;
}

bool llama_h2o_holds_dropped(const llama_h2o_parts & parts, uint32_t s) {
    const std::vector<uint32_t> used = parts.cells.used(s);

    bool res = false;
    for (uint32_t h = 0; !res && !parts.streams[s].claims.dropped.empty() && h < parts.n_heads(); ++h) {
        res = !dropped_by(parts, s, h, used).empty();
    }

    return res;
}

// Frees the cells of dropped tokens that are in their own cell in all heads.
static void free_own_cells(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];

    std::vector<uint32_t> freed;
    for (const uint32_t cell : parts.cells.used(s)) {
        const llama_pos pos = parts.cells[s].pos_get(cell);
        if (pos >= st.pos_removable && st.claims.is_dropped(pos)) {
            freed.push_back(cell);
        }
    }
    parts.cells.free(s, freed);
    for (const uint32_t cell : freed) {
        st.rows.unlist(cell);
    }
    st.stale = true;
}

// Frees as many shared cells as the head with the fewest dropped rows allows.
static void leave_shared_cells(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];

    const std::vector<uint32_t> used = parts.cells.used(s);

    std::vector<std::vector<uint32_t>> dropped;
    size_t n_freed = used.size();
    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        dropped.push_back(dropped_by(parts, s, h, used));
        n_freed = std::min(n_freed, dropped.back().size());
    }
    if (n_freed == 0) {
        return;
    }

    llama_h2o_keep keep(parts.n_heads(), parts.n_cells, used);
    keep.n_keep = uint32_t(used.size() - n_freed);
    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        for (const uint32_t cell : used) {
            keep.head(h)[cell / 32] |= 1u << cell % 32;
        }
        for (auto cell = dropped[h].end() - std::ptrdiff_t(n_freed); cell != dropped[h].end(); ++cell) {
            keep.head(h)[*cell / 32] &= ~(1u << *cell % 32);
        }
    }

    st.rows.list(used, parts.cells.positions(s, used));
    st.marks.clear();
    llama_h2o_leave(parts, s, keep);
}

int32_t llama_h2o_drop_spans(llama_h2o_parts & parts, uint32_t s, const std::vector<llama_h2o_span> & spans) {
    auto & st = parts.streams[s];

    llama_h2o_claims given = {};
    llama_h2o_claims all   = st.claims;
    given.dropped          = spans;
    all.drop(spans);

    int32_t status      = given.check(0); // before merging
    const bool is_there = !st.broken && !parts.refused && (spans.empty() || spans.back().p1 <= parts.cells.newest(s));
    if (status == LLAMA_H2O_OK) {
        status = is_there ? all.check(parts.max_pinned()) : LLAMA_H2O_ERR_FORGOTTEN;
    }
    if (status != LLAMA_H2O_OK || spans.empty()) {
        return status;
    }

    parts.ctx.synchronize();

    // later marks contain scores of the dropped rows and their cells
    st.before.reset();
    while (!st.marks.empty() && st.marks.back().pos > spans.front().p0) {
        st.marks.pop_back();
    }
    st.claims = std::move(all);
    free_own_cells(parts, s);
    leave_shared_cells(parts, s);
    llama_h2o_update_index(parts, s);

    return LLAMA_H2O_OK;
}
