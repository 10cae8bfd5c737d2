#include "cache/h2o-probe.h"

#include "cache/h2o-host-rows.h"
#include "kernels/h2o-kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

//
// attention of the last queries
//

static ggml_tensor * view_k(ggml_context * ctx, const llama_h2o_layer & layer, uint32_t s) {
    ggml_tensor * k = layer.tensors.k;

    const size_t size = ggml_row_size(layer.shape.k.type, layer.shape.k.n_embd_head);

    return ggml_view_3d(ctx, k, layer.shape.k.n_embd_head, layer.shape.k.n_cells, layer.shape.n_head_kv, k->nb[1], size,
            k->nb[2] * s);
}

// Mask: 0 if a query attends to a cell, otherwise -inf: [n_queries][n_cells]
static std::vector<float> make_mask(const llama_kv_cells & cells, const std::vector<llama_h2o_query_slot> & queries) {
    std::vector<float> mask;
    mask.reserve(queries.size() * cells.size());

    for (const auto & query : queries) {
        for (uint32_t i = 0; i < cells.size(); ++i) {
            // an empty slot has weight 0, but needs an unmasked cell. Rows newer than a query are recent, so they are in
            // cells of their own position
            const bool sees = query.pos < 0 || (!cells.is_empty(i) && cells.pos_get(i) <= query.pos);
            mask.push_back(sees ? 0.0f : -std::numeric_limits<float>::infinity());
        }
    }

    return mask;
}

// Weights of the probabilities in the sums: [n_head_kv][n_group][n_queries]
static std::vector<float> make_weights(
        const llama_h2o_layer & layer, const std::vector<llama_h2o_query_slot> & queries) {
    std::vector<float> weights;
    for (uint32_t head = 0; head < layer.shape.n_head; ++head) {
        for (const auto & query : queries) {
            weights.push_back(query.pos < 0 ? 0.0f : float(layer.shape.n_head_kv) / float(layer.shape.n_head));
        }
    }

    return weights;
}

static ggml_tensor * build_attention(llama_h2o_cache_graph & graph,
        const llama_h2o_layer & layer,
        ggml_tensor * k,
        ggml_tensor * mask,
        ggml_tensor * weights,
        uint32_t s) {
    ggml_context * ctx = graph.get_ctx();

    const int64_t n_cells   = k->ne[1];
    const int64_t n_queries = layer.tensors.queries->ne[1];
    const int64_t n_probs   = n_queries * layer.shape.n_group();

    ggml_tensor * q =
            ggml_view_3d(ctx, layer.tensors.queries, layer.tensors.queries->ne[0], n_queries, layer.shape.n_head,
                    layer.tensors.queries->nb[1], layer.tensors.queries->nb[2], layer.tensors.queries->nb[3] * s);

    ggml_tensor * probs = layer.attention.build_probs(ctx, q, k, mask); // [n_cells, n_queries, n_head]

    probs = ggml_reshape_3d(ctx, probs, n_cells, n_probs, layer.shape.n_head_kv);

    return layer.build_sum(ctx, probs, weights);
}

llama_h2o_cache_graph llama_h2o_build_probe(const llama_h2o_parts & parts, uint32_t s) {
    const auto & cells   = parts.cells[s];
    const auto & queries = parts.streams[s].queries.slots;

    llama_h2o_cache_graph graph(parts.layers.size());
    if (!parts.policy->has_need(LLAMA_H2O_NEEDS_QUERY_ATTENTION)) {
        return graph;
    }

    ggml_tensor * mask = graph.add_input(make_mask(cells, queries), cells.size(), queries.size(), 1);

    ggml_tensor * weights = nullptr;
    for (const auto & layer : parts.layers) {
        const uint32_t n_head_kv = layer.shape.n_head_kv;
        const int64_t n_probs    = int64_t(queries.size()) * layer.shape.n_group();
        if (!weights || weights->ne[1] != n_probs || weights->ne[2] != n_head_kv) {
            weights = graph.add_input(make_weights(layer, queries), 1, n_probs, n_head_kv);
        }
        graph.add_result(build_attention(graph, layer, view_k(graph.get_ctx(), layer, s), mask, weights, s));
    }

    return graph;
}

//
// the rows of a head
//

// Throws if a score is NaN or infinite: rows could not be sorted. Only a broken model or a corrupt state has such values.
static void expect_finite(const std::vector<float> & measured) {
    constexpr uint32_t EXPONENT = 0x7f800000;

    size_t n_others = 0;
    for (const float & x : measured) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof(bits));
        n_others += (bits & EXPONENT) == EXPONENT;
    }
    if (n_others > 0) {
        throw std::runtime_error("the attention of the model is infinite or no number");
    }
}

// Gathers the values of the cells in use, [used.size()].
static void gather(const float * all, const std::vector<uint32_t> & used, std::vector<float> & some) {
    some.resize(used.size());
    for (size_t i = 0; i < used.size(); ++i) {
        some[i] = all[used[i]];
    }
    expect_finite(some);
}

llama_h2o_sight::llama_h2o_sight(const llama_h2o_parts & parts,
        uint32_t s,
        const std::vector<uint32_t> & used,
        const std::vector<std::vector<float>> & probed) : parts(parts), s(s), used(used), probed(probed) {
    const auto & ring = parts.streams[s].queries.slots;
    for (uint32_t i = 0; i < ring.size(); ++i) {
        if (ring[i].pos >= 0) {
            slots.push_back(i);
        }
    }
    std::sort(slots.begin(), slots.end(), [&](uint32_t a, uint32_t b) { return ring[a].pos < ring[b].pos; });
    for (const uint32_t slot : slots) {
        query_pos.push_back(ring[slot].pos);
    }
}

const llama_h2o_head_rows & llama_h2o_sight::read(
        size_t ikv, uint32_t head, const llama_h2o_selection & selection, const float * sums, const float * squared) {
    const auto & layer              = parts.layers[ikv];
    const llama_h2o_policy & policy = *parts.policy;

    rows.il       = layer.shape.il;
    rows.head     = head;
    rows.n_group  = layer.shape.n_group();
    rows.n_rows   = used.size();
    rows.n_places = selection.n_places();
    rows.newest   = selection.newest();
    rows.pos      = selection.positions();
    rows.standing = selection.standings().data();

    if (policy.has_need(LLAMA_H2O_NEEDS_ATTENTION)) {
        gather(sums, used, attention);
        rows.attention = attention.data();
    }
    if (squared) {
        gather(squared, used, squares);
        rows.squares = squares.data();
    }
    if (!probed.empty()) {
        gather(probed[ikv].data() + size_t(head) * parts.n_cells, used, query_attention);
        rows.query_attention = query_attention.data();
    }
    if (policy.needs & (LLAMA_H2O_NEEDS_KEYS | LLAMA_H2O_NEEDS_VALUE_NORMS | LLAMA_H2O_NEEDS_QUERIES)) {
        see_vectors(layer, ikv, head);
    }

    return rows;
}

void llama_h2o_sight::see_vectors(const llama_h2o_layer & layer, size_t ikv, uint32_t head) {
    if (ikv != ikv_last) {
        ggml_tensor * v_tensor = layer.tensors.v ? layer.tensors.v : layer.tensors.k;

        k.emplace(parts.graphs, layer.tensors.k, layer.shape.k, s, used);
        v.emplace(parts.graphs, v_tensor, layer.shape.v, s, used);
        ikv_last = ikv;
    }

    const llama_h2o_rotation how = layer.rope->rotation();

    rows.n_embd_k    = layer.shape.k.n_embd_head;
    rows.kq_scale    = layer.attention.kq_scale;
    rows.rope_neox   = how.neox;
    rows.rope_first  = how.first;
    rows.n_rope      = how.n_dims;
    rows.rope_angles = layer.rope->known ? layer.rope->angles.data() : nullptr;

    if (parts.policy->has_need(LLAMA_H2O_NEEDS_KEYS)) {
        read_keys(layer, head);
    }
    if (parts.policy->has_need(LLAMA_H2O_NEEDS_VALUE_NORMS)) {
        read_value_norms(layer, head);
    }
    if (parts.policy->has_need(LLAMA_H2O_NEEDS_QUERIES)) {
        read_queries(layer, head);
    }
}

// Reads keys or queries without their Hadamard transform, if it is known. fn(i) is the address of row i.
template <typename F>
static void unmix(const llama_h2o_layer & layer, ggml_type type, size_t n_rows, size_t n_between, float * rows, F fn) {
    const uint32_t n_embd = layer.shape.k.n_embd_head;
    const auto rotate     = llama_h2o_best_kernel(0, 0)->rotate; // looked up at each call

    std::vector<float> space(n_embd);
    for (size_t i = 0; i < n_rows; ++i) {
        rotate(layer.rope->rotation(), nullptr, n_embd, layer.rope->form(type), fn(i), { GGML_TYPE_F32, 0 },
                rows + i * n_between, space.data());
    }
}

void llama_h2o_sight::read_keys(const llama_h2o_layer & layer, uint32_t head) {
    const auto & layout = layer.shape.k;

    keys.resize(used.size() * layout.n_embd_head);
    unmix(layer, layout.type, used.size(), layout.n_embd_head, keys.data(),
            [&](size_t i) { return k->at(head, used[i]); });
    rows.keys = keys.data();
}

void llama_h2o_sight::read_value_norms(const llama_h2o_layer & layer, uint32_t head) {
    std::vector<float> row(layer.shape.v.n_embd_head);
    value_norms.resize(used.size());
    for (size_t i = 0; i < used.size(); ++i) {
        v->read(head, used[i], row.data());

        double sum = 0.0;
        for (const float x : row) {
            sum += double(x) * x;
        }
        value_norms[i] = float(std::sqrt(sum));
    }
    rows.value_norms = value_norms.data();
}

void llama_h2o_sight::read_queries(const llama_h2o_layer & layer, uint32_t head) {
    rows.n_queries = slots.size();

    const ggml_tensor * ring = layer.tensors.queries;
    const size_t n_embd      = ring->ne[0];
    const size_t n_group     = layer.shape.n_group();

    std::vector<float> stored(n_embd * ring->ne[1]);
    queries.resize(slots.size() * n_group * n_embd);
    for (size_t g = 0; g < n_group; ++g) {
        const size_t offset = ring->nb[3] * s + ring->nb[2] * (head * n_group + g);
        ggml_backend_tensor_get(ring, stored.data(), offset, stored.size() * sizeof(float));
        unmix(layer, GGML_TYPE_F32, slots.size(), n_group * n_embd, queries.data() + g * n_embd,
                [&](size_t i) { return stored.data() + slots[i] * n_embd; });
    }
    rows.queries   = queries.data();
    rows.query_pos = query_pos.data();
}
