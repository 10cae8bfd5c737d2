// Compactions: the policy scores the rows of every head, the best are chosen, moved into the cells that stay, and the
// other cells are freed.

#include "cache/h2o-cache.h"

#include "cache/h2o-device-rows.h"
#include "cache/h2o-parallel.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

// Where the entries of a KV head begin in a stream of scores or squares.
static float * of_head(llama_h2o_host_rows & sums, const llama_h2o::layer & layer, uint32_t head) {
    return sums.f32() + size_t(head) * layer.k.n_cells;
}

// Rows cannot be put in order by what is no number, which only a model that has gone wrong computes, or a state that no
// cache has written.
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

// The cells in use, [used.size()], of something that there is for all cells.
template <typename T>
static std::vector<T> gather(const T * all, const std::vector<uint32_t> & used) {
    std::vector<T> res(used.size());
    for (size_t i = 0; i < used.size(); ++i) {
        res[i] = all[used[i]];
    }

    return res;
}

// The same of what was measured of a head: [n_probed][used.size()] of [n_probed][n_cells].
static std::vector<float> gather_probe(
        const float * all, size_t n_probed, size_t n_cells, const std::vector<uint32_t> & used) {
    std::vector<float> res;
    for (size_t i = 0; i < n_probed; ++i) {
        const std::vector<float> one = gather(all + i * n_cells, used);
        res.insert(res.end(), one.begin(), one.end());
    }

    return res;
}

void llama_h2o::compact(uint32_t s) {
    ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    auto & st = streams[s];

    const std::vector<uint32_t> used = used_cells(s);

    list_rows(s, used);
    st.marks.clear();

    collected rows = rows_of(s);

    forget(s, rows, newest(s));

    const llama_h2o_plan plan = llama_h2o_make_plan(select(s, rows, used), ctx.get_cparams().n_threads);

    move_rows(s, plan);
    move_lists(s, plan, rows);
    free_cells(s, plan.freed);

    // rows older than the recent ones are no longer complete, even if the tail is removed later; and one of the
    // recent ones has to stay, because llama.cpp goes on behind the newest position that a cell has
    st.pos_removable = std::max<int64_t>(st.pos_removable, int64_t(newest(s)) - int64_t(params.recent) + 2);

    st.count.n_compactions    += 1;
    st.count.n_cells_freed    += plan.freed.size();
    st.count.n_rows_evicted   += plan.freed.size() * n_heads();
    st.count.n_rows_moved     += plan.n_moves;
    st.count.t_compactions_us += ggml_time_us() - t_start_us;
}

llama_h2o::collected llama_h2o::rows_of(uint32_t s) const {
    collected rows;
    for (const auto & layer : layers) {
        rows.scores.emplace_back(layer.scores, s);
        if (layer.squares) {
            rows.squares.emplace_back(layer.squares, s);
        }
    }

    return rows;
}

//
// the choice
//

llama_h2o_rule llama_h2o::rule(uint32_t s) const {
    llama_h2o_rule res;
    res.n_budget = llama_h2o_n_budget(params);
    res.n_recent = params.recent;
    res.n_pinned = streams[s].n_pinned;
    res.spans    = streams[s].spans;
    res.starts   = streams[s].starts;
    res.newest   = newest(s);

    return res;
}

// Whether the heads of the layer or of the cache that choose together with this one all come before it.
bool llama_h2o::ends_scope(size_t ikv, uint32_t head) const {
    const bool last_of_layer = head + 1 == layers[ikv].n_head_kv;
    const bool last_layer    = ikv + 1 == layers.size();

    return last_of_layer && (policy->scope == llama_h2o_scope::layer || last_layer);
}

llama_h2o_keep llama_h2o::select(uint32_t s, collected & rows, std::vector<uint32_t> used) {
    llama_h2o_keep keep;
    keep.n_heads = n_heads();
    keep.n_keep  = std::min<uint64_t>(used.size(), llama_h2o_n_budget(params));
    keep.flags.resize(used.size() * keep.n_heads);
    keep.cells = std::move(used);

    const std::vector<std::vector<float>> probes = run(build_probe(s));

    if (policy->scope == llama_h2o_scope::cache) {
        select_layers(s, 0, layers.size(), probes, rows, keep);
    } else {
        llama_h2o_parallel(layers.size(), keep.flags.size(), ctx.get_cparams().n_threads,
                [&](size_t ikv) { select_layers(s, ikv, ikv + 1, probes, rows, keep); });
    }

    return keep;
}

void llama_h2o::select_layers(uint32_t s,
        size_t begin,
        size_t end,
        const std::vector<std::vector<float>> & probes,
        collected & rows,
        llama_h2o_keep & keep) const {
    const size_t n_used = keep.cells.size();

    const llama_h2o_rule rule = this->rule(s);
    llama_h2o_selection selection(rule);

    std::vector<double> score(n_used);
    std::vector<double> mean(n_used, 0.0); // over the heads that choose together: their sum, until the last one came

    uint32_t h     = first_head(begin);
    uint32_t first = h; // of these heads
    for (size_t ikv = begin; ikv < end; ++ikv) {
        for (uint32_t head = 0; head < layers[ikv].n_head_kv; ++head, ++h) {
            const auto pos = gather(streams[s].pos[ikv].data() + head * kv.get_size(), keep.cells);
            selection.set_rows(pos.data(), n_used);

            score_head(ikv, head, selection, probes.empty() ? nullptr : &probes[ikv], rows, keep.cells, score.data());

            if (policy->scope == llama_h2o_scope::head) {
                selection.choose(score.data(), keep.head(h));
                continue;
            }

            for (size_t i = 0; i < n_used; ++i) {
                mean[i] += score[i];
            }
            if (!ends_scope(ikv, head)) {
                continue;
            }
            for (double & x : mean) {
                x /= double(h + 1 - first);
            }

            // they chose alike before, so the rows of a cell are of one position
            selection.choose(mean.data(), keep.head(first));
            for (uint32_t other = first + 1; other <= h; ++other) {
                std::copy_n(keep.head(first), n_used, keep.head(other));
            }

            std::fill(mean.begin(), mean.end(), 0.0);
            first = h + 1;
        }
    }
}

// The scores of the rows that were given to the selection, [used.size()]. If the policy does not collect attention they
// are also put where the attention would be, for those who look at the rows.
void llama_h2o::score_head(size_t ikv,
        uint32_t head,
        const llama_h2o_selection & selection,
        const std::vector<float> * probe,
        collected & rows,
        const std::vector<uint32_t> & used,
        double * score) const {
    const auto & layer = layers[ikv];

    const size_t n_cells  = kv.get_size();
    const size_t n_probed = probe ? probe->size() / (n_cells * layer.n_head_kv) : 0;

    float * sums = of_head(rows.scores[ikv], layer, head);

    const auto attention = gather<float>(sums, used);
    const auto squares   = layer.squares ? gather<float>(of_head(rows.squares[ikv], layer, head), used) : attention;
    const auto measured  = probe ? gather_probe(probe->data() + head * n_probed * n_cells, n_probed, n_cells, used)
                                 : std::vector<float>();

    expect_finite(attention);
    expect_finite(squares);
    expect_finite(measured);

    const llama_h2o_head_rows head_rows {
        layer.il,
        head,
        layer.n_head / layer.n_head_kv,
        uint32_t(used.size()),
        selection.n_places(),
        selection.newest(),
        selection.positions(),
        selection.standings().data(),
        attention.data(),
        squares.data(),
        measured.data(),
    };
    policy->score(head_rows, score);

    for (size_t i = 0; i < used.size() && !layer.collects; ++i) {
        const bool competes = head_rows.standing[i] == llama_h2o_standing::competing;
        sums[used[i]]       = competes ? float(score[i]) : 0.0f;
    }
}

// What the policy leaves at a position of the attention that was collected.
void llama_h2o::forget(uint32_t s, collected & rows, llama_pos pos) {
    auto & st = streams[s];

    const double remaining = policy->remaining(std::max<int64_t>(0, int64_t(pos) - st.pos_forgotten));
    for (size_t ikv = 0; ikv < layers.size() && remaining != 1.0; ++ikv) {
        const size_t n = size_t(layers[ikv].n_head_kv) * kv.get_size();
        for (size_t i = 0; i < n; ++i) {
            rows.scores[ikv].f32()[i] *= float(remaining);
        }
    }

    st.pos_forgotten = pos;
}

//
// the rows
//

void llama_h2o::move_rows(uint32_t s, const llama_h2o_plan & plan) {
    llama_h2o_cache_graph graph(layers.size());

    const auto * moves = plan.moves.data();
    for (size_t ikv = 0; ikv < layers.size(); moves += layers[ikv].n_head_kv, ++ikv) {
        const auto & layer = layers[ikv];

        ggml_tensor * k = kv.layers[ikv].k;
        ggml_tensor * v = kv.layers[ikv].v;
        if (!layer.on_host) {
            llama_h2o_build_moves(graph, { k, layer.k, s * k->nb[2] }, { v, layer.v, s * v->nb[2] }, moves);
            continue;
        }

        llama_h2o_host_rows k_rows(k, s);
        llama_h2o_host_rows v_rows(v, s);
        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            llama_h2o_move_rows(k_rows.data(), layer.k, head, moves[head]);
            llama_h2o_move_rows(v_rows.data(), layer.v, head, moves[head]);
        }
    }

    run_in_place(graph);
}

// As many moves on devices as a compaction can make.
llama_h2o_cache_graph llama_h2o::build_most_moves() const {
    llama_h2o_cache_graph graph(layers.size());

    const size_t n_moves = std::min<uint64_t>(params.slack, llama_h2o_n_budget(params));
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];
        if (layer.on_host) {
            continue;
        }

        const std::vector<std::vector<llama_h2o_move>> moves(
                layer.n_head_kv, std::vector<llama_h2o_move>(n_moves, { 0, 0 }));
        llama_h2o_build_moves(graph, { kv.layers[ikv].k, layer.k, 0 }, { kv.layers[ikv].v, layer.v, 0 }, moves.data());
    }

    return graph;
}

// What is known of the rows follows them.
void llama_h2o::move_lists(uint32_t s, const llama_h2o_plan & plan, collected & rows) {
    auto & st = streams[s];

    uint32_t h = 0;
    for (size_t ikv = 0; ikv < layers.size(); ++ikv) {
        const auto & layer = layers[ikv];

        for (uint32_t head = 0; head < layer.n_head_kv; ++head, ++h) {
            float * score        = of_head(rows.scores[ikv], layer, head);
            float * square       = layer.squares ? of_head(rows.squares[ikv], layer, head) : nullptr;
            llama_pos * pos      = st.pos[ikv].data() + size_t(head) * kv.get_size();
            llama_pos * rope_pos = st.rope_pos[ikv].data() + size_t(head) * kv.get_size();
            for (const auto & move : plan.moves[h]) {
                score[move.dst]    = score[move.src];
                pos[move.dst]      = pos[move.src];
                rope_pos[move.dst] = rope_pos[move.src];
                if (square) {
                    square[move.dst] = square[move.src];
                }
            }
            for (const uint32_t cell : plan.freed) {
                score[cell] = 0.0f;
                if (square) {
                    square[cell] = 0.0f;
                }
            }
        }

        rows.scores[ikv].commit();
        if (layer.squares) {
            rows.squares[ikv].commit();
        }
    }
}

void llama_h2o::free_cells(uint32_t s, const std::vector<uint32_t> & freed) {
    for (const uint32_t cell : freed) {
        kv.v_cells[s].rm(cell);
        streams[s].listed[cell] = 0;
        kv.v_heads[s]           = std::min(kv.v_heads[s], cell);
    }
}
