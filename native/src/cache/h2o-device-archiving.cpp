#include "cache/h2o-device-archiving.h"

#include "graph/h2o-fused.h"
#include "kernels/h2o-row-types.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

// Arguments of a layer's op apart from its tensors; must exist while the graph runs.
struct archived_layer {
    const llama_h2o_layer * layer;
    llama_h2o_archived_rows rows; // without the fields that tensors provide
    uint32_t n_pages;
};

// sources of the op; the list contains the first position, pages, cells and rotations
enum archive_src { SRC_K, SRC_V, SRC_LIST, SRC_FACTORS };

} // namespace

llama_h2o_archived_rows llama_h2o_read_archived(const ggml_tensor * op, const void * userdata) {
    const auto & how  = *static_cast<const archived_layer *>(userdata);
    const auto * list = static_cast<const int32_t *>(op->src[SRC_LIST]->data);

    llama_h2o_archived_rows res = how.rows;

    res.k.data    = static_cast<const char *>(op->src[SRC_K]->data);
    res.v.data    = static_cast<const char *>(op->src[SRC_V]->data);
    res.factors   = static_cast<const float *>(op->src[SRC_FACTORS]->data);
    res.first     = list;
    res.pages     = reinterpret_cast<char * const *>(list + 2);
    res.cells     = list + 2 + 2 * how.n_pages;
    res.rotations = res.cells + res.n_tokens;

    return res;
}

bool llama_h2o_archives_on_device(const llama_h2o_parts & parts, uint32_t ikv) {
    const auto & shape  = parts.layers[ikv].shape;
    const bool is_there = std::any_of(
            parts.device_texts.begin(), parts.device_texts.end(), [&](const auto & t) { return t->text(0, ikv); });

    return is_there && parts.layers[ikv].rope && llama_h2o_has_row_type(shape.k.type) &&
           llama_h2o_has_row_type(shape.v.type) && !shape.v.transposed;
}

static llama_h2o_archived_rows::source source_of(const llama_h2o_row_layout & layout, uint64_t offset) {
    return { nullptr, layout.type, ggml_row_size(layout.type, layout.n_embd),
        ggml_row_size(layout.type, layout.n_embd_head), layout.n_embd_head, offset };
}

// Adds a node that archives the rows of a layer.
//   places  the first position, a 0, the pages as pairs of words, and the cells
static void add_layer(llama_h2o_cache_graph & graph,
        const llama_h2o_row_positions & rows,
        uint32_t s,
        const archived_layer & how,
        int32_t first,
        std::vector<int32_t> places) {
    const auto & layer = *how.layer;
    ggml_context * ctx = graph.get_ctx();

    llama_h2o_rotation_table rotations(*layer.rope);

    const size_t first_cell = places.size() - how.rows.n_tokens;
    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        const int32_t * rope_list = rows.rope_list(layer.shape.first_head + head);
        for (uint32_t i = 0; i < how.rows.n_tokens; ++i) {
            const int32_t in_page = rows.in_page(first + int32_t(i), llama_h2o_archive::N_PAGE);
            places.push_back(rotations.place(in_page - rope_list[places[first_cell + i]]));
        }
    }

    ggml_tensor * list = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, int64_t(places.size()));
    ggml_set_input(list);
    graph.lists[list] = std::move(places);

    const auto of_stream = [&](ggml_tensor * t) {
        return ggml_view_2d(ctx, t, t->ne[0], t->ne[1], t->nb[1], t->nb[2] * s);
    };
    ggml_tensor * src[] = { of_stream(layer.tensors.v), list, rotations.add_to(graph) };
    graph.add(ggml_custom_inplace(ctx, of_stream(layer.tensors.k), src, 3, llama_h2o_device_archive(), GGML_N_TASKS_MAX,
            const_cast<archived_layer *>(&how)));
}

void llama_h2o_archive_on_devices(
        llama_h2o_parts & parts, uint32_t s, int32_t first, const std::vector<uint32_t> & cells) {
    const auto & archive = *parts.streams[s].archive;

    // the oldest may already have been dropped again because of the size limit
    const size_t n_gone = size_t(std::max(archive.first() - first, 0));
    if (n_gone >= cells.size()) {
        return;
    }
    first += int32_t(n_gone);

    const uint32_t n_tokens   = uint32_t(cells.size() - n_gone);
    const uint32_t first_page = llama_h2o_archive::page_of(first);
    const uint32_t n_pages    = llama_h2o_archive::page_of(first + int32_t(n_tokens) - 1) - first_page + 1;

    std::vector<const char *> pages;
    for (uint32_t i = 0; i < n_pages; ++i) {
        pages.push_back(archive.shared(first_page + i));
    }
    // the size of the list depends on n_tokens: CUDA reuses a captured graph, with its n_tokens, if the shapes are equal
    const uint32_t n_listed     = n_tokens / llama_h2o_archive::N_PAGE + 2;
    std::vector<int32_t> places = { first, 0 };
    places.resize(2 + 2 * n_listed);
    std::memcpy(places.data() + 2, pages.data(), n_pages * sizeof(pages[0]));
    places.insert(places.end(), cells.begin() + std::ptrdiff_t(n_gone), cells.end());

    llama_h2o_cache_graph graph(parts.layers.size());
    std::vector<archived_layer> all;
    all.reserve(parts.layers.size()); // no reallocation: the ops keep pointers
    for (uint32_t ikv = 0; ikv < parts.layers.size(); ++ikv) {
        if (!llama_h2o_archives_on_device(parts, ikv)) {
            continue;
        }
        const auto & layer  = parts.layers[ikv];
        const char * k      = archive.k(first_page, ikv, 0);
        const uint32_t next = std::min(layer.shape.n_head_kv - 1, 1u);

        llama_h2o_archived_rows rows = {};

        rows.k         = source_of(layer.shape.k, 0);
        rows.v         = source_of(layer.shape.v, archive.v(first_page, ikv, 0) - k);
        rows.n_mix     = layer.rope->n_mix;
        rows.how       = layer.rope->rotation();
        rows.offset    = k - archive.k(first_page, 0, 0);
        rows.stride    = archive.k(first_page, ikv, next) - k;
        rows.type      = archive.type();
        rows.nb_row    = archive.row_size(ikv);
        rows.n_tokens  = n_tokens;
        rows.n_head_kv = layer.shape.n_head_kv;
        all.push_back({ &layer, rows, n_listed });
        add_layer(graph, parts.streams[s].rows, s, all.back(), first, places);
    }
    parts.graphs.run(graph);
}
