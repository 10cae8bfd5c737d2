#include "cache/h2o-probe.h"

#include "kernels/h2o-kernel.h"

#include <cmath>
#include <limits>

static constexpr float L2_EPS = 1e-12f;

//
// rows and queries as the graph sees them
//

static ggml_tensor * view_k(ggml_context * ctx, const llama_h2o_layer & layer, uint32_t s) {
    ggml_tensor * k = layer.tensors.k;

    const size_t size = ggml_row_size(layer.shape.k.type, layer.shape.k.n_embd_head);

    return ggml_view_3d(ctx, k, layer.shape.k.n_embd_head, layer.shape.k.n_cells, layer.shape.n_head_kv, k->nb[1], size,
            k->nb[2] * s);
}

// in rows, whatever the layout
static ggml_tensor * view_v(ggml_context * ctx, const llama_h2o_layer & layer, uint32_t s) {
    ggml_tensor * v = layer.tensors.v ? layer.tensors.v : layer.tensors.k;

    if (!layer.shape.v.transposed) {
        const size_t size = ggml_row_size(layer.shape.v.type, layer.shape.v.n_embd_head);

        return ggml_view_3d(ctx, v, layer.shape.v.n_embd_head, layer.shape.v.n_cells, layer.shape.n_head_kv, v->nb[1],
                size, v->nb[2] * s);
    }

    const size_t nb_row = ggml_type_size(layer.shape.v.type) * layer.shape.v.n_cells;

    ggml_tensor * cur = ggml_view_3d(ctx, v, layer.shape.v.n_cells, layer.shape.v.n_embd_head, layer.shape.n_head_kv,
            nb_row, nb_row * layer.shape.v.n_embd_head, v->nb[2] * s);

    return ggml_permute(ctx, cur, 1, 0, 2, 3);
}

static ggml_tensor * as_f32(ggml_context * ctx, ggml_tensor * cur) {
    return cur->type == GGML_TYPE_F32 ? ggml_cont(ctx, cur) : ggml_cast(ctx, cur, GGML_TYPE_F32);
}

//
// attention of the last queries
//

// 0 where a query sees a cell, else minus infinity: [n_queries][n_cells]
static std::vector<float> make_mask(const llama_kv_cells & cells, const std::vector<llama_h2o_query_slot> & queries) {
    std::vector<float> mask;
    mask.reserve(queries.size() * cells.size());

    for (const auto & query : queries) {
        for (uint32_t i = 0; i < cells.size(); ++i) {
            // a slot without a query counts for nothing, but has to see something. Rows newer than a query are recent
            // and lie in cells of their own position
            const bool sees = query.pos < 0 || (!cells.is_empty(i) && cells.pos_get(i) <= query.pos);
            mask.push_back(sees ? 0.0f : -std::numeric_limits<float>::infinity());
        }
    }

    return mask;
}

// What the probabilities are multiplied with before they are added up: [n_head_kv][n_group][n_queries]
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

    return ggml_out_prod(ctx, probs, weights);
}

//
// directions of the keys
//

static ggml_tensor * build_keys(
        llama_h2o_cache_graph & graph, const llama_h2o_layer & layer, ggml_tensor * k, ggml_tensor * used) {
    ggml_context * ctx = graph.get_ctx();

    ggml_tensor * units = ggml_l2_norm(ctx, as_f32(ctx, k), L2_EPS);

    ggml_tensor * ones = ggml_repeat_4d(ctx, used, used->ne[0], 1, layer.shape.n_head_kv, 1);
    ggml_tensor * mean = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, units)), ones);

    mean = ggml_reshape_3d(ctx, mean, units->ne[0], 1, layer.shape.n_head_kv);

    return ggml_mul_mat(ctx, units, ggml_l2_norm(ctx, mean, L2_EPS));
}

//
// the expected query
//

// Mean and covariance of the queries of each head, turned on to the future.
struct expected_queries {
    std::vector<float> mean;       // [n_head][n_embd]
    std::vector<float> covariance; // [n_head][n_embd][n_embd]; or empty
};

// What turns a query of rope position p into its mean over the n_horizon positions from next on, for every pair.
static std::vector<float> make_turn(const llama_h2o_rope & rope, llama_pos p, llama_pos next, uint32_t n_horizon) {
    std::vector<float> res(2 * rope.turning().n_dims);
    for (size_t i = 0; i < rope.angles.size(); ++i) {
        const double angle = rope.angles[i];

        // a geometric series: the mean has the direction of the middle
        const double n      = n_horizon;
        const double sine   = std::sin(angle / 2);
        const double size   = std::abs(sine) < 1e-12 ? 1.0 : std::sin(n * angle / 2) / (n * sine);
        const double middle = angle * (double(next) - p + (n - 1) / 2);

        rope.turning().set_factors(i, size * std::cos(middle), size * std::sin(middle), res.data());
    }

    return res;
}

static expected_queries expect_queries(const llama_h2o_layer & layer,
        const std::vector<llama_h2o_query_slot> & queries,
        const llama_h2o_policy & policy,
        llama_pos next,
        uint32_t s) {
    const uint32_t n_embd = layer.tensors.queries->ne[0];

    std::vector<std::vector<float>> turns;
    for (const auto & query : queries) {
        if (query.pos >= 0) {
            turns.push_back(make_turn(*layer.rope, query.rope_pos, next, policy.n_horizon));
        }
    }

    expected_queries res;
    res.mean.resize(size_t(layer.shape.n_head) * n_embd);
    res.covariance.resize(policy.covariance ? size_t(layer.shape.n_head) * n_embd * n_embd : 0);

    const auto form = layer.rope->form(GGML_TYPE_F32);
    const auto turn = llama_h2o_best_kernel(0, 0)->turn;

    std::vector<float> space(n_embd);
    std::vector<float> ring(n_embd * queries.size());
    for (uint32_t head = 0; head < layer.shape.n_head && !turns.empty(); ++head) {
        ggml_backend_tensor_get(layer.tensors.queries, ring.data(),
                layer.tensors.queries->nb[3] * s + layer.tensors.queries->nb[2] * head, ring.size() * sizeof(float));

        std::vector<std::vector<float>> turned;
        for (size_t i = 0; i < queries.size(); ++i) {
            if (queries[i].pos >= 0) {
                const float * row = ring.data() + i * n_embd;
                turned.emplace_back(n_embd);
                turn(layer.rope->turning(), turns[turned.size() - 1].data(), n_embd, form, row, form,
                        turned.back().data(), space.data());
            }
        }

        float * mean = res.mean.data() + size_t(head) * n_embd;
        for (const auto & row : turned) {
            for (uint32_t i = 0; i < n_embd; ++i) {
                mean[i] += row[i] / float(turned.size());
            }
        }

        for (size_t r = 0; policy.covariance && r < turned.size(); ++r) {
            float * cov = res.covariance.data() + size_t(head) * n_embd * n_embd;
            for (uint32_t i = 0; i < n_embd; ++i) {
                for (uint32_t j = 0; j < n_embd; ++j) {
                    cov[i * n_embd + j] += (turned[r][i] - mean[i]) * (turned[r][j] - mean[j]) / float(turned.size());
                }
            }
        }
    }

    return res;
}

static ggml_tensor * build_expected(llama_h2o_cache_graph & graph,
        const llama_h2o_layer & layer,
        ggml_tensor * k,
        ggml_tensor * v,
        const expected_queries & queries) {
    ggml_context * ctx = graph.get_ctx();

    const int64_t n_embd  = k->ne[0];
    const int64_t n_cells = k->ne[1];
    const int64_t n_group = layer.shape.n_group();
    const bool spread     = !queries.covariance.empty();

    ggml_tensor * mean = graph.add_input(queries.mean, n_embd, n_group, layer.shape.n_head_kv);

    ggml_tensor * logits =
            ggml_scale(ctx, ggml_mul_mat(ctx, k, mean), layer.attention.kq_scale); // [n_cells, n_group, n_head_kv]

    if (spread) {
        ggml_tensor * rows = as_f32(ctx, k);
        ggml_tensor * cov  = graph.add_input(queries.covariance, n_embd, n_embd * n_group, layer.shape.n_head_kv);

        ggml_tensor * cur =
                ggml_reshape_4d(ctx, ggml_mul_mat(ctx, cov, rows), n_embd, n_group, n_cells, layer.shape.n_head_kv);

        rows = ggml_reshape_4d(ctx, rows, n_embd, 1, n_cells, layer.shape.n_head_kv);
        cur  = ggml_sum_rows(ctx, ggml_mul(ctx, cur, rows));
        cur  = ggml_reshape_3d(ctx, cur, n_group, n_cells, layer.shape.n_head_kv);
        cur  = ggml_cont(ctx, ggml_transpose(ctx, cur));

        logits = ggml_add(ctx, logits, ggml_scale(ctx, cur, layer.attention.kq_scale * layer.attention.kq_scale / 2));
    }

    ggml_tensor * length = ggml_sqrt(ctx, ggml_sum_rows(ctx, ggml_sqr(ctx, as_f32(ctx, v))));

    length = ggml_reshape_3d(ctx, length, n_cells, 1, layer.shape.n_head_kv);

    return ggml_concat(ctx, logits, length, 1);
}

//
// one run
//

llama_h2o_cache_graph llama_h2o_build_probe(const llama_h2o_parts & parts, uint32_t s) {
    const llama_h2o_policy & policy = *parts.policy;

    const auto & cells   = parts.cells[s];
    const auto & queries = parts.streams[s].queries.slots();

    llama_h2o_cache_graph graph(parts.layers.size());
    if (policy.probe == llama_h2o_probe_type::none) {
        return graph;
    }

    ggml_tensor * mask = nullptr;
    ggml_tensor * used = nullptr;
    if (policy.probe == llama_h2o_probe_type::attention) {
        mask = graph.add_input(make_mask(cells, queries), cells.size(), queries.size(), 1);
    }
    if (policy.probe == llama_h2o_probe_type::keys) {
        std::vector<float> flags(cells.size(), 0.0f);
        for (const uint32_t cell : parts.cells.used(s)) {
            flags[cell] = 1.0f;
        }
        used = graph.add_input(flags, cells.size(), 1, 1);
    }

    const llama_pos next = parts.streams[s].rows.rope_pos(parts.cells.newest(s) + 1);

    ggml_tensor * weights = nullptr;
    for (const auto & layer : parts.layers) {
        const uint32_t n_head_kv = layer.shape.n_head_kv;

        ggml_tensor * k = view_k(graph.get_ctx(), layer, s);
        ggml_tensor * v = view_v(graph.get_ctx(), layer, s);

        switch (policy.probe) {
            case llama_h2o_probe_type::none:
                break;
            case llama_h2o_probe_type::attention: {
                const int64_t n_probs = int64_t(queries.size()) * layer.shape.n_group();
                if (!weights || weights->ne[1] != n_probs || weights->ne[2] != n_head_kv) {
                    weights = graph.add_input(make_weights(layer, queries), 1, n_probs, n_head_kv);
                }
                graph.add_result(build_attention(graph, layer, k, mask, weights, s));
                break;
            }
            case llama_h2o_probe_type::keys:
                graph.add_result(build_keys(graph, layer, k, used));
                break;
            case llama_h2o_probe_type::expected:
                graph.add_result(build_expected(graph, layer, k, v, expect_queries(layer, queries, policy, next, s)));
                break;
        }
    }

    return graph;
}
