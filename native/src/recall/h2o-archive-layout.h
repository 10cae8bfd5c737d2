// How rows lie in a page of the archive.

#pragma once

#include "ggml.h"

#include <cstdint>
#include <vector>

// Of a layer that has a KV cache.
struct llama_h2o_archive_layer {
    uint32_t n_head_kv;
    uint32_t n_embd_k; // elements of one head's row
    uint32_t n_embd_v; // 0 where V is a part of K
};

// A page is a header, which fills a page of memory, and the rows of all layers. The K and V row of a token lie side by side:
// what is found is read together, here and there.
class llama_h2o_archive_layout {
public:
    static constexpr uint32_t N_PAGE  = 128;  // tokens
    static constexpr uint64_t PADDING = 4096; // bytes

    // throws std::runtime_error where rows cannot be of this type
    llama_h2o_archive_layout(std::vector<llama_h2o_archive_layer> layers, ggml_type type);

    ggml_type type() const { return type_rows; }

    const std::vector<llama_h2o_archive_layer> & layers() const { return shapes; }

    // bytes of a page
    uint64_t size() const { return n_bytes; }

    // bytes from a row of a head to that of the next token, of N_PAGE in the order of the text
    uint64_t row_size(uint32_t ikv) const { return rows[ikv].size; }

    // Where the first one begins.
    uint64_t offset_k(uint32_t ikv, uint32_t head) const { return rows[ikv].offset(head); }
    uint64_t offset_v(uint32_t ikv, uint32_t head) const { return rows[ikv].offset(head) + rows[ikv].size_k; }

    // of the shape itself
    uint64_t checksum() const;

    // of the rows of a page
    uint64_t checksum_rows(const char * page) const;

private:
    struct layer_rows {
        uint64_t first; // of head 0, in bytes
        uint64_t size_k;
        uint64_t size; // of both

        uint64_t offset(uint32_t head) const { return first + head * N_PAGE * size; }
    };

    ggml_type type_rows;
    std::vector<llama_h2o_archive_layer> shapes;
    std::vector<layer_rows> rows; // [n_layer]
    uint64_t n_bytes = 0;
};

// What a page begins with. Without gaps, so that every byte has a value.
struct llama_h2o_archive_page_header {
    static constexpr uint32_t N_PAGE = llama_h2o_archive_layout::N_PAGE;

    uint64_t magic;
    uint32_t page;
    int32_t begin;  // where the archive began
    int32_t first;  // position of the first token that is held
    uint32_t count; // tokens held, from that one on

    int32_t token[N_PAGE]; // at position N_PAGE * page + i
    uint64_t text_before;  // text() of the page before; 0 where the archive begins

    // set where the page is written to a file
    uint64_t checksum_rows;
    uint64_t checksum; // of all before it

    // a page without tokens, whose first one will be that at position p; all bytes are zero before
    void start(int32_t begin, int32_t p, uint64_t text_before);

    // of all tokens up to the last one here: it tells which page continues which text
    uint64_t text() const;

    // whether it is the header of a page that makes sense, with all tokens that belong into it
    bool is_whole() const;

    // whether it is what it was when its checksum was set
    bool is_sound() const;

    void set_checksum();
};

static_assert(sizeof(llama_h2o_archive_page_header) <= llama_h2o_archive_layout::PADDING, "one part");

// the one of a page
inline llama_h2o_archive_page_header & llama_h2o_archive_header(char * page) {
    return *reinterpret_cast<llama_h2o_archive_page_header *>(page);
}

inline const llama_h2o_archive_page_header & llama_h2o_archive_header(const char * page) {
    return *reinterpret_cast<const llama_h2o_archive_page_header *>(page);
}
