// The state of a stream, as llama.cpp's state functions save and restore it: every row at its cell,
// so that a text goes on from it bit for bit as it would have gone on.

#include "cache/h2o-cache.h"

#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-io.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

static constexpr uint32_t STATE_MAGIC   = 0x6f326806; // changes with the layout of what follows
static constexpr uint32_t MAX_POSITIONS = 0x7fffffff;

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

template <typename T>
static void write_all(llama_io_write_i & io, const std::vector<T> & data) {
    io.write(data.data(), data.size() * sizeof(T));
}

template <typename T>
static void read_all(llama_io_read_i & io, std::vector<T> & data) {
    io.read(data.data(), data.size() * sizeof(T));
}

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
    for (ggml_tensor * sums : { layer.scores, layer.squares }) {
        for (uint32_t head = 0; sums && head < layer.n_head_kv; ++head) {
            fn(sums, sums->nb[2] * s + sums->nb[1] * head, n_span * sizeof(float));
        }
    }
    if (layer.queries) {
        fn(layer.queries, layer.queries->nb[3] * s, layer.queries->nb[3]);
    }

    for_each_row_piece(k, layer.k, s, n_span, fn);
    for_each_row_piece(v, layer.v, s, n_span, fn);
}

static state_shape get_shape(
        const llama_h2o_params & params, const llama_kv_cache & kv, size_t n_layer, uint32_t n_heads, bool v_trans) {
    return {
        STATE_MAGIC,
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

    const state_shape shape = get_shape(params, kv, layers.size(), n_heads(), kv.v_trans);
    io.write(&shape, sizeof(shape));
    io.write(params.policy, shape.n_policy);

    for (const auto & layer : layers) {
        const layer_shape shape_l = get_shape(layer);
        io.write(&shape_l, sizeof(shape_l));
    }

    const auto [s0, s1] = stream_range(seq_id);

    for (uint32_t s = s0; s < s1; ++s) {
        state_write_stream(io, s);
    }
}

void llama_h2o::state_write_stream(llama_io_write_i & io, uint32_t s) const {
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
    io.write(&head, sizeof(head));

    write_all(io, st.spans);
    write_all(io, st.starts);
    write_all(io, st.queries);

    std::vector<llama_pos> cell_pos;
    std::vector<uint8_t> listed;
    for (const uint32_t cell : used) {
        cell_pos.push_back(cells.pos_get(cell));
        listed.push_back(st.listed[cell]);
    }
    write_all(io, used);
    write_all(io, cell_pos);
    write_all(io, listed);

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        write_all(io, st.pos[ikv]);
        write_all(io, st.rope_pos[ikv]);

        for_each_tensor_piece(layer, kv.layers[ikv].k, kv.layers[ikv].v, s, head.n_span,
                [&](ggml_tensor * tensor, size_t offset, size_t size) { io.write_tensor(tensor, offset, size); });
    }
}

//
// reading
//

void llama_h2o::state_read(llama_io_read_i & io, llama_seq_id seq_id) {
    ctx.synchronize();

    const state_shape mine = get_shape(params, kv, layers.size(), n_heads(), kv.v_trans);

    state_shape shape;
    io.read(&shape, sizeof(shape));
    expect(shape.magic == mine.magic, "another format");
    expect(has_same_rule(shape, mine), "another budget, slack, position scheme or policy");

    std::string policy_text(shape.n_policy, '\0');
    io.read(policy_text.data(), policy_text.size());
    expect(policy_text == params.policy, "another policy");
    expect(shape.n_cells == mine.n_cells, "another number of cells");
    expect(shape.n_layer == mine.n_layer && shape.n_heads == mine.n_heads, "another number of layers or heads");
    expect(shape.v_trans == mine.v_trans, "another setting of flash attention");

    for (const auto & layer : layers) {
        layer_shape shape_l;
        io.read(&shape_l, sizeof(shape_l));
        expect(shape_l == get_shape(layer), "another shape or type of layer");
    }

    const auto [s0, s1] = stream_range(seq_id);

    try {
        for (uint32_t s = s0; s < s1; ++s) {
            state_read_stream(io, s);
        }
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

// A compaction relies on the rows of a head being of different positions of the text.
void llama_h2o::expect_rows(uint32_t s, const std::vector<uint32_t> & used) const {
    const auto & cells = kv.v_cells[s];

    std::vector<llama_pos> pos;

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        for (uint32_t h = 0; h < layers[ikv].n_head_kv; ++h) {
            pos.clear();
            for (const uint32_t cell : used) {
                pos.push_back(row_pos(streams[s], cells, ikv, h, cell));
            }
            std::sort(pos.begin(), pos.end());

            const bool distinct = std::adjacent_find(pos.begin(), pos.end()) == pos.end();
            expect(pos.empty() || (distinct && pos.front() >= 0 && pos.back() <= newest(s)), "rows that cannot be");
        }
    }
}

void llama_h2o::state_read_stream(llama_io_read_i & io, uint32_t s) {
    auto & st    = streams[s];
    auto & cells = kv.v_cells[s];

    stream_head head;
    io.read(&head, sizeof(head));
    expect(head.n_used <= llama_h2o_n_capacity(params) && head.n_used <= head.n_span && head.n_span <= cells.size() &&
                    head.v_head <= cells.size() && head.n_pinned <= params.pinned + params.heavy &&
                    head.n_spans <= params.pinned + params.heavy && head.n_starts <= LLAMA_H2O_MAX_STARTS &&
                    head.n_queries == st.queries.size(),
            "counts that are out of range");

    std::vector<llama_h2o_span> spans(head.n_spans);
    std::vector<llama_pos> starts(head.n_starts);
    std::vector<llama_h2o_query_slot> queries(st.queries.size());
    read_all(io, spans);
    read_all(io, starts);
    read_all(io, queries);

    std::vector<uint32_t> used(head.n_used);
    std::vector<llama_pos> cell_pos(head.n_used);
    std::vector<uint8_t> listed(head.n_used);
    read_all(io, used);
    read_all(io, cell_pos);
    read_all(io, listed);

    cells.reset();
    reset_stream(s);
    std::fill(st.listed.begin(), st.listed.end(), 0);

    for (size_t i = 0; i < used.size(); ++i) {
        expect(used[i] < head.n_span && cells.is_empty(used[i]) && uint32_t(cell_pos[i]) < MAX_POSITIONS,
                "a cell that is out of range");

        cells.pos_set(used[i], cell_pos[i]);
        cells.seq_add(used[i], llama_seq_id(s));
        st.listed[used[i]] = listed[i] != 0;
    }
    expect(cells.used_max_p1() == head.n_span, "a cell that is missing");

    const int64_t n_tokens = int64_t(newest(s)) + 1;
    expect(head.shift >= 0 && head.shift <= n_tokens && head.pos_removable >= 0 && head.pos_removable <= n_tokens &&
                    head.pos_forgotten >= -1,
            "positions that are out of range");
    for (const auto & query : queries) {
        expect(query.pos >= -1 && query.pos < n_tokens, "queries that are out of range");
    }
    expect(pin_spans(llama_seq_id(s), spans) == LLAMA_H2O_OK && share_fairly(llama_seq_id(s), starts) == LLAMA_H2O_OK,
            "spans that make no sense");

    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        read_all(io, st.pos[ikv]);
        read_all(io, st.rope_pos[ikv]);

        for_each_tensor_piece(layer, kv.layers[ikv].k, kv.layers[ikv].v, s, head.n_span,
                [&](ggml_tensor * tensor, size_t offset, size_t size) { io.read_tensor(tensor, offset, size); });
    }

    expect_rows(s, used);

    kv.v_heads[s]    = head.v_head;
    st.n_pinned      = head.n_pinned;
    st.shift         = head.shift;
    st.pos_removable = head.pos_removable;
    st.pos_forgotten = head.pos_forgotten;
    st.queries       = std::move(queries);
    st.count         = head.count;
}
