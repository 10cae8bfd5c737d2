// The rows of a text beside the cache, so that those that were evicted can be looked at and fetched again.

#pragma once

#include "recall/h2o-archive-layout.h"

#include "ggml.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

// The K and V rows, of all layers and KV heads, of the tokens at positions first() <= p < next() of one text, in pages:
// page g has room for positions N_PAGE * g and those behind it. Rows are rounded to the type of the archive. A layer's
// place among those that have a KV cache is its `ikv`.
//
// One thread at a time changes the archive; setting rows of different (layer, KV head) may be split over threads. Any
// number of threads may read while nobody changes it. What cannot be done throws std::runtime_error.
class llama_h2o_archive {
public:
    static constexpr uint32_t N_PAGE = llama_h2o_archive_layout::N_PAGE; // tokens

    // An empty archive in memory, at the start of a text.
    //   max_bytes   that pages may take, room for one page at least; 0: no limit
    llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes);

    // rows are of this type, and lie as it says
    ggml_type type() const { return layout.type(); }
    const std::vector<llama_h2o_archive_layer> & layers() const { return layout.layers(); }
    uint64_t row_size_k(uint32_t ikv) const { return layout.row_size_k(ikv); }
    uint64_t row_size_v(uint32_t ikv) const { return layout.row_size_v(ikv); }

    //
    // what is held
    //

    int32_t first() const { return pos_first; }
    int32_t next() const { return pos_next; }

    bool is_complete() const { return pos_first == 0; }

    // tokens that went because of the limit
    int32_t n_dropped() const { return pos_first - pos_begin; }

    // pages with tokens that are held: page_begin() <= page < page_end()
    uint32_t page_begin() const { return page_of(pos_first); }
    uint32_t page_end() const { return page_begin() + uint32_t(pages.size()); }

    static uint32_t page_of(int32_t p) { return uint32_t(p) / N_PAGE; }

    // bytes that the pages take
    uint64_t n_bytes() const { return layout.size() * pages.size(); }

    //
    // writing
    //

    // empty, at the start of a text
    void clear() { begin_at(0); }

    // empty, and the next token is the one at position p: what lies before it is not in the archive
    void begin_at(int32_t p);

    // Makes room for the next n tokens, whose keys are rotated to the positions p - shift. Their rows follow, see below;
    // then end_extend(). Where the limit is reached the oldest page goes: what is newest in a text is asked for most,
    // and an archive has to be contiguous to be read as a text. So only rows from first() on can be set.
    //   token_ids   [n]
    void extend(uint32_t n, int32_t shift, const int32_t * token_ids);

    // of the tokens of the last extend()
    //   row   [n_embd_k] or [n_embd_v]
    void set_k(uint32_t ikv, uint32_t head, int32_t p, const float * row);
    void set_v(uint32_t ikv, uint32_t head, int32_t p, const float * row);

    // all rows of the last extend() are set
    void end_extend() {}

    //
    // reading
    //

    // The N_PAGE rows of a head, one after the other. Rows of positions that are not held are zero. Valid until the
    // archive is changed.
    const char * k(uint32_t page, uint32_t ikv, uint32_t head) const;
    const char * v(uint32_t page, uint32_t ikv, uint32_t head) const;

    //   row   [n_embd_k] or [n_embd_v]
    void get_k(uint32_t ikv, uint32_t head, int32_t p, float * row) const;
    void get_v(uint32_t ikv, uint32_t head, int32_t p, float * row) const;

    int32_t shift(int32_t p) const;
    int32_t token(int32_t p) const;

private:
    struct free_page {
        void operator()(char * data) const;
    };

    using page_memory = std::unique_ptr<char, free_page>;

    const llama_h2o_archive_layout layout;
    const uint64_t max_pages; // 0: no limit

    std::deque<page_memory> pages; // from page_begin() on

    int32_t pos_begin = 0; // where the archive began
    int32_t pos_first = 0;
    int32_t pos_next  = 0;

    void append_page();
    void drop_page();

    void expect_held(int32_t p) const;
    const char * page_at(uint32_t page) const;
    const char * page_with(int32_t p) const;
    char * page_to_set(int32_t p);
};
