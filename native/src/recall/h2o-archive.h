// The rows of a text beside the cache, so that those that were evicted can be looked at and fetched again.

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

// The K and V rows, of all layers and KV heads, of the tokens at positions first() <= p < next() of one text, in pages:
// page g has room for positions N_PAGE * g and those behind it. Rows are rounded to the type of the archive. A layer's
// place among those that have a KV cache is its `ikv`.
//
// Pages are in memory or, once they have all their tokens, in a file; the newest page is in memory until then, and a saved
// state carries what is in memory.
//
// One thread at a time changes the archive; setting rows of different (layer, KV head) may be split over threads. Any
// number of threads may read while nobody changes it. What cannot be done throws std::runtime_error.
class llama_h2o_archive {
public:
    // a limit in which there is no room for a page
    struct limit_error : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    static constexpr uint32_t N_PAGE = llama_h2o_archive_layout::N_PAGE; // tokens

    // An empty archive in memory, at the start of a text.
    //   max_bytes   that pages may take, room for one page at least; 0: no limit
    llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes);

    using page_memory = std::shared_ptr<char>;

    // Pages of an empty archive lie in such memory, that a device can read as well; those in the file have copies there. Null:
    // there is no more. Then pages are not shared, until the archive is empty again. Called in other threads, too.
    using new_memory_fn = std::function<page_memory(size_t size)>;
    void share(new_memory_fn new_memory) {
        new_shared = std::move(new_memory);
        shares     = true;
    }

    // whether all pages are
    bool is_shared() const { return shares; }

    // a page as it is shared: where that has k(page, 0, 0)
    const char * shared(uint32_t page) const {
        const held_page & held = page_at(page);

        return (held.has_rows ? held.memory : zeros).get() + layout.offset_k(0, 0);
    }

    // rows are of this type, and lie as it says
    ggml_type type() const { return layout.type(); }
    const std::vector<llama_h2o_archive_layer> & layers() const { return layout.layers(); }
    uint64_t row_size(uint32_t ikv) const { return layout.row_size(ikv); }

    //
    // the file
    //

    // Pages of an empty archive go to this file from now on, as far as they have all their tokens. It is made if there is
    // none; otherwise the newest pages in it are held now. The limit is the one that the file was made with. Throws with
    // the reason, in one line, where the file cannot be opened or is of another model, type or text.
    //   id   of the text
    void open_file(const std::string & path, const llama_h2o_archive_id & id);

    // What is held goes on in this file, which takes all pages that have all their tokens; if it throws, it goes on where it
    // was. Other pages in the file are written over.
    void move_to_file(const std::string & path, const llama_h2o_archive_id & id);

    // Empty, and in memory. The file stays as it is.
    void close_file();

    // What was written is there after a power cut. Before a state is saved that relies on it.
    void flush();

    // Why nothing can be written any more, in one line; empty while all is well. What is held stays and can be read, but
    // the archive cannot be extended until it is cleared.
    const std::string & error() const { return write_error; }

    //
    // what is held
    //

    int32_t first() const { return pos_first; }
    int32_t next() const { return pos_next; }

    // tokens that were held and are not any more: because of the limit, or as pages of the file are missing or damaged
    int32_t n_dropped() const { return pos_first - pos_begin; }

    // whether its limit has made tokens leave
    bool has_overflowed() const { return n_dropped() > 0 && is_full(); }

    // pages with tokens that are held: page_begin() <= page < page_end()
    uint32_t page_begin() const { return page_of(pos_first); }
    uint32_t page_end() const { return page_begin() + uint32_t(pages.size()); }

    static uint32_t page_of(int32_t p) { return uint32_t(p) / N_PAGE; }

    // bytes that the pages take, in memory and in the file
    uint64_t n_bytes() const {
        return layout.size() * (pages.size() - n_without_rows) + sizeof(llama_h2o_archive_page_header) * n_without_rows;
    }

    // whether the rows of a page are there, and not only its tokens
    bool has_rows(uint32_t page) const { return page_at(page).has_rows; }

    //
    // writing
    //

    // Empty, at the start of a text. What is in the file stays until a page is written there, so a state that needs it
    // can be read after this.
    void clear();

    // empty, and the next token is the one at position p: what lies before it is not in the archive
    void begin_at(int32_t p);

    // Makes room for the next n tokens. Their rows follow, see below; then end_extend(). With a file, too, memory is needed
    // for all pages that this touches. Where the limit is reached the oldest page goes: what is newest in a text is asked for
    // most, and an archive has to be contiguous to be read as a text. So only rows from first() on can be set.
    //   token_ids   [n]
    //   has_rows    all of them are set; otherwise they are zero
    void extend(uint32_t n, const int32_t * token_ids, bool has_rows = true);

    // Where a row of a token of the last extend() is to be stored. Keys are rotated to the position in their page, p mod N_PAGE,
    // wherever the text has them, and never mixed, also where the cache is quantised.
    char * k_to_set(uint32_t ikv, uint32_t head, int32_t p);
    char * v_to_set(uint32_t ikv, uint32_t head, int32_t p);

    // The tokens of the last extend() from position p on are gone; in the place of end_extend().
    void take_back(int32_t p);

    // All rows of the last extend() are set. Writes to the file the pages that have all their tokens; see error().
    void end_extend();

    // Nobody wants the rows of positions p0 <= p < p1 any more. Pages in memory that have only such tokens give theirs up: they
    // are zero. What is in a file stays there.
    void drop_rows(int32_t p0, int32_t p1);

    //
    // reading
    //

    // The N_PAGE rows of a head, one after the other. Rows of positions that are not held are zero. Valid until the
    // archive is changed.
    const char * k(uint32_t page, uint32_t ikv, uint32_t head) const;
    const char * v(uint32_t page, uint32_t ikv, uint32_t head) const;

    // A page that was read as a whole is not, for a while: the memory that it takes is given back where the file has it.
    // The system reads ahead, so without this V of all pages comes to be loaded, too.
    void release(uint32_t page) const;

    //
    // damage
    //

    // Lets go of pages up to the last one, of begin <= page < end, that is not what was written. Reads all of these that are
    // in the file.
    //   returns   tokens that are not held any more
    int32_t drop_damaged(uint32_t begin, uint32_t end);

    //
    // states
    //

    using write_fn = std::function<void(const void * data, size_t size)>;
    using read_fn  = std::function<void(void * data, size_t size)>;

    // What is not in the file, or all that is held.
    void write_state(const write_fn & write, bool all = false) const;

    // Takes the place of what is held. What the file has of it, without damage, is held again; where that is not enough the
    // archive begins behind it. Reads all of that. Nothing changes if the state does not fit, or if `read` throws.
    //   returns   tokens that the archive held when the state was written, and does not hold now
    int32_t read_state(const read_fn & read);

private:
    struct held_page {
        page_memory memory;          // of a slab; none where it is in the file and not shared
        const char * data = nullptr; // in the file, or there
        bool has_rows     = true;    // otherwise all of that is the header
    };

    const llama_h2o_archive_layout layout;
    const size_t n_slab;          // pages of a slab
    const uint64_t max_pages_own; // without a file

    uint64_t max_pages; // 0: no limit

    std::unique_ptr<llama_h2o_archive_file> file;
    std::string write_error;

    std::deque<held_page> pages; // from page_begin() on
    size_t n_in_file      = 0;   // of these, at the front
    size_t n_without_rows = 0;
    std::vector<page_memory> spares; // of pages that were written or that gave up their rows, for the next ones
    const page_memory zeros; // the rows of those that have none: nobody writes there, so the system needs no memory
    page_memory slab;        // of pages that are not used yet
    size_t n_in_slab = 0;
    new_memory_fn new_shared;
    std::deque<std::future<page_memory>> next_shared; // slabs, made by then: pinned memory takes milliseconds
    size_t n_taken = 0;                               // slabs that the last tokens took
    bool shares    = false;

    int32_t pos_begin   = 0; // where the archive began
    int32_t pos_first   = 0;
    int32_t pos_next    = 0;
    uint64_t text_first = 0; // as pages have it, of all tokens before pos_first, where no page is held

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
