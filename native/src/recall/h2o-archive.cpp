#include "recall/h2o-archive.h"

#include "kernels/h2o-row-floats.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <stdexcept>
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

void llama_h2o_archive::free_page::operator()(char * data) const {
    ::operator delete(data, ALIGNMENT);
}

llama_h2o_archive::llama_h2o_archive(std::vector<llama_h2o_archive_layer> layers, ggml_type type, uint64_t max_bytes) :
    layout(std::move(layers), type), max_pages_own(pages_within(max_bytes, layout.size())), max_pages(max_pages_own) {}

//
// the file
//

void llama_h2o_archive::open_file(const std::string & path, const llama_h2o_archive_id & id) {
    expect(pages.empty(), "a file is opened for an empty archive");

    file      = std::make_unique<llama_h2o_archive_file>(path, layout, id, max_pages_own);
    max_pages = file->max_pages();

    hold_pages_of_file();
    if (!pages.empty()) {
        pos_begin = llama_h2o_archive_header(pages.back().data).begin;
    }
}

// Pages at the front that have all their tokens.
size_t llama_h2o_archive::n_whole() const {
    const bool ends_amid_page = !pages.empty() && !llama_h2o_archive_header(pages.back().data).is_whole();

    return pages.size() - ends_amid_page;
}

void llama_h2o_archive::move_to_file(const std::string & path, const llama_h2o_archive_id & id) {
    drop_damaged();

    auto target = std::make_unique<llama_h2o_archive_file>(path, layout, id, max_pages_own);

    const size_t n = n_whole();
    if (n > 0) {
        page_memory memory = new_memory();
        for (size_t i = 0; i < n; ++i) {
            std::memcpy(memory.get(), pages[i].data, layout.size());
            target->append(memory.get());
        }
        spare = std::move(memory);
    }

    file      = std::move(target);
    max_pages = file->max_pages();
    while (max_pages > 0 && pages.size() > max_pages) {
        drop_first_page();
    }
    n_in_file = n_whole();
    for (size_t i = 0; i < n_in_file; ++i) {
        pages[i].data = file->page(page_begin() + uint32_t(i));
        pages[i].memory.reset();
    }
    write_error.clear();
}

void llama_h2o_archive::close_file() {
    begin_at(0);
    file.reset();
    max_pages = max_pages_own;
}

void llama_h2o_archive::flush() {
    try {
        if (file) {
            file->sync();
        }
    } catch (const std::exception & err) {
        write_error = err.what();
    }
}

// Those that are current there, of an archive without pages.
void llama_h2o_archive::hold_pages_of_file() {
    for (uint32_t i = file->page_begin(); i < file->page_end(); ++i) {
        auto & page = pages.emplace_back();
        page.data   = file->page(i);
        page.k      = UNKNOWN;
        page.v      = UNKNOWN;
    }

    n_in_file = pages.size();
    if (n_in_file > 0) {
        pos_first = llama_h2o_archive_header(pages.front().data).first;
        pos_next  = int32_t(file->page_end() * N_PAGE);
    }
}

// As far as they have all their tokens.
void llama_h2o_archive::write_pages() {
    if (!file || !write_error.empty()) {
        return;
    }

    try {
        for (; n_in_file < pages.size(); ++n_in_file) {
            auto & page = pages[n_in_file];
            if (!llama_h2o_archive_header(page.data).is_whole()) {
                return;
            }
            file->append(page.memory.get());
            page.data = file->page(page_begin() + uint32_t(n_in_file));
            spare     = std::move(page.memory);
        }
    } catch (const std::exception & err) {
        write_error = err.what();
    }
}

//
// writing
//

void llama_h2o_archive::begin_at(int32_t p) {
    expect(p >= 0, "an archive cannot begin before the text");

    pages.clear();
    n_in_file = 0;
    write_error.clear();
    pos_begin = pos_first = pos_next = p;
}

void llama_h2o_archive::truncate_to(uint32_t page) {
    if (page <= page_begin()) {
        begin_at(std::min(int32_t(page * N_PAGE), pos_next));
        return;
    }
    while (page_end() > page) {
        pages.pop_back();
        pos_next = int32_t(page_end() * N_PAGE);
    }
    n_in_file = std::min(n_in_file, pages.size());
}

llama_h2o_archive::page_memory llama_h2o_archive::new_memory() {
    page_memory res = std::move(spare);
    if (!res) {
        res.reset(static_cast<char *>(::operator new(layout.size(), ALIGNMENT)));
    }

    return res;
}

// For one more page.
void llama_h2o_archive::make_room() {
    if (max_pages > 0 && pages.size() >= max_pages) {
        drop_first_page();
    }
}

void llama_h2o_archive::drop_first_page() {
    if (pages.front().memory) {
        spare = std::move(pages.front().memory);
    } else {
        --n_in_file;
    }
    pages.pop_front();
    pos_first = int32_t((page_of(pos_first) + 1) * N_PAGE);
}

void llama_h2o_archive::append_page(page_memory memory) {
    make_room();

    auto & page = pages.emplace_back();
    page.data   = memory.get();
    page.memory = std::move(memory);
}

// For the token that comes next.
void llama_h2o_archive::begin_page() {
    const uint64_t text = pages.empty() ? 0 : llama_h2o_archive_header(pages.back().data).text();

    make_room(); // whose memory may be of use
    page_memory memory = new_memory();
    std::memset(memory.get(), 0, layout.size());
    llama_h2o_archive_header(memory.get()).start(pos_begin, pos_next, text);
    append_page(std::move(memory));
}

void llama_h2o_archive::append_token(int32_t shift, int32_t id) {
    const uint32_t i = uint32_t(pos_next) % N_PAGE;
    if (i == 0 || pages.empty()) {
        begin_page();
    }

    auto & header   = llama_h2o_archive_header(pages.back().memory.get());
    header.shift[i] = shift;
    header.token[i] = id;
    ++header.count;
    ++pos_next;
}

void llama_h2o_archive::remove_last_token() {
    auto & header = llama_h2o_archive_header(pages.back().memory.get());
    if (--header.count == 0) {
        pages.pop_back();
    }
    --pos_next;
}

void llama_h2o_archive::extend(uint32_t n, int32_t shift, const int32_t * token_ids) {
    expect(write_error.empty(), write_error.c_str());
    expect(n <= uint32_t(std::numeric_limits<int32_t>::max() - pos_next), "an archive ends at position 2147483647");

    const int32_t p0 = pos_next;
    try {
        for (uint32_t i = 0; i < n; ++i) {
            append_token(shift, token_ids[i]);
        }
    } catch (const std::bad_alloc &) {
        while (pos_next > p0) {
            remove_last_token();
        }
        throw;
    }
}

void llama_h2o_archive::end_extend() {
    write_pages();
}

void llama_h2o_archive::expect_held(int32_t p) const {
    expect(p >= pos_first && p < pos_next, "a position that the archive does not hold");
}

char * llama_h2o_archive::page_to_set(int32_t p) {
    expect_held(p);
    char * res = pages[page_of(p) - page_begin()].memory.get();
    expect(res, "a row that is in the archive's file");

    return res;
}

void llama_h2o_archive::set_k(uint32_t ikv, uint32_t head, int32_t p, const float * row) {
    char * rows = page_to_set(p) + layout.offset_k(ikv, head);
    llama_h2o_from_floats(type(), row, rows + p % N_PAGE * row_size_k(ikv), layers()[ikv].n_embd_k);
}

void llama_h2o_archive::set_v(uint32_t ikv, uint32_t head, int32_t p, const float * row) {
    char * rows = page_to_set(p) + layout.offset_v(ikv, head);
    llama_h2o_from_floats(type(), row, rows + p % N_PAGE * row_size_v(ikv), layers()[ikv].n_embd_v);
}

//
// reading
//

const llama_h2o_archive::held_page & llama_h2o_archive::page_at(uint32_t page) const {
    expect(page >= page_begin() && page < page_end(), "a page that the archive does not hold");

    return pages[page - page_begin()];
}

const llama_h2o_archive::held_page & llama_h2o_archive::page_with(int32_t p) const {
    expect_held(p);

    return page_at(page_of(p));
}

const char * llama_h2o_archive::k(uint32_t page, uint32_t ikv, uint32_t head) const {
    return page_at(page).data + layout.offset_k(ikv, head);
}

const char * llama_h2o_archive::v(uint32_t page, uint32_t ikv, uint32_t head) const {
    return page_at(page).data + layout.offset_v(ikv, head);
}

void llama_h2o_archive::get_k(uint32_t ikv, uint32_t head, int32_t p, float * row) const {
    const char * rows = page_with(p).data + layout.offset_k(ikv, head);
    llama_h2o_to_floats(type(), rows + p % N_PAGE * row_size_k(ikv), row, layers()[ikv].n_embd_k);
}

void llama_h2o_archive::get_v(uint32_t ikv, uint32_t head, int32_t p, float * row) const {
    const char * rows = page_with(p).data + layout.offset_v(ikv, head);
    llama_h2o_to_floats(type(), rows + p % N_PAGE * row_size_v(ikv), row, layers()[ikv].n_embd_v);
}

int32_t llama_h2o_archive::shift(int32_t p) const {
    return llama_h2o_archive_header(page_with(p).data).shift[p % N_PAGE];
}

int32_t llama_h2o_archive::token(int32_t p) const {
    return llama_h2o_archive_header(page_with(p).data).token[p % N_PAGE];
}

void llama_h2o_archive::release(uint32_t page) const {
    if (!page_at(page).memory) {
        file->release(page);
    }
}

//
// damage
//

bool llama_h2o_archive::is_sound_k(uint32_t page) const {
    const auto & held = page_at(page);
    if (held.k == UNKNOWN) {
        const bool is_sound = layout.checksum_k(held.data) == llama_h2o_archive_header(held.data).checksum_k;
        held.k              = is_sound ? SOUND : DAMAGED;
    }

    return held.k == SOUND;
}

bool llama_h2o_archive::is_sound_v(uint32_t page) const {
    const auto & held = page_at(page);
    if (held.v == UNKNOWN) {
        const bool is_sound = layout.checksum_v(held.data) == llama_h2o_archive_header(held.data).checksum_v;
        held.v              = is_sound ? SOUND : DAMAGED;
    }

    return held.v == SOUND;
}

int32_t llama_h2o_archive::drop_damaged() {
    size_t n_drop = n_in_file;
    for (size_t i = n_in_file; i-- > 0;) {
        const uint32_t page = page_begin() + uint32_t(i);
        if (!is_sound_k(page) || !is_sound_v(page)) {
            break;
        }
        release(page);
        n_drop = i;
    }
    if (n_drop == 0) {
        return 0;
    }

    const int32_t first = pos_first;
    for (size_t i = 0; i < n_drop; ++i) {
        drop_first_page();
    }
    file->begin_at(page_begin());

    return pos_first - first;
}

void llama_h2o_archive::replace(uint32_t page) {
    expect(!page_at(page).memory, "a page that is not in a file needs no other");

    page_memory memory = new_memory();
    auto & held        = pages[page - page_begin()];
    std::memcpy(memory.get(), held.data, layout.size());
    held.data   = memory.get();
    held.memory = std::move(memory);
}

void llama_h2o_archive::end_replace(uint32_t page) {
    expect(page_at(page).memory && page - page_begin() < n_in_file, "a page that was not taken to memory");

    auto & held = pages[page - page_begin()];
    held.k      = SOUND;
    held.v      = SOUND;
    try {
        file->replace(held.memory.get());
    } catch (const std::exception & err) {
        write_error = err.what();
        return;
    }
    held.data = file->page(page);
    spare     = std::move(held.memory);
}
