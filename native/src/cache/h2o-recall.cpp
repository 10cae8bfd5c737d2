#include "cache/h2o-recall.h"

#include "cache/h2o-parallel.h"
#include "cache/h2o-parts.h"
#include "cache/h2o-recall-scan.h"

#include "llama-context.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>

// Recalled rows are in the past of every query, wherever they come from.
static constexpr llama_pos CELL_POS = 0;

// Queries of each head that ask: their number is what the search takes its time for.
static constexpr uint32_t MOST_ASKING = 16;

//
// the choice
//

//   asking   slots of the queries that ask
static llama_h2o_hidden look(const llama_h2o_parts & parts, uint32_t s, const std::vector<uint32_t> & asking) {
    const auto & archive = *parts.streams[s].archive;

    llama_h2o_hidden hidden = {};

    hidden.start = int32_t(archive.page_begin() * llama_h2o_archive::N_PAGE);
    hidden.first = archive.first();
    hidden.next  = archive.next();
    hidden.resident.resize(parts.n_heads());
    hidden.of_heads.resize(parts.n_heads());

    // keys are looked at by many queries, so few of them are worth a thread
    const size_t n_work = size_t(parts.n_heads()) * (hidden.next - hidden.start) * asking.size();

    llama_h2o_parallel(parts.layers.size(), n_work, parts.ctx.get_cparams().n_threads, [&](size_t ikv) {
        const auto & shape = parts.layers[ikv].shape;

        llama_h2o_layer_scan scan = llama_h2o_scan_layer(parts, s, ikv, asking);
        for (uint32_t head = 0; head < shape.n_head_kv; ++head) {
            hidden.resident[shape.first_head + head] = std::move(scan.resident[head]);
            hidden.of_heads[shape.first_head + head] = llama_h2o_weigh_blocks(scan.of_heads[head]);
        }
    });
    for (const auto & layer : parts.layers) {
        hidden.n_query_heads += layer.shape.n_head;
    }
    for (uint32_t page = archive.page_begin(); page < archive.page_end(); ++page) {
        archive.release(page);
    }

    return hidden;
}

//
// the rows
//

void llama_h2o_drop_rows(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];
    if (st.recalled.cells.empty()) {
        return;
    }

    parts.cells.free(s, st.recalled.cells);
    for (const uint32_t cell : st.recalled.cells) {
        st.rows.unlist(cell);
    }
    st.recalled = {};
    st.stale    = true;
}

void llama_h2o_drop_lost_rows(llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    if (!st.recalled.spans.empty() && st.recalled.spans.front().p0 < st.archive->first()) {
        llama_h2o_drop_rows(parts, s);
    }
}

void llama_h2o_note_lost_rows(llama_h2o_parts & parts, uint32_t s, int32_t n_tokens) {
    auto & st = parts.streams[s];

    st.archive_trouble = "the archive's file lacks rows, or they are damaged: " + std::to_string(n_tokens) +
                         " tokens before position " + std::to_string(st.archive->first()) +
                         " cannot be recalled any more";
    llama_h2o_drop_lost_rows(parts, s);
}

// Looks once more at the pages of the recalled rows: a file may be damaged after it was opened.
static void drop_damaged_pages(llama_h2o_parts & parts, uint32_t s) {
    auto & st = parts.streams[s];

    const auto & spans = st.recalled.spans;
    for (auto span = spans.rbegin(); span != spans.rend(); ++span) {
        const int32_t n_lost = st.archive->drop_damaged(
                llama_h2o_archive::page_of(span->p0), llama_h2o_archive::page_of(span->p1 - 1) + 1);
        if (n_lost > 0) {
            llama_h2o_note_lost_rows(parts, s, n_lost); // with all spans
            return;
        }
    }
}

// The first cells that nobody uses.
static std::vector<uint32_t> find_free(const llama_h2o_parts & parts, uint32_t s, uint32_t n) {
    std::vector<uint32_t> res;
    for (uint32_t cell = 0; cell < parts.n_cells && res.size() < n; ++cell) {
        if (parts.cells[s].is_empty(cell)) {
            res.push_back(cell);
        }
    }
    if (res.size() < n) {
        throw std::runtime_error("there are no cells for recalled rows");
    }

    return res;
}

void llama_h2o_take_recalled_cell(llama_h2o_parts & parts, uint32_t s, uint32_t cell) {
    parts.cells.put(s, cell, CELL_POS);
}

// Copies the rows of a layer from the archive to their cells.
//   places   what the first positions of the spans are rotated to
static void place_layer(llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<int32_t> & places) {
    const auto & layer    = parts.layers[ikv];
    const auto & st       = parts.streams[s];
    const auto & recalled = st.recalled;
    const size_t n_rows   = recalled.cells.size();

    llama_h2o_host_rows k(layer.tensors.k, s);
    std::optional<llama_h2o_host_rows> v;
    if (layer.tensors.v) {
        v.emplace(layer.tensors.v, s);
    }
    llama_h2o_turner turner(*layer.rope);

    std::vector<float> k_row(layer.shape.k.n_embd_head);
    std::vector<float> v_row(layer.shape.v.n_embd_head);

    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        const int32_t * pos = recalled.pos.data() + (layer.shape.first_head + head) * n_rows;

        size_t span = 0;
        for (size_t i = 0; i < n_rows; ++i) {
            while (pos[i] >= recalled.spans[span].p1) {
                ++span;
            }
            const int32_t place = places[span] + pos[i] - recalled.spans[span].p0;
            const int32_t turn  = place - (pos[i] - st.archive->shift(pos[i]));

            st.archive->get_k(ikv, head, pos[i], k_row.data());
            if (turn != 0) {
                turner.apply(k_row, turn);
            }
            llama_h2o_write_row(k.data(), layer.shape.k, head, recalled.cells[i], k_row.data());

            if (v) {
                st.archive->get_v(ikv, head, pos[i], v_row.data());
                llama_h2o_write_row(v->data(), layer.shape.v, head, recalled.cells[i], v_row.data());
            }
        }
    }

    k.commit();
    if (v) {
        v->commit();
    }
}

// Of the recalled spans, today.
static std::vector<int32_t> find_places(const llama_h2o_parts & parts, uint32_t s) {
    const auto & st = parts.streams[s];

    return llama_h2o_place_spans(st.recalled.spans, st.rows.shift(), st.rows.rope_pos(parts.cells.newest(s) + 1),
            int32_t(parts.params.n_pos));
}

void llama_h2o_place_rows(llama_h2o_parts & parts, uint32_t s) {
    auto & recalled = parts.streams[s].recalled;

    try {
        drop_damaged_pages(parts, s);
        if (recalled.cells.empty()) {
            return;
        }

        recalled.places = find_places(parts, s);

        parts.ctx.synchronize();
        llama_h2o_parallel(parts.layers.size(), recalled.pos.size(), parts.ctx.get_cparams().n_threads,
                [&](size_t ikv) { place_layer(parts, s, ikv, recalled.places); });
    } catch (...) {
        llama_h2o_drop_rows(parts, s); // some of them are not there
        throw;
    }
}

// Puts the chosen rows into cells, if they are not there already.
static void take(llama_h2o_parts & parts, uint32_t s, llama_h2o_recall_choice choice) {
    auto & st = parts.streams[s];

    const bool is_there = choice.spans == st.recalled.spans && choice.pos == st.recalled.pos;
    if (!is_there) {
        llama_h2o_drop_rows(parts, s);
    }
    st.recalled.hidden = choice.hidden;
    st.recalled.missed = choice.missed;
    st.recalled.spans  = std::move(choice.spans);
    if (is_there) {
        // the text has gone on, and they are not to be too far behind it
        if (st.recalled.places != find_places(parts, s)) {
            llama_h2o_place_rows(parts, s);
        }
        return;
    }

    st.recalled.pos = std::move(choice.pos);
    try {
        const std::vector<uint32_t> cells = find_free(parts, s, choice.n_rows);
        st.recalled.cells.reserve(cells.size());
        for (const uint32_t cell : cells) {
            st.recalled.cells.push_back(cell);
            llama_h2o_take_recalled_cell(parts, s, cell);
        }
    } catch (...) {
        llama_h2o_drop_rows(parts, s); // those in the cells that were taken
        st.recalled = {};
        throw;
    }
    llama_h2o_place_rows(parts, s);
}

uint32_t llama_h2o_recall_rows(llama_h2o_parts & parts, uint32_t s, uint32_t n_rows, uint32_t n_asking) {
    auto & st = parts.streams[s];

    parts.ctx.synchronize();

    const int64_t t_start_us = ggml_time_us();

    const std::vector<uint32_t> asking = st.question.find_last(n_asking, MOST_ASKING);

    int32_t first;
    do {
        first = st.archive->first();

        llama_h2o_recall_choice choice;
        if (st.archive->next() > first) {
            choice = llama_h2o_choose_rows(look(parts, s, asking), std::min(n_rows, parts.params.recall));
        }
        take(parts, s, std::move(choice));
    } while (st.archive->first() != first); // without a page that turned out to be damaged

    st.count.n_recalls    += 1;
    st.count.t_recalls_us += ggml_time_us() - t_start_us;

    return uint32_t(st.recalled.cells.size());
}
