// The state of a stream, as llama.cpp's state functions save and restore it: every row at its cell,
// so that a text goes on from it bit for bit as it would have gone on.

#include "cache/h2o-cache.h"

#include "cache/h2o-state-io.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

static constexpr uint32_t STATE_MAGIC   = 0x6f326800; // and the version in the last byte
static constexpr uint32_t MAX_POSITIONS = 0x7fffffff;

static_assert(LLAMA_H2O_STATE_VERSION < 0x100, "one byte");

int32_t llama_h2o_state_version(const void * data, size_t size) {
    // llama.cpp puts a number of its own and the sequence in front
    static constexpr size_t OFFSET = sizeof(uint32_t) + sizeof(llama_seq_id);

    uint32_t magic = 0;
    if (data && size >= OFFSET + sizeof(magic)) {
        std::memcpy(&magic, static_cast<const uint8_t *>(data) + OFFSET, sizeof(magic));
    }

    return (magic & ~0xffu) == STATE_MAGIC ? int32_t(magic & 0xff) : 0;
}

// What must be equal where a state is restored. Without gaps, so that every byte that is written has a value.
struct state_shape {
    uint32_t magic;
    uint32_t n_cells;
    uint32_t n_layer;
    uint32_t n_heads; // KV heads of all layers
    uint32_t v_trans;

    // the rule
    uint32_t heavy;
    uint32_t recent;
    uint32_t pinned;
    uint32_t slack;
    uint32_t n_pos;
    uint32_t positions;
    uint32_t n_policy; // bytes of its text, which follows
};

struct layer_shape {
    uint32_t il;
    uint32_t n_head_kv;
    uint32_t type_k;
    uint32_t type_v;
    uint32_t n_embd_k;
    uint32_t n_embd_v;
};

static void expect(bool fits, const char * what) {
    if (!fits) {
        throw std::runtime_error(format("the state does not fit: it has %s", what));
    }
}

// Calls fn(tensor, offset, size) for the pieces of a stream of K or V that hold its first n_span cells.
template <typename F>
static void for_each_row_piece(
        ggml_tensor * tensor, const llama_h2o_row_layout & layout, uint32_t s, uint32_t n_span, F fn) {
    const size_t first = tensor->nb[2] * s;

    if (!layout.transposed) {
        fn(tensor, first, ggml_row_size(layout.type, layout.n_embd) * n_span);
        return;
    }

    const size_t size = ggml_type_size(layout.type);
    for (size_t i = 0; i < layout.n_embd; ++i) {
        fn(tensor, first + i * size * layout.n_cells, size * n_span);
    }
}

// The same for all that a layer keeps of a stream, in the order of the state.
template <typename F>
static void for_each_tensor_piece(
        const llama_h2o::layer & layer, ggml_tensor * k, ggml_tensor * v, uint32_t s, uint32_t n_span, F fn) {
    layer.for_each_collected(s, n_span, fn);

    for_each_row_piece(k, layer.k, s, n_span, fn);
    for_each_row_piece(v, layer.v, s, n_span, fn);
}

static state_shape get_shape(
        const llama_h2o_params & params, const llama_kv_cache & kv, size_t n_layer, uint32_t n_heads, bool v_trans) {
    return {
        STATE_MAGIC | LLAMA_H2O_STATE_VERSION,
        kv.get_size(),
        uint32_t(n_layer),
        n_heads,
        v_trans ? 1u : 0u,
        params.heavy,
        params.recent,
        params.pinned,
        params.slack,
        params.n_pos,
        uint32_t(params.positions),
        uint32_t(std::strlen(params.policy)),
    };
}

static layer_shape get_shape(const llama_h2o::layer & layer) {
    return {
        layer.il,
        layer.n_head_kv,
        uint32_t(layer.k.type),
        uint32_t(layer.v.type),
        layer.k.n_embd,
        layer.v.n_embd,
    };
}

static bool operator==(const layer_shape & a, const layer_shape & b) {
    return a.il == b.il && a.n_head_kv == b.n_head_kv && a.type_k == b.type_k && a.type_v == b.type_v &&
           a.n_embd_k == b.n_embd_k && a.n_embd_v == b.n_embd_v;
}

static bool has_same_rule(const state_shape & a, const state_shape & b) {
    return a.heavy == b.heavy && a.recent == b.recent && a.pinned == b.pinned && a.slack == b.slack &&
           a.n_pos == b.n_pos && a.positions == b.positions && a.n_policy == b.n_policy;
}

//
// writing
//

void llama_h2o::state_write(llama_io_write_i & io, llama_seq_id seq_id) const {
    if (kv.has_cell_ext()) {
        throw std::runtime_error("the cells of this model have extra data that cannot be saved with eviction");
    }

    ctx.synchronize();

    llama_h2o_state_writer out(io);

    const state_shape shape = get_shape(params, kv, layers.size(), n_heads(), kv.v_trans);
    out.write(shape);
    out.write(params.policy, shape.n_policy);

    for (const auto & layer : layers) {
        out.write(get_shape(layer));
    }

    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        state_write_stream(out, s);
    }

    out.write_checksum();
}

void llama_h2o::state_write_stream(llama_h2o_state_writer & out, uint32_t s) const {
    const auto & st    = streams[s];
    const auto & cells = kv.v_cells[s];

    const std::vector<uint32_t> used = used_cells(s);

    stream_head head   = {};
    head.n_used        = used.size();
    head.n_span        = cells.used_max_p1();
    head.v_head        = kv.v_heads[s];
    head.n_pinned      = st.n_pinned;
    head.n_spans       = st.spans.size();
    head.n_starts      = st.starts.size();
    head.n_queries     = st.queries.size();
    head.shift         = st.shift;
    head.pos_removable = st.pos_removable;
    head.pos_forgotten = st.pos_forgotten;
    head.count         = st.count;
    out.write(head);

    out.write(st.spans);
    out.write(st.starts);
    out.write(st.queries);

    std::vector<llama_pos> cell_pos;
    std::vector<uint8_t> listed;
    for (const uint32_t cell : used) {
        cell_pos.push_back(cells.pos_get(cell));
        listed.push_back(st.listed[cell]);
    }
    out.write(used);
    out.write(cell_pos);
    out.write(listed);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        out.write(st.pos[ikv]);
        out.write(st.rope_pos[ikv]);

        for_each_tensor_piece(layer, kv.layers[ikv].k, kv.layers[ikv].v, s, head.n_span,
                [&](ggml_tensor * tensor, size_t offset, size_t size) { out.write(tensor, offset, size); });
    }
}

//
// reading
//

void llama_h2o::state_read(llama_io_read_i & io, llama_seq_id seq_id) {
    ctx.synchronize();

    llama_h2o_state_reader in(io);

    const state_shape mine = get_shape(params, kv, layers.size(), n_heads(), kv.v_trans);

    state_shape shape;
    in.read(shape);
    expect(shape.magic == mine.magic, "the format of another version");
    expect(has_same_rule(shape, mine), "another budget, slack, position scheme or policy");

    std::string policy_text(shape.n_policy, '\0');
    in.read(policy_text.data(), policy_text.size());
    expect(policy_text == params.policy, "another policy");
    expect(shape.n_cells == mine.n_cells, "another number of cells");
    expect(shape.n_layer == mine.n_layer && shape.n_heads == mine.n_heads, "another number of layers or heads");
    expect(shape.v_trans == mine.v_trans, "another setting of flash attention");

    for (const auto & layer : layers) {
        layer_shape shape_l;
        in.read(shape_l);
        expect(shape_l == get_shape(layer), "another shape or type of layer");
    }

    const auto [s0, s1] = stream_range(seq_id);

    try {
        for (uint32_t s = s0; s < s1; ++s) {
            state_read_stream(in, s);
        }
        expect(in.read_checksum(), "another checksum: it is damaged");
    } catch (...) {
        // what is there of it is of no use
        for (uint32_t s = s0; s < s1; ++s) {
            kv.v_cells[s].reset();
            kv.v_heads[s] = 0;
            reset_stream(s);
        }
        throw;
    }

    refused = false;
}

// A text may be written and set back, but these numbers go together in all that can be written.
void llama_h2o::expect_head(
        const stream_head & head, const std::vector<llama_h2o_query_slot> & queries, llama_pos newest) const {
    const int64_t n_tokens  = int64_t(newest) + 1;
    const int64_t n_queries = queries.size();

    const bool is_fresh = head.pos_removable == 0; // no compaction since the text began

    expect(head.shift >= 0 && head.shift <= n_tokens && head.pos_removable >= 0 && head.pos_removable <= n_tokens &&
                    head.pos_forgotten >= -1 &&
                    (is_fresh || head.pos_forgotten <= newest + int64_t(llama_h2o_n_capacity(params))),
            "positions that are out of range");

    const counters & count = head.count;
    expect(count.n_rows_evicted == count.n_cells_freed * n_heads() && count.n_rows_moved <= count.n_rows_evicted &&
                    count.n_compactions <= count.n_cells_freed && (is_fresh || count.n_compactions > 0) &&
                    (head.shift == 0 || count.n_rebases > 0),
            "counters that do not go together");

    for (int64_t i = 0; i < n_queries; ++i) {
        const auto & query = queries[i];
        expect(query.pos == -1 || (query.pos <= newest && query.pos > newest - n_queries &&
                                          query.pos % n_queries == i && query.rope_pos == query.pos - head.shift),
                "queries that are out of range");
    }
}

// A compaction relies on the rows of a head being of different positions of the text, a tail that is removed on its rows
// lying in cells of their own, and attention on rotations in the order of the text.
void llama_h2o::expect_rows(uint32_t s, const stream_head & head, const std::vector<uint32_t> & used) const {
    const auto & st    = streams[s];
    const auto & cells = kv.v_cells[s];

    struct row {
        llama_pos pos;
        llama_pos rope_pos;
    };

    const llama_pos next = newest(s) + 1;

    std::vector<row> rows;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        for (uint32_t h = 0; h < layers[ikv].n_head_kv; ++h) {
            rows.clear();
            for (const uint32_t cell : used) {
                const llama_pos own = cells.pos_get(cell);
                const llama_pos pos = row_pos(st, cells, ikv, h, cell);
                expect(own < head.pos_removable ? pos >= 0 && pos < head.pos_removable : pos == own,
                        "rows in cells of others");

                const llama_pos at =
                        st.listed[cell] ? st.rope_pos[ikv][size_t(h) * kv.get_size() + cell] : pos - head.shift;
                expect(at >= std::max(0, pos - head.shift) && at <= pos && uint32_t(at) < params.n_pos,
                        "rotary positions that are out of range");

                rows.push_back({ pos, at });
            }
            rows.push_back({ next, next - head.shift }); // the next token comes behind them

            std::sort(rows.begin(), rows.end(), [](const row & a, const row & b) { return a.pos < b.pos; });
            for (size_t i = 1; i < rows.size(); ++i) {
                expect(rows[i - 1].pos < rows[i].pos && rows[i - 1].rope_pos < rows[i].rope_pos,
                        "rows twice, or out of order");
            }
        }
    }
}

// Scores and squares are sums of probabilities, or what a policy made of such.
static void expect_sums(const llama_h2o::layer & layer, const std::vector<uint8_t> & bytes) {
    for (size_t i = 0; i < bytes.size(); i += sizeof(float)) {
        float x;
        std::memcpy(&x, bytes.data() + i, sizeof(x));
        expect(std::isfinite(x) && (x >= 0.0f || !layer.collects), "scores that are no sums");
    }
}

void llama_h2o::state_read_stream(llama_h2o_state_reader & in, uint32_t s) {
    auto & st    = streams[s];
    auto & cells = kv.v_cells[s];

    stream_head head;
    in.read(head);
    expect(head.n_used <= llama_h2o_n_capacity(params) && head.n_used <= head.n_span && head.n_span <= cells.size() &&
                    head.v_head <= cells.size() && head.n_spans <= params.pinned + uint64_t(params.heavy) &&
                    head.n_starts <= LLAMA_H2O_MAX_STARTS && head.n_queries == st.queries.size(),
            "counts that are out of range");

    std::vector<llama_h2o_span> spans(head.n_spans);
    std::vector<llama_pos> starts(head.n_starts);
    std::vector<llama_h2o_query_slot> queries(st.queries.size());
    in.read(spans);
    in.read(starts);
    in.read(queries);

    std::vector<uint32_t> used(head.n_used);
    std::vector<llama_pos> cell_pos(head.n_used);
    std::vector<uint8_t> listed(head.n_used);
    in.read(used);
    in.read(cell_pos);
    in.read(listed);

    std::vector<llama_pos> sorted = cell_pos;
    std::sort(sorted.begin(), sorted.end());
    expect(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(), "two cells of one position");

    cells.reset();
    reset_stream(s);
    std::fill(st.listed.begin(), st.listed.end(), 0);

    for (size_t i = 0; i < used.size(); ++i) {
        expect(used[i] < head.n_span && cells.is_empty(used[i]) && uint32_t(cell_pos[i]) < MAX_POSITIONS &&
                        listed[i] <= 1,
                "a cell that is out of range");

        cells.pos_set(used[i], cell_pos[i]);
        cells.seq_add(used[i], llama_seq_id(s));
        st.listed[used[i]] = listed[i];
    }
    expect(cells.used_max_p1() == head.n_span, "a cell that is missing");

    expect_head(head, queries, newest(s));
    expect(check_pins(head.n_pinned, spans) == LLAMA_H2O_OK && check_starts(starts) == LLAMA_H2O_OK,
            "pins or segments that make no sense");

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        in.read(st.pos[ikv]);
        in.read(st.rope_pos[ikv]);

        for_each_tensor_piece(layer, kv.layers[ikv].k, kv.layers[ikv].v, s, head.n_span,
                [&](ggml_tensor * tensor, size_t offset, size_t size) {
                    const auto & bytes = in.read(tensor, offset, size);
                    if (tensor == layer.scores || tensor == layer.squares) {
                        expect_sums(layer, bytes);
                    }
                });
    }

    expect_rows(s, head, used);

    kv.v_heads[s]    = head.v_head;
    st.n_pinned      = head.n_pinned;
    st.spans         = std::move(spans);
    st.starts        = std::move(starts);
    st.shift         = head.shift;
    st.pos_removable = head.pos_removable;
    st.pos_forgotten = head.pos_forgotten;
    st.queries       = std::move(queries);
    st.count         = head.count;
}
