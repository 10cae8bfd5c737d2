// The archive: the rows of a text outside the cache, so that evicted rows can be searched, attended to and restored.

#pragma once

#include "recall/h2o-archive-file.h"

#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// The K and V rows of all layers and KV heads for the tokens at positions first() <= p < next() of one text, in pages: page g
// holds the positions from N_PAGE * g on. Rows are rounded to the type of the archive. `ikv` is the index of a layer among
// the layers with a KV cache.
//
// Pages are in memory or, once complete, in a file. The newest page stays in memory until it is complete. A saved state
// contains the pages in memory.
//
// Only one thread at a time may change the archive, but several may set rows of different (layer, KV head). Any number of
// threads may read while it does not change. Errors throw std::runtime_error.
class llama_h2o_archive {
public:
    // the limit is smaller than a page
    struct limit_error : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    static constexpr uint32_t N_PAGE = llama_h2o_archive_layout::N_PAGE; // tokens

    // An empty archive in memory, at the start of a text.
    //   max_bytes   maximum size of all pages, at least one page; 0: no limit
    llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes);

    using page_memory = std::shared_ptr<char>;

    // Allocates the pages of an empty archive in memory that a device can read, too; pages in the file get copies there. If
    // new_memory returns null, pages are not shared until the archive is empty again. It is also called in other threads.
    using new_memory_fn = std::function<page_memory(size_t size)>;
    void share(new_memory_fn new_memory) {
        new_shared = std::move(new_memory);
        shares     = true;
    }

    bool is_shared() const { return shares; }

    // the shared copy of a page: the address of k(page, 0, 0)
    const char * shared(uint32_t page) const {
        const held_page & held = page_at(page);

        return (held.has_rows ? held.memory : zeros).get() + layout.offset_k(0, 0);
    }

    // type and layout of the rows
    ggml_type type() const { return layout.type(); }
    const std::vector<llama_h2o_archive_layer> & layers() const { return layout.layers(); }
    uint64_t row_size(uint32_t ikv) const { return layout.row_size(ikv); }

    //
    // the file
    //

    // Stores complete pages of an empty archive in this file. It is created if it does not exist; otherwise the archive then
    // holds its newest pages, and has the limit that it was created with. Throws a one-line reason if the file cannot be
    // opened or belongs to another model, type or text.
    //   id   of the text
    void open_file(const std::string & path, const llama_h2o_archive_id & id);

    // Moves all complete pages to this file and continues there. Other pages in the file are overwritten. If it throws, the
    // archive is unchanged.
    void move_to_file(const std::string & path, const llama_h2o_archive_id & id);

    // The error after which nothing can be written, in one line, or empty. The archive can still be read, but not extended until
    // it is cleared.
    const std::string & error() const { return write_error; }

    //
    // content
    //

    int32_t first() const { return pos_first; }
    int32_t next() const { return pos_next; }

    // tokens dropped because of the limit, or because pages of the file are missing or damaged
    int32_t n_dropped() const { return pos_first - pos_begin; }

    // whether tokens were dropped because of the limit
    bool has_overflowed() const { return n_dropped() > 0 && is_full(); }

    // pages: page_begin() <= page < page_end()
    uint32_t page_begin() const { return page_of(pos_first); }
    uint32_t page_end() const { return page_begin() + uint32_t(pages.size()); }

    static uint32_t page_of(int32_t p) { return uint32_t(p) / N_PAGE; }

    // size of all pages, in memory and in the file
    uint64_t n_bytes() const {
        return layout.size() * (pages.size() - n_without_rows) + sizeof(llama_h2o_archive_page_header) * n_without_rows;
    }

    // whether a page has rows, and not only token ids
    bool has_rows(uint32_t page) const { return page_at(page).has_rows; }

    //
    // writing
    //

    // Empties the archive, at the start of a text. Pages in the file stay until a page is written, so a state that refers to
    // them can still be read.
    void clear();

    // empties the archive; the next token is at position p
    void begin_at(int32_t p);

    // Adds the next n tokens. Set their rows afterwards, then call end_extend(). Even with a file, this allocates memory for all
    // pages that it touches. At the limit the oldest pages are dropped: recent text is retrieved most, and the archive must be
    // contiguous. So only rows from first() on can be set.
    //   token_ids   [n]
    //   has_rows    whether all rows will be set; otherwise they are zero
    void extend(uint32_t n, const int32_t * token_ids, bool has_rows = true);

    // The address of a row of a token of the last extend(). Keys are rotated to the position in their page, p mod N_PAGE,
    // whatever their position in the text, without a Hadamard transform, even if the cache is quantised.
    char * k_to_set(uint32_t ikv, uint32_t head, int32_t p);
    char * v_to_set(uint32_t ikv, uint32_t head, int32_t p);

    // Removes the tokens of the last extend() from position p on; instead of end_extend().
    void take_back(int32_t p);

    // Call it when all rows of the last extend() are set. Writes complete pages to the file; see error().
    void end_extend();

    // Drops the rows of positions p0 <= p < p1: pages in memory with only such tokens free their rows, which are zero then. Pages
    // in a file are unchanged.
    void drop_rows(int32_t p0, int32_t p1);

    //
    // reading
    //

    // The N_PAGE rows of a head, adjacent. Rows of positions that are not in the archive are zero. Valid until the archive
    // changes.
    const char * k(uint32_t page, uint32_t ikv, uint32_t head) const;
    const char * v(uint32_t page, uint32_t ikv, uint32_t head) const;

    // Releases the memory of a page in the file, after it was read as a whole. The system reads ahead, so otherwise V of all
    // pages would stay in memory, too.
    void release(uint32_t page) const;

    //
    // damage
    //

    // Checks the pages begin <= page < end that are in the file, and drops all pages up to the last damaged one.
    //   returns   number of dropped tokens
    int32_t drop_damaged(uint32_t begin, uint32_t end);

    //
    // states
    //

    using write_fn = std::function<void(const void * data, size_t size)>;
    using read_fn  = std::function<void(void * data, size_t size)>;

    // Writes the pages that are not in the file.
    void write_state(const write_fn & write) const;

    // Replaces the content by that of a state. Its undamaged pages in the file are used; if pages are missing, the archive starts
    // after them. Nothing changes if the state does not fit or `read` throws.
    //   returns   number of tokens that the archive had when the state was written and does not have now
    int32_t read_state(const read_fn & read);

private:
    struct held_page {
        page_memory memory;          // of a slab; null if the page is in the file and not shared
        const char * data = nullptr; // in the file or in memory
        bool has_rows     = true;    // otherwise memory holds only the header
    };

    const llama_h2o_archive_layout layout;
    const size_t n_slab;          // pages of a slab
    const uint64_t max_pages_own; // without a file

    uint64_t max_pages; // 0: no limit

    std::unique_ptr<llama_h2o_archive_file> file;
    std::string write_error;

    std::deque<held_page> pages; // from page_begin() on
    size_t n_in_file      = 0;   // number of pages in the file, at the front
    size_t n_without_rows = 0;
    std::vector<page_memory> spares; // free memory of earlier pages, for the next ones
    const page_memory zeros;         // rows of pages without rows; never written, so the system needs no memory for it
    page_memory slab;                // memory of the next pages
    size_t n_in_slab = 0;
    new_memory_fn new_shared;
    std::deque<std::future<page_memory>> next_shared; // slabs allocated ahead, because pinning takes milliseconds
    size_t n_taken = 0;                               // slabs used by the last tokens
    bool shares    = false;

    int32_t pos_begin   = 0; // first position ever in the archive
    int32_t pos_first   = 0;
    int32_t pos_next    = 0;
    uint64_t text_first = 0; // checksum of all tokens before pos_first, if there is no page

    void make_ahead(std::launch how, size_t n);
    page_memory new_memory();
    static page_memory new_header(const llama_h2o_archive_page_header & header);
    void stop_sharing();
    void share_file();
    bool is_full() const;
    void make_room();
    void drop_first_page();
    void append_page(page_memory memory, bool has_rows);
    void begin_page(uint32_t n);
    void append_token(int32_t id, uint32_t n);
    uint64_t text_end() const;
    void hold_pages_of_file();
    size_t n_whole() const;

    const held_page & page_at(uint32_t page) const;
    const char * rows_of(const held_page & page) const { return page.has_rows ? page.data : zeros.get(); }
    void copy_page(const held_page & page, char * to) const;
    char * page_to_set(int32_t p);
};
