#include "cache/h2o-state.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-parts.h"
#include "cache/h2o-state-io.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

static constexpr uint32_t STATE_MAGIC   = 0x6f326802; // the last byte is the version
static constexpr uint32_t MAX_POSITIONS = 0x7fffffff;
static constexpr uint64_t MAX_PICTURES  = 1 << 20;

// What must be equal to restore a state. Without padding, so that every written byte is defined.
struct state_shape {
    uint32_t magic;
    uint32_t n_cells;
    uint32_t n_layer;
    uint32_t n_heads; // KV heads of all layers
    uint32_t v_trans;

    // budget and policy
    uint32_t heavy;
    uint32_t recent;
    uint32_t pinned;
    uint32_t slack;
    uint32_t n_pos;
    uint32_t recall;
    uint32_t archive_type;
    uint32_t n_policy; // bytes of the policy's text, which follows
};

// Header of a stream, without padding.
struct stream_head {
    uint32_t n_used; // cells in use by the text
    uint32_t n_span; // cells up to the last one in use
    uint32_t v_head; // cell at which the search for free cells starts
    uint32_t n_pinned;
    uint32_t n_spans;
    uint32_t n_starts;
    uint32_t n_queries; // of the ring
    llama_pos shift;
    llama_pos pos_removable;
    llama_pos pos_decayed;
    uint64_t n_forgotten; // spans
    uint64_t n_pictures;
    llama_h2o_counters count;
};

// Calls fn(tensor, offset, size) for all data of a layer in a stream's first n_span cells, in the order of the state.
template <typename F>
static void for_each_tensor_piece(const llama_h2o_layer & layer, uint32_t s, uint32_t n_span, F fn) {
    layer.tensors.for_each_collected(s, n_span, fn);
    for (const auto & [tensor, layout] : layer.rows()) {
        const size_t first = tensor->nb[2] * s;
        const size_t size  = ggml_type_size(layout.type);

        if (!layout.transposed) {
            fn(tensor, first, ggml_row_size(layout.type, layout.n_embd) * n_span);
        }
        for (size_t i = 0; layout.transposed && i < layout.n_embd; ++i) {
            fn(tensor, first + i * size * layout.n_cells, size * n_span);
        }
    }
}

static state_shape get_shape(const llama_h2o_parts & parts) {
    const auto & params = parts.params;

    return {
        STATE_MAGIC,
        parts.n_cells,
        uint32_t(parts.layers.size()),
        parts.n_heads(),
        parts.layers.front().shape.v.transposed ? 1u : 0u,
        params.heavy,
        params.recent,
        params.pinned,
        params.slack,
        params.n_pos,
        params.recall,
        uint32_t(params.archive_type),
        uint32_t(std::strlen(params.policy)),
    };
}

static std::array<uint32_t, 6> get_shape(const llama_h2o_layer_shape & layer) {
    return { layer.il, layer.n_head_kv, uint32_t(layer.k.type), uint32_t(layer.v.type), layer.k.n_embd,
        layer.v.n_embd };
}

static bool has_same_rule(const state_shape & a, const state_shape & b) {
    return a.heavy == b.heavy && a.recent == b.recent && a.pinned == b.pinned && a.slack == b.slack &&
           a.n_pos == b.n_pos && a.recall == b.recall && (a.archive_type == b.archive_type || a.recall == 0) &&
           a.n_policy == b.n_policy;
}

//
// writing
//

static void write_stream(llama_h2o_state_writer & out, const llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    const std::vector<uint32_t> used = parts.cells.used(s);

    stream_head head   = {};
    head.n_used        = used.size();
    head.n_span        = parts.cells[s].used_max_p1();
    head.v_head        = parts.cells.head(s);
    head.n_pinned      = st.claims.n_pinned;
    head.n_spans       = st.claims.spans.size();
    head.n_starts      = st.claims.starts.size();
    head.n_queries     = st.queries.slots.size();
    head.shift         = st.rows.shift();
    head.pos_removable = st.pos_removable;
    head.pos_decayed   = st.pos_decayed;
    head.n_forgotten   = st.claims.dropped.size();
    head.n_pictures    = st.rows.pictures().size();
    head.count         = st.count;
    out.write(head);

    out.write(st.claims.spans);
    out.write(st.claims.starts);
    out.write(st.claims.dropped);
    out.write(st.rows.pictures());
    out.write(st.queries.slots);
    llama_h2o_write_recall(out, st);

    std::vector<uint8_t> listed;
    for (const uint32_t cell : used) {
        listed.push_back(st.rows.is_listed(cell));
    }
    out.write(used);
    out.write(parts.cells.positions(s, used));
    out.write(listed);

    for (const auto & layer : parts.layers) {
        const size_t n = size_t(layer.shape.n_head_kv) * parts.n_cells;

        out.write(st.rows.text_list(layer.shape.first_head), n * sizeof(llama_pos));
        out.write(st.rows.rope_list(layer.shape.first_head), n * sizeof(llama_pos));

        for_each_tensor_piece(layer, s, head.n_span,
                [&](ggml_tensor * tensor, size_t offset, size_t size) { out.write(tensor, offset, size); });
    }
}

void llama_h2o_write_state(llama_io_write_i & io, const llama_h2o_parts & parts, uint32_t s0, uint32_t s1) {
    parts.ctx.synchronize();

    llama_h2o_state_writer out(io);

    const state_shape shape = get_shape(parts);
    out.write(shape);
    out.write(parts.params.policy, shape.n_policy);

    for (const auto & layer : parts.layers) {
        out.write(get_shape(layer.shape));
    }
    for (uint32_t s = s0; s < s1; ++s) {
        write_stream(out, parts, s);
    }
}

//
// reading
//

// Checks that the state is from the same model and settings.
static void expect_shape(llama_h2o_state_reader & in, const llama_h2o_parts & parts) {
    const state_shape mine = get_shape(parts);

    state_shape shape;
    in.read(shape);
    llama_h2o_expect(shape.magic == mine.magic, "the format of another version");
    llama_h2o_expect(has_same_rule(shape, mine), "another budget, slack or policy");

    std::vector<char> policy(shape.n_policy);
    in.read(policy);
    llama_h2o_expect(std::equal(policy.begin(), policy.end(), parts.params.policy), "another policy");

    llama_h2o_expect(shape.n_cells == mine.n_cells, "another number of cells");
    llama_h2o_expect(
            shape.n_layer == mine.n_layer && shape.n_heads == mine.n_heads, "another number of layers or heads");
    llama_h2o_expect(shape.v_trans == mine.v_trans, "another setting of flash attention");

    for (const auto & layer : parts.layers) {
        std::array<uint32_t, 6> found;
        in.read(found);
        llama_h2o_expect(found == get_shape(layer.shape), "another shape or type of layer");
    }
}

// Checks the slots of the ring of queries.
static void expect_queries(
        const std::vector<llama_h2o_query_slot> & slots, int32_t newest, const llama_h2o_row_positions & rows) {
    const int64_t n_slots = slots.size();

    for (int64_t i = 0; i < n_slots; ++i) {
        const auto & slot = slots[i];

        const bool is_last = slot.pos <= newest && slot.pos > newest - n_slots;
        const bool is_here = slot.pos >= 0 && slot.pos % n_slots == i && slot.rope_pos == rows.rope_pos(slot.pos);
        llama_h2o_expect(slot.pos == -1 || (is_last && is_here), "queries that are out of range");
    }
}

// Checks the images of a text.
static void expect_pictures(const std::vector<llama_h2o_picture> & pictures, int32_t newest) {
    int64_t p = 0; // first possible start of the next one
    for (const auto & one : pictures) {
        llama_h2o_expect(one.pos >= p && one.n > 0 && one.number >= 0 && one.width > 0 && one.height > 0 &&
                                 int64_t(one.number) + one.n <= int64_t(one.width) * one.height,
                "images that overlap or are invalid");
        p = int64_t(one.pos) + one.n;
    }
    llama_h2o_expect(p <= int64_t(newest) + 1, "images after the end of the text");
}

// Checks relations that hold in every saved state, even after removals.
static void expect_head(const llama_h2o_parts & parts,
        const stream_head & head,
        const std::vector<llama_h2o_query_slot> & queries,
        const llama_h2o_row_positions & rows,
        llama_pos newest) {
    const int64_t n_tokens = int64_t(newest) + 1;

    const bool is_fresh = head.pos_removable == 0; // no compaction since the text began

    llama_h2o_expect(head.shift >= 0 && head.shift <= n_tokens && head.pos_removable >= 0 &&
                             head.pos_removable <= n_tokens && head.pos_decayed >= -1 &&
                             (is_fresh || head.pos_decayed <= newest + int64_t(parts.n_capacity())),
            "positions that are out of range");

    const llama_h2o_counters & count = head.count;
    llama_h2o_expect(count.n_rows_evicted == count.n_cells_freed * parts.n_heads() &&
                             count.n_rows_moved <= count.n_rows_evicted && count.n_compactions <= count.n_cells_freed &&
                             (count.n_cells_freed == 0 || count.n_compactions > 0) &&
                             (head.shift == 0 || count.n_rebases > 0),
            "inconsistent counters");

    expect_queries(queries, newest, rows);
}

// Checks what later steps rely on: the rows of a head have distinct token positions (compactions), rows of the removable tail
// are in their own cells (removals), and RoPE positions are in text order (attention).
static void expect_rows(
        const llama_h2o_parts & parts, uint32_t s, const stream_head & head, const std::vector<uint32_t> & used) {
    const auto & st    = parts.streams[s];
    const auto & cells = parts.cells[s];

    struct row {
        llama_pos pos;
        llama_pos rope_pos;
    };

    const llama_pos next = parts.cells.newest(s) + 1;

    std::vector<row> rows;

    for (uint32_t h = 0; h < parts.n_heads(); ++h) {
        rows.clear();
        for (const uint32_t cell : used) {
            const llama_pos own = cells.pos_get(cell);
            const llama_pos pos = st.rows.pos(h, cell, own);
            const bool fits     = own < head.pos_removable ? pos >= 0 && pos < head.pos_removable
                                                           : pos == own && !st.claims.is_dropped(own);
            llama_h2o_expect(fits, "rows in cells of other positions");

            const llama_pos now = st.rows.rope_pos(pos);
            const llama_pos at  = st.rows.is_listed(cell) ? st.rows.rope_list(h)[cell] : now;
            llama_h2o_expect(at >= std::max(0, now) && at <= pos && uint32_t(at) < parts.params.n_pos,
                    "RoPE positions that are out of range");

            rows.push_back({ pos, at });
        }
        rows.push_back({ next, st.rows.rope_pos(next) }); // the next token follows them

        std::sort(rows.begin(), rows.end(), [](const row & a, const row & b) { return a.pos < b.pos; });
        for (size_t i = 1; i < rows.size(); ++i) {
            // rows of an image share one position
            const llama_pos behind = st.rows.rope_pos(rows[i].pos) - st.rows.rope_pos(rows[i - 1].pos);
            llama_h2o_expect(
                    rows[i - 1].pos < rows[i].pos && rows[i - 1].rope_pos + std::min(behind, 1) <= rows[i].rope_pos,
                    "duplicate or unordered rows");
        }
    }
}

// Checks scores and squares: they are sums of probabilities, or scores of a policy.
static void expect_sums(const llama_h2o_layer_attention & attention, const std::vector<uint8_t> & bytes) {
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
        float x;
        std::memcpy(&x, bytes.data() + i, sizeof(x));
        llama_h2o_expect(
                std::isfinite(x) && (x >= 0.0f || !attention.collects), "scores that are negative or not finite");
    }
}

static void read_stream(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s) {
    const auto & cells = parts.cells[s];

    auto & st = parts.streams[s];

    stream_head head;
    in.read(head);
    llama_h2o_expect(head.n_used <= parts.n_capacity() && head.n_used <= head.n_span && head.n_span <= cells.size() &&
                             head.v_head <= cells.size() && head.n_spans <= parts.max_pinned() &&
                             head.n_starts <= LLAMA_H2O_MAX_STARTS && head.n_forgotten <= LLAMA_H2O_MAX_STARTS &&
                             head.n_pictures <= MAX_PICTURES && head.n_queries == st.queries.slots.size(),
            "counts that are out of range");

    llama_h2o_claims claims { head.n_pinned, std::vector<llama_h2o_span>(head.n_spans),
        std::vector<llama_pos>(head.n_starts), std::vector<llama_h2o_span>(head.n_forgotten) };
    std::vector<llama_h2o_picture> pictures(head.n_pictures);
    std::vector<llama_h2o_query_slot> queries(head.n_queries);
    in.read(claims.spans);
    in.read(claims.starts);
    in.read(claims.dropped);
    in.read(pictures);
    in.read(queries);

    parts.cells.clear(s);
    parts.reset_stream(s);
    llama_h2o_read_recall(in, parts, s);

    std::vector<uint32_t> used(head.n_used);
    std::vector<llama_pos> cell_pos(head.n_used);
    std::vector<uint8_t> listed(head.n_used);
    in.read(used);
    in.read(cell_pos);
    in.read(listed);

    std::vector<llama_pos> sorted = cell_pos;
    std::sort(sorted.begin(), sorted.end());
    llama_h2o_expect(
            std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "two cells with the same position");

    for (size_t i = 0; i < used.size(); ++i) {
        llama_h2o_expect(used[i] < head.n_span && cells.is_empty(used[i]) && uint32_t(cell_pos[i]) < MAX_POSITIONS &&
                                 listed[i] <= 1,
                "a cell that is out of range");

        parts.cells.put(s, used[i], cell_pos[i]);
        st.rows.set_listed(used[i], listed[i]);
    }
    llama_h2o_expect(cells.used_max_p1() == head.n_span, "a missing cell");

    expect_pictures(pictures, parts.cells.newest(s));
    st.rows.set_pictures(std::move(pictures));
    st.rows.set_shift(head.shift);
    expect_head(parts, head, queries, st.rows, parts.cells.newest(s));
    llama_h2o_expect_recall(parts, s, head.pos_removable);
    llama_h2o_expect(claims.check(parts.max_pinned()) == LLAMA_H2O_OK, "invalid pins or segments");
    llama_h2o_expect(claims.dropped.empty() || claims.dropped.back().p1 <= parts.cells.newest(s),
            "dropped positions after the end of the text");

    for (const auto & layer : parts.layers) {
        std::vector<llama_pos> text(size_t(layer.shape.n_head_kv) * parts.n_cells);
        std::vector<llama_pos> rope(text.size());
        in.read(text);
        in.read(rope);
        st.rows.set_lists(layer.shape.first_head, text, rope);

        for_each_tensor_piece(layer, s, head.n_span, [&](ggml_tensor * tensor, size_t offset, size_t size) {
            const auto & bytes = in.read(tensor, offset, size);
            if (tensor == layer.tensors.scores || tensor == layer.tensors.squares) {
                expect_sums(layer.attention, bytes);
            }
        });
    }

    st.claims = std::move(claims);
    expect_rows(parts, s, head, used);

    parts.cells.set_head(s, head.v_head);
    st.queries.slots = queries;
    st.pos_removable = head.pos_removable;
    st.pos_decayed   = head.pos_decayed;

    llama_h2o_update_index(parts, s);
    st.count = head.count; // also resets the time counters
}

void llama_h2o_read_state(llama_io_read_i & io, llama_h2o_parts & parts, uint32_t s0, uint32_t s1) {
    parts.ctx.synchronize();

    llama_h2o_state_reader in(io);

    expect_shape(in, parts);

    for (uint32_t s = s0; s < s1; ++s) {
        read_stream(in, parts, s);
    }
    parts.refused = false;
}
