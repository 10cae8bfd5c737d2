#include "recall/h2o-archive.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

static constexpr std::align_val_t ALIGNMENT { llama_h2o_archive_layout::PADDING };

static void expect(bool is_so, const char * what) {
    if (!is_so) {
        throw std::runtime_error(what);
    }
}

static uint64_t pages_within(uint64_t max_bytes, uint64_t page_size) {
    if (max_bytes > 0 && max_bytes < page_size) {
        throw std::runtime_error("the archive's limit of " + std::to_string(max_bytes) +
                                 " bytes is less than its first page, which takes " + std::to_string(page_size));
    }

    return max_bytes / page_size;
}

static void from_float(ggml_type type, const float * row, uint32_t n_embd, char * stored) {
    const auto convert = ggml_get_type_traits(type)->from_float_ref;
    if (convert) {
        convert(row, stored, n_embd);
    } else {
        std::memcpy(stored, row, n_embd * sizeof(float));
    }
}

static void to_float(ggml_type type, const char * stored, uint32_t n_embd, float * row) {
    const auto convert = ggml_get_type_traits(type)->to_float;
    if (convert) {
        convert(stored, row, n_embd);
    } else {
        std::memcpy(row, stored, n_embd * sizeof(float));
    }
}

static llama_h2o_archive_page_header & header_in(char * page) {
    return *reinterpret_cast<llama_h2o_archive_page_header *>(page);
}

static const llama_h2o_archive_page_header & header_in(const char * page) {
    return *reinterpret_cast<const llama_h2o_archive_page_header *>(page);
}

void llama_h2o_archive::free_page::operator()(char * data) const {
    ::operator delete(data, ALIGNMENT);
}

llama_h2o_archive::llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes) :
    layout(std::move(layers), type), max_pages(pages_within(max_bytes, layout.size())) {}

//
// writing
//

void llama_h2o_archive::expect_held(int32_t p) const {
    expect(p >= pos_first && p < pos_next, "a position that the archive does not hold");
}

void llama_h2o_archive::begin_at(int32_t p) {
    expect(p >= 0, "an archive cannot begin before the text");

    pages.clear();
    pos_begin = pos_first = pos_next = p;
}

void llama_h2o_archive::drop_page() {
    pages.pop_front();
    pos_first = int32_t((page_of(pos_first) + 1) * N_PAGE);
}

// For the token that comes next.
void llama_h2o_archive::append_page() {
    page_memory memory;
    if (max_pages > 0 && pages.size() == max_pages) {
        memory = std::move(pages.front());
        drop_page();
    } else {
        memory.reset(static_cast<char *>(::operator new(layout.size(), ALIGNMENT)));
    }

    std::memset(memory.get(), 0, layout.size());
    auto & header = header_in(memory.get());
    header.page   = page_of(pos_next);
    header.first  = pos_next;
    pages.push_back(std::move(memory));
}

void llama_h2o_archive::extend(uint32_t n, int32_t shift, const int32_t * token_ids) {
    expect(n <= uint32_t(std::numeric_limits<int32_t>::max() - pos_next), "an archive ends at position 2147483647");

    for (uint32_t i = 0; i < n; ++i) {
        const uint32_t slot = uint32_t(pos_next) % N_PAGE;
        if (slot == 0 || pages.empty()) {
            append_page();
        }

        auto & header      = header_in(pages.back().get());
        header.shift[slot] = shift;
        header.token[slot] = token_ids[i];
        ++header.count;
        ++pos_next;
    }
}

char * llama_h2o_archive::page_to_set(int32_t p) {
    expect_held(p);

    return pages[page_of(p) - page_begin()].get();
}

void llama_h2o_archive::set_k(uint32_t ikv, uint32_t head, int32_t p, const float * row) {
    char * rows = page_to_set(p) + layout.offset_k(ikv, head);
    from_float(type(), row, layers()[ikv].n_embd_k, rows + p % N_PAGE * row_size_k(ikv));
}

void llama_h2o_archive::set_v(uint32_t ikv, uint32_t head, int32_t p, const float * row) {
    char * rows = page_to_set(p) + layout.offset_v(ikv, head);
    from_float(type(), row, layers()[ikv].n_embd_v, rows + p % N_PAGE * row_size_v(ikv));
}

//
// reading
//

const char * llama_h2o_archive::page_at(uint32_t page) const {
    expect(page >= page_begin() && page < page_end(), "a page that the archive does not hold");

    return pages[page - page_begin()].get();
}

const char * llama_h2o_archive::page_with(int32_t p) const {
    expect_held(p);

    return page_at(page_of(p));
}

const char * llama_h2o_archive::k(uint32_t page, uint32_t ikv, uint32_t head) const {
    return page_at(page) + layout.offset_k(ikv, head);
}

const char * llama_h2o_archive::v(uint32_t page, uint32_t ikv, uint32_t head) const {
    return page_at(page) + layout.offset_v(ikv, head);
}

void llama_h2o_archive::get_k(uint32_t ikv, uint32_t head, int32_t p, float * row) const {
    const char * rows = page_with(p) + layout.offset_k(ikv, head);
    to_float(type(), rows + p % N_PAGE * row_size_k(ikv), layers()[ikv].n_embd_k, row);
}

void llama_h2o_archive::get_v(uint32_t ikv, uint32_t head, int32_t p, float * row) const {
    const char * rows = page_with(p) + layout.offset_v(ikv, head);
    to_float(type(), rows + p % N_PAGE * row_size_v(ikv), layers()[ikv].n_embd_v, row);
}

int32_t llama_h2o_archive::shift(int32_t p) const {
    return header_in(page_with(p)).shift[p % N_PAGE];
}

int32_t llama_h2o_archive::token(int32_t p) const {
    return header_in(page_with(p)).token[p % N_PAGE];
}
