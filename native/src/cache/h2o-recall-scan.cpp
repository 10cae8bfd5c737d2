#include "cache/h2o-recall-scan.h"

#include "cache/h2o-parts.h"
#include "kernels/h2o-kernel.h"
#include "kernels/h2o-row-floats.h"
#include "kernels/h2o-row-types.h"
#include "kernels/h2o-scan.h"

#include <algorithm>
#include <cmath>
#include <set>

static constexpr uint32_t N_PAGE = llama_h2o_archive::N_PAGE;

namespace {

// The queries of a layer that ask, in the order of the text, as they were rotated.
struct question {
    std::vector<int32_t> pos; // [n_tokens]
    std::vector<float> rows;  // [n_head_kv][n_tokens*n_group][n_embd]
};

class layer_scan {
public:
    //   asking   slots of the queries that ask
    layer_scan(const llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<uint32_t> & asking);

    llama_h2o_layer_scan run();

private:
    const llama_h2o_parts & parts;
    const llama_h2o_stream & st;
    const llama_h2o_layer & layer;
    const llama_h2o_archive & archive;
    const llama_h2o_kernel & kernel;

    const uint32_t s;
    const uint32_t ikv;
    const uint32_t n_embd;
    const uint32_t n_lanes; // elements of a row that the kernel reads
    const uint32_t n_group;

    const std::vector<uint32_t> & asking;
    const std::vector<uint32_t> used; // cells of the text
    llama_h2o_host_rows cell_keys;    // of all of them

    question asked;
    uint32_t n_rows = 0; // queries of a KV head

    std::vector<std::vector<float>> arranged; // of the KV heads
    std::vector<std::vector<float>> unmixed;  // likewise, where keys are mixed
    std::vector<float> work;
    std::vector<float> padded; // keys that the kernel cannot take as they lie

    llama_h2o_layer_scan res;

    void read_question();
    std::vector<float> arrange(uint32_t head, bool unmix) const;
    float logit_scale() const { return layer.attention.kq_scale; }

    llama_h2o_scan new_scan();
    void run_kernel(llama_h2o_scan scan);
    void find_resident(uint32_t head);
    void look_at_page(uint32_t page);
    void look_at_page(uint32_t page,
            uint32_t head,
            const std::vector<int32_t> & shifts,
            int32_t shift,
            const std::vector<float> & factors);
    std::vector<uint32_t> first_rows_of_cells() const;
    void look_at_resident(uint32_t head, const std::vector<uint32_t> & first_row);
    void add_sinks(uint32_t head);
};

// A multiple of the vectors of every kernel.
constexpr uint32_t MOST_LANES = 16;

// Elements of a row, filled up with zeros if no kernel takes it as it is.
uint32_t n_lanes_of(const llama_h2o_layer & layer) {
    const uint32_t n_embd = layer.shape.k.n_embd_head;

    return layer.attention.kernel || llama_h2o_best_kernel(n_embd, n_embd) ? n_embd : GGML_PAD(n_embd, MOST_LANES);
}

const llama_h2o_kernel & kernel_of(const llama_h2o_layer & layer) {
    const uint32_t n = n_lanes_of(layer);

    return *(layer.attention.kernel ? layer.attention.kernel : llama_h2o_best_kernel(n, n));
}

layer_scan::layer_scan(const llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<uint32_t> & asking) :
    parts(parts), st(parts.streams[s]), layer(parts.layers[ikv]), archive(*st.archive), kernel(kernel_of(layer)), s(s),
    ikv(ikv), n_embd(layer.shape.k.n_embd_head), n_lanes(n_lanes_of(layer)), n_group(layer.shape.n_group()),
    asking(asking), used(parts.used(s)), cell_keys(layer.tensors.k, s) {}

void layer_scan::read_question() {
    const ggml_tensor * ring = layer.tensors.question;

    std::vector<float> queries(ring->nb[3] / sizeof(float)); // [n_head][slots][n_embd]
    ggml_backend_tensor_get(ring, queries.data(), ring->nb[3] * s, ring->nb[3]);

    n_rows = uint32_t(asking.size()) * n_group;
    asked.rows.resize(size_t(layer.shape.n_head) * asking.size() * n_embd);

    for (size_t t = 0; t < asking.size(); ++t) {
        asked.pos.push_back(st.question.slots()[asking[t]].pos);
        for (uint32_t h = 0; h < layer.shape.n_head; ++h) {
            const size_t row  = size_t(h / n_group) * n_rows + t * n_group + h % n_group;
            const size_t slot = size_t(h) * st.question.size() + asking[t];
            std::copy_n(queries.begin() + slot * n_embd, n_embd, asked.rows.begin() + row * n_embd);
        }
    }
}

// The queries of a KV head for the kernel, as keys lie in the cache or as they were before they were mixed.
std::vector<float> layer_scan::arrange(uint32_t head, bool unmix) const {
    const auto first = asked.rows.begin() + size_t(head) * n_rows * n_embd;

    std::vector<float> rows(size_t(n_rows) * n_lanes, 0.0f);
    for (uint32_t i = 0; i < n_rows; ++i) {
        std::vector<float> row(first + i * n_embd, first + (i + 1) * n_embd);
        if (unmix) {
            llama_h2o_mix_row(*layer.rope, row);
        }
        std::copy(row.begin(), row.end(), rows.begin() + i * n_lanes);
    }

    std::vector<float> out(llama_h2o_arranged_size(n_rows, n_lanes));
    llama_h2o_arrange_queries(rows.data(), n_rows, n_lanes, logit_scale(), out.data());

    return out;
}

llama_h2o_scan layer_scan::new_scan() {
    llama_h2o_scan scan = {};

    scan.n_embd = n_lanes;
    scan.n_rows = n_rows;
    // the model caps before it scales
    scan.cap  = layer.attention.kq_cap * logit_scale();
    scan.work = work.data();

    return scan;
}

// Keys that the kernel cannot take as they lie become floats, with zeros behind them where it reads more elements.
void layer_scan::run_kernel(llama_h2o_scan scan) {
    if (n_lanes != n_embd || !llama_h2o_has_row_type(scan.type)) {
        padded.assign(size_t(scan.n_keys) * n_lanes, 0.0f);

        for (uint32_t i = 0; i < scan.n_keys; ++i) {
            llama_h2o_to_floats(scan.type, scan.keys + scan.nb_row * i, padded.data() + size_t(i) * n_lanes, n_embd);
        }
        scan.type   = GGML_TYPE_F32;
        scan.keys   = reinterpret_cast<const char *>(padded.data());
        scan.nb_row = n_lanes * sizeof(float);
    }

    kernel.scan(scan);
}

void layer_scan::find_resident(uint32_t head) {
    const int32_t start = int32_t(archive.page_begin() * N_PAGE);

    auto & flags = res.resident[head];
    flags.assign(archive.next() - start, 0);
    for (int32_t pos = start; pos < archive.first(); ++pos) {
        flags[pos - start] = 1; // not there at all
    }
    for (const uint32_t cell : used) {
        const int32_t pos = st.rows.pos(layer.shape.first_head + head, cell, parts.cells[s].pos_get(cell));
        if (pos >= start && pos < archive.next()) {
            flags[pos - start] = 1;
        }
    }
}

void layer_scan::look_at_page(uint32_t page) {
    const int32_t start = int32_t(page * N_PAGE);

    // of the positions of the page; those before the archive count for nobody
    std::vector<int32_t> shifts(std::min(archive.next() - start, int32_t(N_PAGE)));
    for (size_t i = 0; i < shifts.size(); ++i) {
        shifts[i] = archive.shift(std::max(archive.first(), start + int32_t(i)));
    }

    for (const int32_t shift : std::set<int32_t>(shifts.begin(), shifts.end())) {
        const int32_t turn = std::max(start - st.rows.shift(), 0) - start + shift;

        std::vector<float> factors;
        for (size_t i = 0; turn != 0 && i < layer.rope->angles.size(); ++i) {
            const double angle = layer.rope->angles[i] * turn;
            factors.insert(factors.end(), { float(std::cos(angle)), float(std::sin(angle)) });
        }
        for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
            look_at_page(page, head, shifts, shift, factors);
        }
    }
}

// Those keys of a page that were archived with this shift.
void layer_scan::look_at_page(uint32_t page,
        uint32_t head,
        const std::vector<int32_t> & shifts,
        int32_t shift,
        const std::vector<float> & factors) {
    auto & out = res.of_heads[head];

    const size_t first_pos = size_t(page - archive.page_begin()) * N_PAGE;

    std::vector<uint32_t> first_row(shifts.size());
    for (size_t i = 0; i < shifts.size(); ++i) {
        const bool counts = !res.resident[head][first_pos + i] && shifts[i] == shift;
        first_row[i]      = counts ? 0 : n_rows;
    }

    llama_h2o_scan scan = new_scan();

    scan.queries = arranged[head].data();
    if (!factors.empty()) {
        scan.turn        = factors.data();
        scan.n_turn_dims = uint32_t(factors.size());
        scan.first_turn  = layer.rope->first;
        scan.turn_neox   = layer.rope->neox;
    }
    if (!factors.empty() && layer.rope->n_hadamard > 0) {
        scan.queries = unmixed[head].data();
        scan.mix     = layer.rope->hadamard.data();
        scan.n_mix   = layer.rope->n_hadamard;
    }

    std::vector<float> max(size_t(N_PAGE / LLAMA_H2O_SCAN_BLOCK) * n_rows);
    std::vector<float> sum(max.size());

    scan.type      = archive.type();
    scan.keys      = archive.k(page, ikv, head);
    scan.nb_row    = ggml_row_size(archive.type(), n_embd);
    scan.n_keys    = uint32_t(shifts.size());
    scan.first_row = first_row.data();
    scan.max       = max.data();
    scan.sum       = sum.data();
    run_kernel(scan);

    const size_t first = first_pos / LLAMA_H2O_SCAN_BLOCK * n_rows;
    for (size_t i = 0; i < size_t(scan.n_blocks()) * n_rows; ++i) {
        llama_h2o_add_logits(out.hidden_max[first + i], out.hidden_sum[first + i], max[i], sum[i]);
    }
}

// Cells that recalled rows lie in, or nobody's, count for no query, newer ones than a query not for that one. The same for
// all heads: rows newer than the oldest query are recent, and lie in cells of their own.
std::vector<uint32_t> layer_scan::first_rows_of_cells() const {
    std::vector<uint32_t> first_row(used.empty() ? 0 : used.back() + 1, n_rows);
    for (const uint32_t cell : used) {
        const auto sees = std::lower_bound(asked.pos.begin(), asked.pos.end(), parts.cells[s].pos_get(cell));
        first_row[cell] = uint32_t(sees - asked.pos.begin()) * n_group;
    }

    return first_row;
}

void layer_scan::look_at_resident(uint32_t head, const std::vector<uint32_t> & first_row) {
    const auto & shape     = layer.shape.k;
    const uint32_t n_cells = uint32_t(first_row.size());

    auto & out = res.of_heads[head];

    llama_h2o_scan scan = new_scan();

    std::vector<float> max(size_t(n_cells / LLAMA_H2O_SCAN_BLOCK + 1) * n_rows);
    std::vector<float> sum(max.size());

    scan.queries   = arranged[head].data();
    scan.type      = shape.type;
    scan.keys      = reinterpret_cast<const char *>(cell_keys.data()) + ggml_row_size(shape.type, n_embd) * head;
    scan.nb_row    = ggml_row_size(shape.type, shape.n_embd);
    scan.n_keys    = n_cells;
    scan.first_row = first_row.data();
    scan.max       = max.data();
    scan.sum       = sum.data();
    run_kernel(scan);

    for (size_t i = 0; i < size_t(scan.n_blocks()) * n_rows; ++i) {
        llama_h2o_add_logits(out.resident_max[i % n_rows], out.resident_sum[i % n_rows], max[i], sum[i]);
    }
}

// Those of the query heads of a KV head.
void layer_scan::add_sinks(uint32_t head) {
    const ggml_tensor * sinks = layer.attention.sinks;
    if (!sinks) {
        return;
    }

    std::vector<float> logits(n_group);
    ggml_backend_tensor_get(sinks, logits.data(), head * n_group * sizeof(float), n_group * sizeof(float));
    res.of_heads[head].add_sinks(logits.data());
}

llama_h2o_layer_scan layer_scan::run() {
    read_question();

    const uint32_t first_page = archive.page_begin();
    const uint32_t n_pages    = archive.page_end() - first_page;

    res.resident.resize(layer.shape.n_head_kv);
    res.of_heads.resize(layer.shape.n_head_kv);
    work.resize(llama_h2o_scan_work_size(n_rows, n_lanes));

    const std::vector<uint32_t> first_row = first_rows_of_cells();

    for (uint32_t head = 0; head < layer.shape.n_head_kv; ++head) {
        arranged.push_back(arrange(head, false));
        if (layer.rope->n_hadamard > 0) {
            unmixed.push_back(arrange(head, true));
        }
        find_resident(head);

        auto & out = res.of_heads[head];

        out.n_rows  = n_rows;
        out.n_group = n_group;
        out.hidden_max.assign(size_t(n_pages) * N_PAGE / LLAMA_H2O_SCAN_BLOCK * n_rows, -INFINITY);
        out.hidden_sum.assign(out.hidden_max.size(), 0.0f);
        out.resident_max.assign(n_rows, -INFINITY);
        out.resident_sum.assign(n_rows, 0.0f);

        look_at_resident(head, first_row);
        add_sinks(head);
    }
    for (uint32_t page = first_page; page < first_page + n_pages; ++page) {
        look_at_page(page);
    }

    return std::move(res);
}

} // namespace

llama_h2o_layer_scan llama_h2o_scan_layer(
        const llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<uint32_t> & asking) {
    return layer_scan(parts, s, ikv, asking).run();
}
