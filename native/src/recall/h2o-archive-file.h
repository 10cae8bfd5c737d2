// The pages of an archive: how rows lie in one, and a file of them.

#pragma once

#include "recall/h2o-archive-map.h"

#include "ggml.h"

#include <array>
#include <cstdint>
#include <string>
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

// Says which text an archive is of; it is made by chance.
using llama_h2o_archive_id = std::array<uint8_t, 16>;

// A header and whole pages behind it, each in a place that follows from its number. Where the number of pages is limited the
// places are used in turn. A page counts once its header is right, and that is written last: what a crash or a full disk leaves
// behind is written over. Some pages, one after the other in one text, are current. Others stay until one is written that
// does not follow the current ones.
class llama_h2o_archive_file {
public:
    // Opens the file, or makes one; the newest pages are current. Throws std::runtime_error with the reason where it cannot be
    // opened, or is of another model, type or text.
    //   max_pages   of a file that is made; 0: no limit
    llama_h2o_archive_file(const std::string & path,
            const llama_h2o_archive_layout & layout,
            const llama_h2o_archive_id & id,
            uint64_t max_pages);

    uint64_t max_pages() const { return limit; }

    // current: page_begin() <= page < page_end()
    uint32_t page_begin() const { return current_begin; }
    uint32_t page_end() const { return current_end; }

    // valid for as long as the file is open
    const char * page(uint32_t page) const;

    // Makes those pages current that lie before this one in the text that has this checksum there; none if they are not in
    // the file.
    void find(uint32_t page_end, uint64_t text);

    // This current page is the first one now, and those before it are not current.
    void begin_at(uint32_t page);

    // Writes a whole page behind those that it follows, and those alone stay. With a limit, the oldest may go. Throws
    // std::runtime_error where it cannot be written; the page does not count then.
    void append(char * page);

    // Whether a page is what was written. Reads all of it.
    bool is_sound(uint32_t page) const;

    // all that was written is there after a power cut
    void sync() { file.sync(); }

    // the page is not read for a while
    void release(uint32_t page) const;

private:
    // What the header of a page says; not known where `text` is 0.
    struct place {
        uint32_t page        = 0;
        int32_t begin        = 0;
        int32_t first        = 0;
        uint64_t text_before = 0;
        uint64_t text        = 0;

        place() = default;
        explicit place(const llama_h2o_archive_page_header & header);

        // whether this page and the next one can be of the same archive, if they are of the same text
        bool can_precede(const place & next) const;
    };

    const llama_h2o_archive_layout & layout;
    llama_h2o_mapped_file file;

    uint64_t limit      = 0;
    uint64_t first_page = 0; // bytes in front of it

    std::vector<place> places;
    std::vector<const char *> extents; // memory of so many places each:
    uint64_t n_extent = 0;

    uint64_t page_of_place0 = 0; // any of those that can lie there
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
