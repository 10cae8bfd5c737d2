// The pages of an archive: their layout, and a file of pages.

#pragma once

#include "recall/h2o-archive-map.h"

#include "ggml.h"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

// The shape of a layer with a KV cache.
struct llama_h2o_archive_layer {
    uint32_t n_head_kv;
    uint32_t n_embd_k; // elements of one head's row
    uint32_t n_embd_v; // 0 if V is a part of K
};

// A page consists of a header, padded to a page of memory, and the rows of all layers. The K and V rows of a token are adjacent,
// because retrieved rows are read together, at random positions.
class llama_h2o_archive_layout {
public:
    static constexpr uint32_t N_PAGE  = 128;  // tokens
    static constexpr uint64_t PADDING = 4096; // bytes

    // throws std::runtime_error if rows cannot have this type
    llama_h2o_archive_layout(std::vector<llama_h2o_archive_layer> layers, ggml_type type);

    ggml_type type() const { return type_rows; }

    const std::vector<llama_h2o_archive_layer> & layers() const { return shapes; }

    // bytes of a page
    uint64_t size() const { return n_bytes; }

    // stride in bytes between the rows of adjacent tokens, of a head in a page
    uint64_t row_size(uint32_t ikv) const { return rows[ikv].size; }

    // Offset of the first row in a page.
    uint64_t offset_k(uint32_t ikv, uint32_t head) const { return rows[ikv].offset(head); }
    uint64_t offset_v(uint32_t ikv, uint32_t head) const { return rows[ikv].offset(head) + rows[ikv].size_k; }

    // of the layout
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

// The header of a page. Without padding, so that every byte is defined.
struct llama_h2o_archive_page_header {
    static constexpr uint32_t N_PAGE = llama_h2o_archive_layout::N_PAGE;

    uint64_t magic;
    uint32_t page;
    int32_t begin;  // first position ever in the archive
    int32_t first;  // position of the first token in the archive
    uint32_t count; // number of tokens, from `first` on

    int32_t token[N_PAGE]; // at position N_PAGE * page + i
    uint64_t text_before;  // text() of the previous page; 0 at the start of the archive

    // set when the page is written to a file
    uint64_t checksum_rows;
    uint64_t checksum; // of all before it

    // initialises an empty page, whose first token will have position p; all bytes must be zero before
    void start(int32_t begin, int32_t p, uint64_t text_before);

    // checksum of all tokens of the text up to the last one here: identifies the text that the page continues
    uint64_t text() const;

    // whether it is a valid header of a complete page
    bool is_whole() const;

    // whether its checksum is correct
    bool is_sound() const;

    void set_checksum();
};

static_assert(
        sizeof(llama_h2o_archive_page_header) <= llama_h2o_archive_layout::PADDING, "the header must fit the padding");

inline llama_h2o_archive_page_header & llama_h2o_archive_header(char * page) {
    return *reinterpret_cast<llama_h2o_archive_page_header *>(page);
}

inline const llama_h2o_archive_page_header & llama_h2o_archive_header(const char * page) {
    return *reinterpret_cast<const llama_h2o_archive_page_header *>(page);
}

// Random id of the text of an archive.
using llama_h2o_archive_id = std::array<uint8_t, 16>;

// A header, then complete pages, each in a slot that depends on its number. If the number of pages is limited, the slots form a
// ring. A page is valid once its header is, which is written last: incomplete pages after a crash or on a full disk are
// overwritten. A consecutive range of pages of one text is current. Other pages stay until a page is written that does not
// continue the current ones.
class llama_h2o_archive_file {
public:
    // Opens or creates the file; the newest pages are current. Throws std::runtime_error with the reason if it cannot be opened or
    // belongs to another model, type or text.
    //   max_pages   of a new file; 0: no limit
    llama_h2o_archive_file(const std::string & path,
            const llama_h2o_archive_layout & layout,
            const llama_h2o_archive_id & id,
            uint64_t max_pages);

    uint64_t max_pages() const { return limit; }

    // current: page_begin() <= page < page_end()
    uint32_t page_begin() const { return current_begin; }
    uint32_t page_end() const { return current_end; }

    // valid while the file is open
    const char * page(uint32_t page) const;

    // Makes the pages before page_end current, of the text with this checksum at that point; none if they are not in the file.
    void find(uint32_t page_end, uint64_t text);

    // Drops the current pages before this one from the range.
    void begin_at(uint32_t page);

    // Appends a complete page to the current ones and drops all others. At the limit, the oldest page is overwritten. Throws
    // std::runtime_error if it cannot be written; the page is invalid then.
    void append(char * page);

    // Whether a page is undamaged. Reads all of it.
    bool is_sound(uint32_t page) const;

    // releases the memory of a page until it is read again
    void release(uint32_t page) const;

private:
    // The header of the page in a slot; unknown if `text` is 0.
    struct place {
        uint32_t page        = 0;
        int32_t begin        = 0;
        int32_t first        = 0;
        uint64_t text_before = 0;
        uint64_t text        = 0;

        place() = default;
        explicit place(const llama_h2o_archive_page_header & header);

        // whether `next` can continue this page, if both are from the same text
        bool can_precede(const place & next) const;
    };

    const llama_h2o_archive_layout & layout;
    llama_h2o_mapped_file file;

    uint64_t limit      = 0;
    uint64_t first_page = 0; // offset in bytes

    std::vector<place> places;
    std::vector<const char *> extents; // mapped memory of n_extent places each
    uint64_t n_extent = 0;

    uint64_t page_of_place0 = 0; // number of a page in slot 0
    uint32_t current_begin  = 0;
    uint32_t current_end    = 0;

    bool has_others = false; // pages that are not current

    uint64_t open_header(const std::string & path, const llama_h2o_archive_id & id, uint64_t max_pages);
    void read_places();

    uint64_t place_of(uint64_t page) const;
    uint64_t offset_of(uint64_t i) const { return first_page + i * layout.size(); }
    const place * find_page(uint64_t page, uint64_t text) const;

    void write(uint64_t i, char * page);
    void drop_page(uint64_t i);
    void drop_others();
    void map_place(uint64_t i);
};
