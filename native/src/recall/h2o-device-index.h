// A copy of an index (h2o-index.h) in the memory of a device, with the attention that queries there gave to retrieved rows.

#pragma once

#include "kernels/h2o-search.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

class llama_h2o_archive;
class llama_h2o_index;

// The texts of these layers for all streams of a cache, adjacent, as kernels need them.
struct llama_h2o_device_texts {
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor * tensor; // I8 [layers*sizeof(llama_h2o_device_text), n_stream]

    ggml_backend_buffer_type_t buft;
    std::vector<uint32_t> layers; // their ikv, ascending

    // Throws std::bad_alloc.
    llama_h2o_device_texts(ggml_backend_buffer_type_t buft, std::vector<uint32_t> layers, uint32_t n_stream);

    // The text of a stream and layer; null if the layer is not on this device.
    const llama_h2o_device_text * text(uint32_t s, uint32_t ikv) const;
};

class llama_h2o_device_index {
public:
    //   max_groups   maximum groups of queries of a KV head that search together
    //   backend      of the graphs on the device
    llama_h2o_device_index(
            const llama_h2o_device_texts & texts, uint32_t s, uint32_t max_groups, ggml_backend_t backend);

    // Copies changes to the device; call it after hide() of all layers. If memory is short, or pages are not shared, the device
    // does not search.
    //   first_changed   first page with new codes
    void update(const llama_h2o_index & index, const llama_h2o_archive & archive, uint32_t first_changed);

    bool has_room() const { return !is_full; }

    // Call it before a batch searches.
    void prepare(const llama_h2o_index & index);

    // Queues a copy of the attention sums to the host, after the graph of a batch.
    void fetch();

    // Adds the attention sums of the device since the last call to those of the index.
    //   rows   also the many sums by row
    void collect(const llama_h2o_index & index, bool rows);

private:
    const llama_h2o_device_texts & texts;
    const uint32_t s;
    const uint32_t max_groups;
    const ggml_backend_t backend;

    struct layer_tensors {
        std::vector<uint32_t> searching; // heads
        ggml_tensor * codes;             // I8 [max_pages*size of a page, searching heads]
        ggml_tensor * hidden;            // I64 [max_pages*PAGE/64*n_head_kv]
        ggml_tensor * near;              // I8 [PAGE*row, searching heads, n_near] their rows of the newest pages
    };

    // in one buffer, for max_pages
    ggml_context_ptr ctx;
    ggml_backend_buffer_ptr buffer;
    std::vector<layer_tensors> layers;
    std::map<size_t, ggml_tensor *> factors; // F32, by rotation of the index
    ggml_tensor * heads  = nullptr;          // I8 [heads of the layers*sizeof(head)]
    ggml_tensor * pages  = nullptr;          // I64 [max_pages]
    ggml_tensor * sums   = nullptr;          // I64: shares, gains of the layers' heads, interest; weights
    ggml_tensor * scores = nullptr;          // I32 [max_pages*PAGE, searching heads of a layer*max_groups]
    ggml_tensor * counts = nullptr;          // I32 [N_COUNTS, the same]
    uint32_t max_pages   = 0;

    // [elements of sums] in pinned host memory; and what has been added to the index
    ggml_backend_buffer_ptr fetched;
    std::vector<uint64_t> collected;

    // rows of as many of the newest pages as fit in device memory
    ggml_context_ptr near_ctx;
    ggml_backend_buffer_ptr near_buffer;
    uint32_t n_near = 0;

    bool is_full      = false; // device memory is short
    size_t n_prepared = 0;     // sums that the next batch changes
    bool has_searched = false; // since collect()
    bool has_rows     = false; // since collect() with rows

    // last values written to the device
    std::vector<llama_h2o_device_text> written_texts;
    std::vector<llama_h2o_device_text::head> written_heads;

    // number of pages with rows there, of a text of n_pages
    uint32_t n_copied(uint32_t n_pages) const { return n_pages < n_near ? n_pages : n_near; }
    bool fits(const llama_h2o_index & index) const;
    bool allocate(const llama_h2o_index & index);
    void allocate_near(const llama_h2o_archive & archive);
    void write_near(const llama_h2o_index & index, const llama_h2o_archive & archive, size_t i, uint32_t first);
    void write_codes(const llama_h2o_index & index, size_t i, uint32_t first);
    size_t n_sums() const {
        return size_t(ggml_nelements(sums)) - size_t(max_pages) * LLAMA_H2O_PAGE;
    } // without weights
};
