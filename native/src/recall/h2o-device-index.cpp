#include "recall/h2o-device-index.h"

#include "recall/h2o-archive.h"
#include "recall/h2o-index.h"

#include "ggml-alloc.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

static constexpr uint32_t PAGE     = LLAMA_H2O_PAGE;
static constexpr uint32_t PASSAGES = PAGE / LLAMA_H2O_PASSAGE; // per page
static constexpr uint32_t WORDS    = PAGE / 64;                // of 64 bits, per page
static constexpr size_t SPARE      = size_t(1) << 30;          // bytes of device memory left free

static ggml_context_ptr new_context(size_t n_tensors) {
    ggml_context_ptr res(ggml_init({ n_tensors * ggml_tensor_overhead(), nullptr, true }));
    if (!res) {
        throw std::bad_alloc();
    }

    return res;
}

//
// the texts
//

llama_h2o_device_texts::llama_h2o_device_texts(
        ggml_backend_buffer_type_t buft, std::vector<uint32_t> layers, uint32_t n_stream) :
    ctx(new_context(1)), buft(buft), layers(std::move(layers)) {
    tensor = ggml_new_tensor_2d(
            ctx.get(), GGML_TYPE_I8, int64_t(this->layers.size() * sizeof(llama_h2o_device_text)), n_stream);
    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft));
    if (!buffer) {
        throw std::bad_alloc();
    }
    ggml_backend_buffer_clear(buffer.get(), 0);
}

const llama_h2o_device_text * llama_h2o_device_texts::text(uint32_t s, uint32_t ikv) const {
    const auto it = std::lower_bound(layers.begin(), layers.end(), ikv);
    if (it == layers.end() || *it != ikv) {
        return nullptr;
    }

    return static_cast<const llama_h2o_device_text *>(tensor->data) + s * layers.size() + (it - layers.begin());
}

//
// the index of a stream
//

llama_h2o_device_index::llama_h2o_device_index(
        const llama_h2o_device_texts & texts, uint32_t s, uint32_t max_groups, ggml_backend_t backend) :
    texts(texts), s(s), max_groups(max_groups), backend(backend), layers(texts.layers.size()) {}

static std::vector<uint32_t> searching_heads(const llama_h2o_index & index, uint32_t ikv) {
    std::vector<uint32_t> res;
    for (uint32_t head = 0; head < index.n_head_kv(ikv); ++head) {
        if (index.text(ikv).codes[head]) {
            res.push_back(head);
        }
    }

    return res;
}

// Whether the allocated memory fits the number of pages and the heads that search.
bool llama_h2o_device_index::fits(const llama_h2o_index & index) const {
    bool res = index.text(0).n_pages <= max_pages;
    for (size_t i = 0; res && i < layers.size(); ++i) {
        res = layers[i].searching == searching_heads(index, texts.layers[i]) &&
              factors.count(index.rotation_of(texts.layers[i])) == 1;
    }

    return res;
}

// Allocates memory for more pages than there are. It is not initialised.
bool llama_h2o_device_index::allocate(const llama_h2o_index & index) {
    const uint32_t n_pages = index.text(0).n_pages;

    buffer.reset();
    near_buffer.reset();
    n_near     = 0;
    n_prepared = 0;
    ctx        = new_context(3 * layers.size() + 5);
    factors.clear();
    written_texts.clear();
    written_heads.clear();
    max_pages = std::max(64u, n_pages + n_pages / 4);

    size_t n_heads   = 0;
    size_t n_scoring = 1; // layers run one after another
    for (size_t i = 0; i < layers.size(); ++i) {
        const uint32_t ikv = texts.layers[i];
        const size_t n     = index.n_head_kv(ikv);
        auto & layer       = layers[i];

        layer.searching  = searching_heads(index, ikv);
        layer.codes      = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I8, int64_t(max_pages * index.layout(ikv).size()),
                std::max<size_t>(1, layer.searching.size()));
        layer.hidden     = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, int64_t(max_pages * WORDS * n));
        n_heads         += n;
        n_scoring        = std::max(n_scoring, layer.searching.size() * max_groups);

        ggml_tensor *& of_layer = factors[index.rotation_of(ikv)];
        if (!of_layer) {
            const int64_t n_factors = std::max<int64_t>(1, index.n_factors(ikv));
            of_layer                = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, n_factors * max_pages);
        }
    }
    heads = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, int64_t(n_heads * sizeof(llama_h2o_device_text::head)));
    pages = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, max_pages);
    sums  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, int64_t(1 + n_heads + size_t(max_pages) * (PASSAGES + PAGE)));

    scores = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, int64_t(max_pages) * PAGE, int64_t(n_scoring));
    counts = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, llama_h2o_device_text::N_COUNTS, int64_t(n_scoring));

    buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), texts.buft));
    fetched.reset(ggml_backend_buft_alloc_buffer(
            ggml_backend_dev_host_buffer_type(ggml_backend_buft_get_device(texts.buft)), ggml_nbytes(sums)));
    if (!buffer || !fetched) {
        return false;
    }
    ggml_backend_buffer_clear(buffer.get(), 0);
    collected.assign(ggml_nelements(sums), 0);

    return true;
}

// Allocates memory for the rows of as many of the newest pages as possible. It is not initialised.
void llama_h2o_device_index::allocate_near(const llama_h2o_archive & archive) {
    size_t of_page = 0;
    for (size_t i = 0; i < layers.size(); ++i) {
        of_page += layers[i].searching.size() * PAGE * archive.row_size(texts.layers[i]);
    }
    size_t free;
    size_t total;
    ggml_backend_dev_memory(ggml_backend_buft_get_device(texts.buft), &free, &total);

    const size_t n = free > SPARE && of_page > 0 ? std::min<size_t>((free - SPARE) / of_page, max_pages) : 0;
    if (n == 0) {
        return;
    }

    near_ctx = new_context(layers.size());
    for (size_t i = 0; i < layers.size(); ++i) {
        layers[i].near = ggml_new_tensor_3d(near_ctx.get(), GGML_TYPE_I8,
                int64_t(PAGE * archive.row_size(texts.layers[i])), std::max<size_t>(1, layers[i].searching.size()), n);
    }
    near_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(near_ctx.get(), texts.buft));
    n_near = near_buffer ? uint32_t(n) : 0;
}

// Writes the rows of a layer's pages from `first` on, if they are among the newest.
void llama_h2o_device_index::write_near(
        const llama_h2o_index & index, const llama_h2o_archive & archive, size_t i, uint32_t first) {
    const auto & layer = layers[i];
    const auto & text  = index.text(texts.layers[i]);

    const uint32_t end = index.first_page() + text.n_pages;
    for (uint32_t page = std::max(index.first_page() + first, end - n_copied(text.n_pages)); page < end; ++page) {
        const size_t slot = page % n_near;
        for (size_t k = 0; k < layer.searching.size(); ++k) {
            const char * rows = archive.shared(page) + text.keys[layer.searching[k]];
            ggml_backend_tensor_set(
                    layer.near, rows, slot * layer.near->nb[2] + k * layer.near->nb[1], layer.near->nb[1]);
        }
    }
}

// Writes the codes of a layer's pages from `first` on to the ring.
void llama_h2o_device_index::write_codes(const llama_h2o_index & index, size_t i, uint32_t first) {
    const auto & layer  = layers[i];
    const auto & text   = index.text(texts.layers[i]);
    const size_t size   = index.layout(texts.layers[i]).size();
    const uint32_t slot = index.first_page() % max_pages;

    std::vector<char> data;
    while (first < text.n_pages && !layer.searching.empty()) {
        const uint32_t begin = (slot + first) % max_pages;
        const uint32_t n     = std::min(text.n_pages - first, max_pages - begin);

        data.clear();
        for (const uint32_t head : layer.searching) {
            const char * codes = text.codes[head] + first * size;
            data.insert(data.end(), codes, codes + n * size);
        }
        ggml_backend_tensor_set_2d(
                layer.codes, data.data(), begin * size, n * size, layer.searching.size(), layer.codes->nb[1], n * size);
        first += n;
    }
}

void llama_h2o_device_index::update(
        const llama_h2o_index & index, const llama_h2o_archive & archive, uint32_t first_changed) {
    const uint32_t n_pages = index.n_pages();
    if (n_pages == 0) {
        return;
    }
    if (!archive.is_shared()) {
        max_pages = 0; // the CPU searches
        return;
    }
    if (!fits(index)) {
        first_changed = 0;
        is_full       = !allocate(index);
        if (is_full) {
            LLAMA_LOG_WARN("%s: too little device memory for codes of evicted rows: the CPU searches\n", __func__);
        } else {
            allocate_near(archive);
        }
    }
    if (is_full) {
        max_pages = 0; // retry the next time
        return;
    }

    std::vector<const char *> shared;
    for (uint32_t i = 0; i < n_pages; ++i) {
        shared.push_back(archive.shared(index.first_page() + i));
    }
    ggml_backend_tensor_set(pages, shared.data(), 0, n_pages * sizeof(const char *));

    std::vector<uint64_t> hidden;
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & text = index.text(texts.layers[i]);
        write_codes(index, i, first_changed);
        write_near(index, archive, i, first_changed);

        hidden.clear();
        for (uint32_t head = 0; head < index.n_head_kv(texts.layers[i]); ++head) {
            hidden.insert(hidden.end(), text.hidden[head], text.hidden[head] + size_t(n_pages) * WORDS);
        }
        ggml_backend_tensor_set(layers[i].hidden, hidden.data(), 0, hidden.size() * sizeof(uint64_t));
    }
    for (const auto & [rotation, tensor] : factors) {
        const auto & values = index.factors(rotation);
        ggml_backend_tensor_set(tensor, values.data(), 0, values.size() * sizeof(float));
    }
}

//
// before and after a search
//

void llama_h2o_device_index::prepare(const llama_h2o_index & index) {
    std::vector<llama_h2o_device_text> now(layers.size());
    std::vector<llama_h2o_device_text::head> now_heads;

    const bool can_find = index.text(0).n_pages > 0 && max_pages > 0;
    for (size_t i = 0; can_find && i < layers.size(); ++i) {
        const auto & text      = index.text(texts.layers[i]);
        const auto & searching = layers[i].searching;
        auto * sum             = static_cast<unsigned long long *>(sums->data);
        auto & to              = now[i];

        to.n_pages     = text.n_pages;
        to.n_unrotated = text.n_unrotated;
        to.focus       = text.focus;
        to.first_slot  = index.first_page() % max_pages;
        to.max_pages   = max_pages;
        to.pages       = static_cast<const char * const *>(pages->data);
        to.first_near  = text.n_pages - n_copied(text.n_pages);
        if (n_near > 0) {
            to.near_slot = index.first_page() % n_near;
            to.n_near    = n_near;
            to.nb_near   = layers[i].near->nb[2];
            to.near      = static_cast<const char *>(layers[i].near->data);
        }
        to.codes      = static_cast<const char *>(layers[i].codes->data);
        to.hidden     = static_cast<const uint64_t *>(layers[i].hidden->data);
        to.factors    = static_cast<const float *>(factors.at(index.rotation_of(texts.layers[i]))->data);
        to.heads      = static_cast<const llama_h2o_device_text::head *>(heads->data) + now_heads.size();
        to.shares     = sum;
        to.gains      = sum + 1 + now_heads.size();
        to.weights    = sum + n_sums();
        to.interest   = to.weights - size_t(max_pages) * PASSAGES;
        to.max_groups = max_groups;
        to.scores     = static_cast<uint32_t *>(scores->data);
        to.counts     = static_cast<uint32_t *>(counts->data);

        for (uint32_t head = 0; head < index.n_head_kv(texts.layers[i]); ++head) {
            const auto it       = std::find(searching.begin(), searching.end(), head);
            const bool searches = text.codes[head] && it != searching.end();
            now_heads.push_back({ searches ? int32_t(it - searching.begin()) : -1, text.n_alone[head],
                    text.n_together[head], text.keys[head], text.values[head] });
        }
    }

    const auto write = [&](ggml_tensor * tensor, size_t offset, auto & written, auto && data) {
        const size_t size = data.size() * sizeof(data[0]);
        if (written.size() != data.size() || std::memcmp(written.data(), data.data(), size) != 0) {
            written = data;
            ggml_backend_tensor_set_async(backend, tensor, written.data(), offset, size);
        }
    };
    write(texts.tensor, s * texts.tensor->nb[1], written_texts, now);
    if (can_find) {
        write(heads, 0, written_heads, now_heads);
    }
    n_prepared = can_find ? n_sums() - size_t(max_pages - index.n_pages()) * PASSAGES : 0;
}

void llama_h2o_device_index::fetch() {
    if (n_prepared > 0) {
        ggml_backend_tensor_get_async(
                backend, sums, ggml_backend_buffer_get_base(fetched.get()), 0, n_prepared * sizeof(uint64_t));
        has_searched = has_rows = true;
    }
    n_prepared = 0;
}

void llama_h2o_device_index::collect(const llama_h2o_index & index, bool rows) {
    if (!has_searched && !(rows && has_rows)) {
        return;
    }
    ggml_backend_synchronize(backend);

    auto * sum = static_cast<uint64_t *>(ggml_backend_buffer_get_base(fetched.get()));

    const size_t n_rows = rows ? size_t(index.n_pages()) * PAGE : 0;
    ggml_backend_tensor_get(sums, sum + n_sums(), n_sums() * sizeof(uint64_t), n_rows * sizeof(uint64_t));
    has_searched = false;
    has_rows     = has_rows && !rows;

    size_t i        = 0;
    const auto next = [&] {
        const uint64_t before = std::exchange(collected[i], sum[i]);

        return double(sum[i++] - before) / 4294967296.0;
    };
    const auto & any  = index.text(0);
    any.shares[0]    += next();
    for (const uint32_t ikv : texts.layers) {
        for (uint32_t head = 0; head < index.n_head_kv(ikv); ++head) {
            index.text(ikv).gains[head] += next();
        }
    }
    for (size_t k = 0; k < size_t(index.n_pages()) * PASSAGES; ++k) {
        any.interest[0][k] += next();
    }
    i = n_sums();
    for (size_t k = 0; k < n_rows; ++k) {
        any.weights[0][k] += next();
    }
}
