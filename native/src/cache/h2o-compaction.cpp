#include "cache/h2o-compaction.h"

#include "cache/h2o-archiving.h"
#include "cache/h2o-collected.h"
#include "cache/h2o-device-choice.h"
#include "cache/h2o-parallel.h"
#include "cache/h2o-probe.h"
#include "policies/h2o-selection.h"

#include "llama-context.h"
#include "llama-impl.h"

#include <algorithm>
#include <array>
#include <map>

namespace {

// Chooses the rows of every (layer, KV head) of a stream whose scores are on the host.
struct choice {
    const llama_h2o_parts & parts;
    const uint32_t s;
    const llama_h2o_rule & rule;
    llama_h2o_collected & collected;
    const std::vector<std::vector<float>> & probes; // results of the probe, per layer; may be empty
    const std::vector<uint32_t> & used;             // cells, all listed
    llama_h2o_keep & keep;

    const llama_h2o_stream & stream       = parts.streams[s];
    const llama_h2o_policy & policy       = *parts.policy;
    const std::vector<int32_t> restorable = llama_h2o_restorable(stream); // pinned positions in the archive

    void make();
    void make_layers(size_t begin, size_t end);
    void keep_flagged(uint32_t h, const std::vector<uint8_t> & flags);
    bool ends_scope(const llama_h2o_layer_shape & layer, uint32_t head) const;
    void score_head(
            size_t ikv, uint32_t head, const llama_h2o_selection & selection, llama_h2o_sight & sight, double * score);
};

void choice::make() {
    const size_t n_layer = parts.layers.size();

    // an external scorer is called in this thread
    if (policy.scorer) {
        make_layers(0, n_layer);
    } else {
        llama_h2o_parallel(n_layer, keep.n_heads * used.size(), parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
            if (collected.scores(ikv, 0)) {
                make_layers(ikv, ikv + 1);
            }
        });
    }
}

void choice::make_layers(size_t begin, size_t end) {
    const size_t n_used = used.size();

    llama_h2o_selection selection(rule);
    llama_h2o_sight sight(parts, s, used, probes);

    // of the rows in the cells, then of the rows to restore
    std::vector<double> score(n_used + restorable.size());
    std::vector<uint8_t> flags(score.size());
    std::vector<double> mean(score.size(), 0.0); // sum over the heads of the scope, until the last one

    uint32_t first = parts.layers[begin].shape.first_head; // first head of the scope
    for (size_t ikv = begin; ikv < end; ++ikv) {
        const auto & layer = parts.layers[ikv].shape;

        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            const uint32_t h = layer.first_head + head;

            std::vector<int32_t> pos;
            for (const uint32_t cell : used) {
                pos.push_back(stream.rows.text_list(h)[cell]);
            }

            keep.missing[h] = llama_h2o_missing(restorable, pos);
            pos.insert(pos.end(), keep.missing[h].begin(), keep.missing[h].end());
            selection.set_rows(pos.data(), pos.size());

            score_head(ikv, head, selection, sight, score.data());

            if (policy.scope == LLAMA_H2O_SCOPE_HEAD) {
                selection.choose(score.data(), flags.data());
                keep_flagged(h, flags);
                continue;
            }

            for (size_t i = 0; i < n_used; ++i) {
                mean[i] += score[i];
            }
            if (!ends_scope(layer, head)) {
                continue;
            }
            for (double & x : mean) {
                x /= double(h + 1 - first);
            }

            // heads of a scope always choose the same rows, so all rows of a cell have one position
            selection.choose(mean.data(), flags.data());
            for (uint32_t other = first; other <= h; ++other) {
                keep_flagged(other, flags);
            }

            std::fill(mean.begin(), mean.end(), 0.0);
            first = h + 1;
        }
    }
}

//   flags   for each cell in use
void choice::keep_flagged(uint32_t h, const std::vector<uint8_t> & flags) {
    for (size_t i = 0; i < used.size(); ++i) {
        keep.head(h)[used[i] / 32] |= uint32_t(flags[i]) << used[i] % 32;
    }
}

// Whether this is the last head of its scope.
bool choice::ends_scope(const llama_h2o_layer_shape & layer, uint32_t head) const {
    const bool last_of_layer = head + 1 == layer.n_head_kv;
    const bool last_of_all   = layer.first_head + head + 1 == keep.n_heads;

    return policy.scope == LLAMA_H2O_SCOPE_LAYER ? last_of_layer : last_of_all;
}

// Scores the rows of the selection, [used.size()]. If the policy does not collect attention, the scores are also stored in its
// place, for llama_h2o_get_rows().
void choice::score_head(
        size_t ikv, uint32_t head, const llama_h2o_selection & selection, llama_h2o_sight & sight, double * score) {
    float * sums = collected.scores(ikv, head);

    const llama_h2o_head_rows & rows = sight.read(ikv, head, selection, sums, collected.squares(ikv, head));
    policy.score(rows, score);

    for (size_t i = 0; i < used.size() && !parts.layers[ikv].attention.collects; ++i) {
        sums[used[i]] = rows.standing[i] == LLAMA_H2O_COMPETING ? float(score[i]) : 0.0f;
    }
}

} // namespace

//
// moving rows
//

static uint32_t n_head_of(const llama_h2o_row_layout & layout) {
    return layout.n_embd / layout.n_embd_head;
}

static int64_t n_rows_of(const llama_h2o_row_layout & layout) {
    return int64_t(layout.n_cells) * n_head_of(layout);
}

// The rows of a stream, [., n_cells*n_head]; the heads of a cell are adjacent.
static ggml_tensor * view_rows(
        ggml_context * ctx, ggml_tensor * tensor, const llama_h2o_row_layout & layout, size_t offset) {
    const size_t size = ggml_row_size(layout.type, layout.n_embd_head);

    ggml_tensor * res = ggml_view_2d(ctx, tensor, layout.n_embd_head, n_rows_of(layout), size, offset);

    // rows are copied bitwise as 4-byte words. The few types whose row size is not a multiple of 4 bytes survive a
    // conversion to floats and back unchanged
    if (size % sizeof(float) == 0) {
        res->type  = GGML_TYPE_F32;
        res->ne[0] = int64_t(size / sizeof(float));
        res->nb[0] = sizeof(float);
    }

    return res;
}

// [KV heads of all layers]
using head_moves = std::vector<std::vector<llama_h2o_move>>;

// Moves in the index tensor of a layer: `n` sources, then `n` destinations.
struct move_list {
    size_t first;
    size_t n;
};

static move_list list_moves(
        std::vector<int32_t> & list, const llama_h2o_layer_shape & layer, uint32_t n_head, const head_moves & moves) {
    const size_t first = list.size();
    for (const auto cell : { &llama_h2o_move::src, &llama_h2o_move::dst }) {
        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            for (const auto & move : moves[layer.first_head + head]) {
                list.push_back(int32_t(move.*cell * n_head + head));
            }
        }
    }

    return { first, (list.size() - first) / 2 };
}

// Adds nodes that move the rows of a layer in K or V, like llama_h2o_move_rows(). Only indices are copied to the device, for
// all layers at once.
//   offset  of the stream in bytes
static void build_tensor_moves(llama_h2o_cache_graph & graph,
        const llama_h2o_layer & layer,
        ggml_tensor * tensor,
        const llama_h2o_row_layout & layout,
        size_t offset,
        const move_list & list) {
    if (list.n == 0) {
        return;
    }

    ggml_context * ctx = graph.get_ctx();

    ggml_tensor * from = ggml_view_1d(ctx, layer.tensors.moves, list.n, list.first * sizeof(int32_t));
    ggml_tensor * to   = ggml_view_1d(ctx, layer.tensors.moves, list.n, (list.first + list.n) * sizeof(int32_t));

    if (!layout.transposed) {
        ggml_tensor * all = view_rows(ctx, tensor, layout, offset);
        graph.add(ggml_set_rows(ctx, all, ggml_get_rows(ctx, all, from), to));
        return;
    }

    // V is transposed, so it is transposed to rows and back
    const size_t size_line = ggml_row_size(layout.type, layout.n_cells);

    ggml_tensor * lines = ggml_view_2d(ctx, tensor, layout.n_cells, layout.n_embd, size_line, offset);
    ggml_tensor * all   = ggml_cont(ctx, ggml_transpose(ctx, lines));

    all = ggml_reshape_2d(ctx, all, layout.n_embd_head, n_rows_of(layout));
    all = ggml_set_rows(ctx, all, ggml_get_rows(ctx, all, from), to);
    all = ggml_reshape_2d(ctx, all, layout.n_embd, layout.n_cells);

    graph.add(ggml_cpy(ctx, ggml_transpose(ctx, all), lines));
}

//   stays   F32 [n_cells], 0 for freed cells: moves the scores, too, and multiplies them; may be null
static void build_moves(llama_h2o_cache_graph & graph,
        const llama_h2o_layer & layer,
        uint32_t s,
        const head_moves & moves,
        ggml_tensor * stays) {
    // K and V share a list, unless V is padded to more heads, as in models whose layers differ in heads
    std::map<uint32_t, move_list> lists;
    for (const auto & [tensor, layout] : layer.rows()) {
        const uint32_t n_head = n_head_of(layout);
        if (lists.count(n_head) == 0) {
            lists[n_head] = list_moves(graph.lists[layer.tensors.moves], layer.shape, n_head, moves);
        }
        build_tensor_moves(graph, layer, tensor, layout, s * tensor->nb[2], lists[n_head]);
    }

    if (stays) {
        ggml_tensor * sums = layer.tensors.scores;

        build_tensor_moves(
                graph, layer, sums, llama_h2o_layout_of_sums(sums), s * sums->nb[2], lists.at(layer.shape.n_head_kv));
        sums = ggml_view_2d(graph.get_ctx(), sums, sums->ne[0], sums->ne[1], sums->nb[1], s * sums->nb[2]);
        graph.add(ggml_mul_inplace(graph.get_ctx(), sums, stays));
    }
}

//   with_sums   also move scores that stay on a device
static void move_rows(llama_h2o_parts & parts, uint32_t s, const llama_h2o_plan & plan, bool with_sums) {
    llama_h2o_cache_graph graph(parts.layers.size());

    ggml_tensor * stays = nullptr;
    if (with_sums) {
        std::vector<float> factors(parts.n_cells, 1.0f);
        for (const uint32_t cell : plan.freed) {
            factors[cell] = 0.0f;
        }
        stays = graph.add_input(std::move(factors), parts.n_cells, 1, 1);
    }

    for (const auto & layer : parts.layers) {
        if (!layer.shape.on_host) {
            build_moves(graph, layer, s, plan.moves, layer.tensors.choice.bits ? stays : nullptr);
            continue;
        }
        for (const auto & [tensor, layout] : layer.rows()) {
            llama_h2o_host_rows rows(tensor, s);
            for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
                llama_h2o_move_rows(rows.data(), layout, head, plan.moves[layer.shape.first_head + head]);
            }
            rows.commit();
        }
    }

    parts.graphs.run(graph);
}

void llama_h2o_try_moves(llama_h2o_parts & parts) {
    static constexpr std::array<uint32_t, 4> WORDS = { 1, 0x807fffff, 0x7f800001, 0xffffffff }; // denormals and NaN

    // rows on the host need no test, and have no memory if the model was loaded without weights
    const auto size_in = [](const llama_h2o_layer & layer) {
        const size_t size_row = ggml_row_size(layer.shape.k.type, layer.shape.k.n_embd_head);

        return layer.shape.on_host || size_row % sizeof(float) != 0 ? 0 : sizeof(WORDS);
    };

    llama_h2o_plan plan;
    plan.moves.resize(parts.n_heads());
    std::vector<std::array<uint32_t, 4>> before;
    uint32_t n_refused = 0;
    for (auto & layer : parts.layers) {
        const std::vector<llama_h2o_move> most(layer.shape.on_host ? 0 : parts.max_moves(), { 0, 0 });
        std::fill_n(plan.moves.begin() + layer.shape.first_head, layer.shape.n_head_kv, most);

        // the scheduler aborts if an op that a device lacks writes to its memory
        llama_h2o_cache_graph graph(1);
        build_moves(graph, layer, 0, plan.moves, nullptr);
        const bool lacks_ops  = !graph.runs_next_to(layer.tensors.k);
        layer.shape.on_host  |= lacks_ops;
        n_refused            += lacks_ops;

        ggml_backend_tensor_get(layer.tensors.k, before.emplace_back().data(), 0, size_in(layer));
        ggml_backend_tensor_set(layer.tensors.k, WORDS.data(), 0, size_in(layer));
    }

    move_rows(parts, 0, plan, false);

    for (size_t ikv = 0; ikv < before.size(); ++ikv) {
        auto & layer = parts.layers[ikv];
        auto moved   = WORDS;
        ggml_backend_tensor_get(layer.tensors.k, moved.data(), 0, size_in(layer));
        ggml_backend_tensor_set(layer.tensors.k, before[ikv].data(), 0, size_in(layer));
        layer.shape.on_host |= moved != WORDS;
        n_refused           += moved != WORDS;
    }
    if (n_refused > 0) {
        LLAMA_LOG_WARN("%s: a device cannot move rows: the CPU moves those of %u layers, which is slow\n", __func__,
                n_refused);
        for (auto & layer : parts.layers) {
            layer.tensors.choice = {};
        }
    }
}

// Moves the scores of a head along with its rows. Restored rows start with 0.
static void move_sums(float * sums, const llama_h2o_plan & plan, uint32_t h) {
    if (!sums) {
        return;
    }

    for (const auto & move : plan.moves[h]) {
        sums[move.dst] = sums[move.src];
    }
    for (const uint32_t cell : plan.freed) {
        sums[cell] = 0.0f;
    }
    for (const auto & one : plan.restored[h]) {
        sums[one.cell] = 0.0f;
    }
}

static void move_lists(
        llama_h2o_parts & parts, uint32_t s, const llama_h2o_plan & plan, llama_h2o_collected & collected) {
    auto & rows = parts.streams[s].rows;

    llama_h2o_parallel(parts.layers.size(), plan.n_moves, parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
        const auto & layer = parts.layers[ikv].shape;

        for (uint32_t head = 0; head < layer.n_head_kv; ++head) {
            const uint32_t h = layer.first_head + head;

            rows.move(h, plan.moves[h]);
            move_sums(collected.scores(ikv, head), plan, h);
            move_sums(collected.squares(ikv, head), plan, h);
        }
    });
    collected.commit();

    parts.cells.free(s, plan.freed);
    for (const uint32_t cell : plan.freed) {
        rows.unlist(cell);
    }
}

// Moves the kept rows of every head into the cells that stay, and frees the other cells.
//   with_sums   also move scores that stay on a device
static llama_h2o_plan leave(llama_h2o_parts & parts,
        uint32_t s,
        const llama_h2o_keep & keep,
        llama_h2o_collected & collected,
        bool with_sums) {
    llama_h2o_plan plan = llama_h2o_make_plan(keep, parts.ctx.get_cparams().n_threads);

    parts.change_rows(s, [&] {
        move_rows(parts, s, plan, with_sums);
        move_lists(parts, s, plan, collected);
        llama_h2o_restore(parts, s, plan.restored);
    });

    return plan;
}

void llama_h2o_leave(llama_h2o_parts & parts, uint32_t s, const llama_h2o_keep & keep) {
    llama_h2o_collected collected(parts, s, false);
    leave(parts, s, keep, collected, false);
}

void llama_h2o_compact(llama_h2o_parts & parts, uint32_t s) {
    parts.ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    auto & st = parts.streams[s];

    const std::vector<uint32_t> used = parts.cells.used(s);

    st.rows.list(used, parts.cells.positions(s, used));
    st.marks.clear();

    llama_h2o_archive_rows(parts, s);

    llama_h2o_rule rule                   = {};
    static_cast<llama_h2o_claims &>(rule) = st.claims;
    rule.n_budget                         = std::min<uint64_t>(used.size(), parts.n_budget());
    rule.n_recent                         = parts.params.recent;
    rule.newest                           = parts.cells.newest(s);

    const bool asks = llama_h2o_asks_devices(parts, s, rule);

    llama_h2o_collected collected(parts, s, asks);
    const float remaining = collected.decay(rule.newest);
    if (asks) {
        parts.change_rows(s, [&] { llama_h2o_ask_devices(parts, s, rule, used, remaining); });
    }

    const std::vector<std::vector<float>> probes = parts.graphs.run(llama_h2o_build_probe(parts, s));

    llama_h2o_keep keep(parts.n_heads(), parts.n_cells, used);
    keep.n_keep = rule.n_budget;
    choice { parts, s, rule, collected, probes, used, keep }.make();
    if (asks) {
        llama_h2o_read_answers(parts, keep);
    }
    const llama_h2o_plan plan = leave(parts, s, keep, collected, asks);

    // rows before the recent ones are incomplete now, even if the tail is removed later. One recent row must remain,
    // because llama.cpp continues after the newest position in a cell
    st.pos_removable = std::max<int64_t>(st.pos_removable, parts.cells.newest(s) - int64_t(parts.params.recent) + 2);

    llama_h2o_update_index(parts, s);

    st.count.n_compactions    += 1;
    st.count.n_cells_freed    += plan.freed.size();
    st.count.n_rows_evicted   += plan.freed.size() * parts.n_heads();
    st.count.n_rows_moved     += plan.n_moves;
    st.count.t_compactions_us += ggml_time_us() - t_start_us;
}
