#include "recall/h2o-archive.h"

#include "recall/h2o-archive-map.h"

#include "kernels/h2o-row-types.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
#include <utility>

static void expect(bool is_so, const char * what) {
    if (!is_so) {
        throw std::runtime_error(what);
    }
}

// Bytes and maximum number of pages per allocation. Single rows are read at random, so pages should be in huge pages of the
// system; small pages get none, because the first one would take a whole huge page.
static constexpr size_t SLAB         = 16 << 20;
static constexpr size_t MOST_IN_SLAB = 8;
static constexpr size_t MOST_AHEAD   = 4; // slabs allocated for the next tokens

// This many pages without rows count as one with rows: their tokens and codes need memory, too.
static constexpr size_t WITHOUT_ROWS_A_PAGE = 16;

static llama_h2o_archive::page_memory map_memory(size_t n_bytes) {
    return { llama_h2o_map_memory(n_bytes), [n_bytes](char * data) { llama_h2o_unmap_memory(data, n_bytes); } };
}

static uint64_t pages_within(uint64_t max_bytes, uint64_t page_size) {
    if (max_bytes > 0 && max_bytes < page_size) {
        throw llama_h2o_archive::limit_error("the archive's limit of " + std::to_string(max_bytes) +
                                             " bytes is less than its first page, which takes " +
                                             std::to_string(page_size));
    }

    return max_bytes / page_size;
}

llama_h2o_archive::llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes) :
    layout(std::move(layers), type), n_slab(std::clamp<size_t>(SLAB / layout.size(), 1, MOST_IN_SLAB)),
    max_pages_own(pages_within(max_bytes, layout.size())), max_pages(max_pages_own), zeros(map_memory(layout.size())) {}

//
// the file
//

void llama_h2o_archive::open_file(const std::string & path, const llama_h2o_archive_id & id) {
    expect(pages.empty(), "a file is opened for an empty archive");

    file      = std::make_unique<llama_h2o_archive_file>(path, layout, id, max_pages_own);
    max_pages = file->max_pages();

    hold_pages_of_file();
    share_file();
    if (!pages.empty()) {
        pos_begin = llama_h2o_archive_header(pages.back().data).begin;
    }
}

// Number of complete pages, at the front.
size_t llama_h2o_archive::n_whole() const {
    const bool ends_amid_page = !pages.empty() && !llama_h2o_archive_header(pages.back().data).is_whole();

    return pages.size() - ends_amid_page;
}

void llama_h2o_archive::move_to_file(const std::string & path, const llama_h2o_archive_id & id) {
    drop_damaged(page_begin(), page_end());

    auto target = std::make_unique<llama_h2o_archive_file>(path, layout, id, max_pages_own);

    const size_t n = n_whole();
    if (n > 0) {
        page_memory memory = new_memory();
        for (size_t i = 0; i < n; ++i) {
            copy_page(pages[i], memory.get());
            target->append(memory.get());
        }
        spares.push_back(std::move(memory));
    }

    file      = std::move(target);
    max_pages = file->max_pages();
    while (max_pages > 0 && pages.size() > max_pages) {
        drop_first_page();
    }
    n_in_file      = n_whole();
    n_without_rows = 0; // these have rows
    for (size_t i = 0; i < n_in_file; ++i) {
        pages[i] = { std::move(pages[i].memory), file->page(page_begin() + uint32_t(i)) };
        if (!shares) {
            pages[i].memory.reset();
        }
    }
    write_error.clear();
}

// Adds the current pages of the file to an empty archive.
void llama_h2o_archive::hold_pages_of_file() {
    for (uint32_t i = file->page_begin(); i < file->page_end(); ++i) {
        pages.emplace_back().data = file->page(i);
    }

    n_in_file = pages.size();
    if (n_in_file > 0) {
        pos_first = llama_h2o_archive_header(pages.front().data).first;
        pos_next  = int32_t(file->page_end() * N_PAGE);
    }
}

void llama_h2o_archive::end_extend() {
    if (!file || !write_error.empty()) {
        return;
    }

    try {
        for (const size_t n = n_whole(); n_in_file < n; ++n_in_file) {
            auto & page = pages[n_in_file];
            file->append(page.memory.get());
            page.data = file->page(page_begin() + uint32_t(n_in_file));
            if (!shares) {
                spares.push_back(std::move(page.memory));
            }
        }
    } catch (const std::exception & err) {
        write_error = err.what();
    }
}

//
// writing
//

void llama_h2o_archive::clear() {
    begin_at(0);
    if (new_shared && !shares) {
        slab      = nullptr;
        n_in_slab = 0;
        shares    = true;
    }
}

void llama_h2o_archive::begin_at(int32_t p) {
    expect(p >= 0, "an archive cannot begin before the text");

    pages.clear();
    spares.clear();
    n_in_file      = 0;
    n_without_rows = 0;
    text_first     = 0;
    write_error.clear();
    pos_begin = pos_first = pos_next = p;
}

// Allocates slabs of shared memory for the next tokens.
void llama_h2o_archive::make_ahead(std::launch how, size_t n) {
    while (shares && next_shared.size() < n) {
        next_shared.push_back(std::async(how, new_shared, n_slab * layout.size()));
    }
}

llama_h2o_archive::page_memory llama_h2o_archive::new_memory() {
    if (!spares.empty()) {
        page_memory res = std::move(spares.back());
        spares.pop_back();

        return res;
    }

    if (n_in_slab == 0) {
        slab = nullptr;
        if (shares) {
            make_ahead(std::launch::deferred, 1);
            std::future<page_memory> next = std::move(next_shared.front());
            next_shared.pop_front();
            ++n_taken;
            slab = next.get();
        }
        if (!slab) {
            stop_sharing();
            slab = map_memory(n_slab * layout.size());
        }
        n_in_slab = n_slab;
    }
    --n_in_slab;

    return page_memory(slab, slab.get() + n_in_slab * layout.size());
}

// Memory for a page without rows.
llama_h2o_archive::page_memory llama_h2o_archive::new_header(const llama_h2o_archive_page_header & header) {
    page_memory res(new char[sizeof(header)], std::default_delete<char[]>());
    std::memcpy(res.get(), &header, sizeof(header));

    return res;
}

// Drops the shared copies of pages in the file.
void llama_h2o_archive::stop_sharing() {
    shares = false;
    next_shared.clear();
    for (size_t i = 0; i < n_in_file; ++i) {
        pages[i].memory.reset();
    }
}

// Makes shared copies of the pages in the file.
void llama_h2o_archive::share_file() {
    for (size_t i = 0; i < n_in_file && shares; ++i) {
        page_memory memory = new_memory();
        if (shares) {
            std::memcpy(memory.get(), pages[i].data, layout.size());
            pages[i].memory = std::move(memory);
        }
    }
}

bool llama_h2o_archive::is_full() const {
    return max_pages > 0 && pages.size() - n_without_rows + n_without_rows / WITHOUT_ROWS_A_PAGE >= max_pages;
}

// Makes room for one more page.
void llama_h2o_archive::make_room() {
    while (is_full()) {
        drop_first_page();
    }
}

void llama_h2o_archive::drop_first_page() {
    auto & page = pages.front();

    text_first = llama_h2o_archive_header(page.data).text();
    if (!page.has_rows) {
        --n_without_rows;
    } else if (page.memory) {
        spares.push_back(std::move(page.memory));
    }
    if (n_in_file > 0) {
        --n_in_file;
    }
    pages.pop_front();
    pos_first = int32_t((page_of(pos_first) + 1) * N_PAGE);
}

void llama_h2o_archive::append_page(page_memory memory, bool has_rows) {
    make_room();

    const char * data = memory.get();
    pages.push_back({ std::move(memory), data, has_rows });
    n_without_rows += !has_rows;
}

// Checksum of all tokens.
uint64_t llama_h2o_archive::text_end() const {
    return pages.empty() ? text_first : llama_h2o_archive_header(pages.back().data).text();
}

// Appends a page. The rows of the first n tokens will be set, up to a page; all others are zero.
void llama_h2o_archive::begin_page(uint32_t n) {
    const uint64_t text = text_end();

    make_room(); // may free memory for it
    page_memory memory = new_memory();
    const uint32_t i0  = uint32_t(pos_next) % N_PAGE;
    const uint32_t i1  = std::min(i0 + n, N_PAGE);
    uint64_t done      = 0;
    const auto zero    = [&](uint64_t end) {
        std::memset(memory.get() + done, 0, end - done);
    };
    for (uint32_t ikv = 0; ikv < layers().size(); ++ikv) {
        for (uint32_t head = 0; head < layers()[ikv].n_head_kv; ++head) {
            zero(layout.offset_k(ikv, head) + i0 * row_size(ikv));
            done = layout.offset_k(ikv, head) + i1 * row_size(ikv);
        }
    }
    zero(layout.size());
    llama_h2o_archive_header(memory.get()).start(pos_begin, pos_next, text);
    append_page(std::move(memory), true);
}

// Appends a token, the first of n with rows.
void llama_h2o_archive::append_token(int32_t id, uint32_t n) {
    const uint32_t i = uint32_t(pos_next) % N_PAGE;
    if (i == 0 || pages.empty()) {
        begin_page(n);
    }

    auto & header   = llama_h2o_archive_header(pages.back().memory.get());
    header.token[i] = id;
    ++header.count;
    ++pos_next;
}

void llama_h2o_archive::extend(uint32_t n, const int32_t * token_ids, bool has_rows) {
    expect(write_error.empty(), write_error.c_str());
    expect(n <= uint32_t(std::numeric_limits<int32_t>::max() - pos_next), "an archive ends at position 2147483647");

    const int32_t p0 = pos_next;
    try {
        n_taken = 0;
        for (uint32_t i = 0; i < n; ++i) {
            append_token(token_ids[i], has_rows ? n - i : 0);
        }
        make_ahead(std::launch::async | std::launch::deferred, std::min(n_taken, MOST_AHEAD));
    } catch (const std::bad_alloc &) {
        take_back(p0);
        throw;
    }
}

void llama_h2o_archive::take_back(int32_t p) {
    for (; pos_next > p; --pos_next) {
        auto & header = llama_h2o_archive_header(pages.back().memory.get());
        if (--header.count == 0) {
            pages.pop_back();
        }
    }
}

char * llama_h2o_archive::page_to_set(int32_t p) {
    expect(p >= pos_first && p < pos_next, "a position that the archive does not hold");
    const size_t i = page_of(p) - page_begin();
    expect(i >= n_in_file, "a row that is in the archive's file");
    expect(pages[i].has_rows, "a row that was dropped");

    return pages[i].memory.get();
}

char * llama_h2o_archive::k_to_set(uint32_t ikv, uint32_t head, int32_t p) {
    return page_to_set(p) + layout.offset_k(ikv, head) + p % N_PAGE * row_size(ikv);
}

char * llama_h2o_archive::v_to_set(uint32_t ikv, uint32_t head, int32_t p) {
    return page_to_set(p) + layout.offset_v(ikv, head) + p % N_PAGE * row_size(ikv);
}

void llama_h2o_archive::drop_rows(int32_t p0, int32_t p1) {
    const int32_t first = std::max(p0, pos_first);
    const uint32_t end  = page_of(std::max(first, std::min(p1, pos_next)));

    const bool is_amid_page = first > pos_first && first % int32_t(N_PAGE) != 0;
    for (uint32_t page = page_of(first) + is_amid_page; page < end; ++page) {
        auto & held = pages[page - page_begin()];
        if (page - page_begin() < n_in_file || !held.has_rows) {
            continue;
        }

        page_memory header = new_header(llama_h2o_archive_header(held.data));
        const char * data  = header.get();
        spares.push_back(std::move(held.memory));
        held = { std::move(header), data, false };
        ++n_without_rows;
    }
}

//
// reading
//

void llama_h2o_archive::copy_page(const held_page & page, char * to) const {
    static constexpr size_t PADDING = llama_h2o_archive_layout::PADDING;

    std::memset(to, 0, PADDING);
    std::memcpy(to, page.data, sizeof(llama_h2o_archive_page_header));
    std::memcpy(to + PADDING, rows_of(page) + PADDING, layout.size() - PADDING);
}

const llama_h2o_archive::held_page & llama_h2o_archive::page_at(uint32_t page) const {
    expect(page >= page_begin() && page < page_end(), "a page that the archive does not hold");

    return pages[page - page_begin()];
}

const char * llama_h2o_archive::k(uint32_t page, uint32_t ikv, uint32_t head) const {
    return rows_of(page_at(page)) + layout.offset_k(ikv, head);
}

const char * llama_h2o_archive::v(uint32_t page, uint32_t ikv, uint32_t head) const {
    return rows_of(page_at(page)) + layout.offset_v(ikv, head);
}

void llama_h2o_archive::release(uint32_t page) const {
    if (page - page_begin() < n_in_file) {
        file->release(page);
    }
}

//
// damage
//

int32_t llama_h2o_archive::drop_damaged(uint32_t begin, uint32_t end) {
    uint32_t last = end;
    for (; last > begin; --last) {
        const bool is_in_file = last - 1 - page_begin() < n_in_file;
        const bool is_sound   = !is_in_file || file->is_sound(last - 1);
        release(last - 1);
        if (!is_sound) {
            break;
        }
    }
    if (last == begin) {
        return 0;
    }

    const int32_t first = pos_first;
    while (page_begin() < last) {
        drop_first_page();
    }
    file->begin_at(page_begin());

    return pos_first - first;
}
