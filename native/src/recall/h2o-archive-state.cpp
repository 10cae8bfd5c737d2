// Saving and restoring the part of an archive that is not in a file.

#include "recall/h2o-archive.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

static constexpr uint64_t STATE_MAGIC = 0x68326f6172636801; // "h2oarch"; the last byte is the version

// Without padding, so that every written byte is defined. The pages follow unchanged; for a page without rows only the header
// follows, with an inverted magic.
struct archive_state {
    uint64_t magic;
    uint64_t layout; // checksum of the layout
    int32_t begin;
    int32_t first;
    int32_t next;
    uint32_t page; // number of the first page that follows
    uint64_t text; // checksum of all tokens before that page
};

static void expect(bool fits, const char * what) {
    if (!fits) {
        throw std::runtime_error(std::string("the state's archive ") + what);
    }
}

static bool is_empty(const archive_state & state) {
    return state.first == state.next;
}

static uint32_t end_of_pages(const archive_state & state) {
    return is_empty(state) ? state.page : llama_h2o_archive::page_of(state.next - 1) + 1;
}

static void expect_state(const archive_state & state, uint64_t layout) {
    expect(state.magic == STATE_MAGIC, "is of another version");
    expect(state.layout == layout, "is of another model or type");
    expect(state.begin >= 0 && state.begin <= state.first && state.first <= state.next,
            "has positions that are out of range");

    const uint32_t begin = llama_h2o_archive::page_of(state.first);
    const uint32_t end   = end_of_pages(state);
    // pages in a file are complete
    const bool ends_in_file = state.page == end && state.next % llama_h2o_archive::N_PAGE == 0;
    expect(is_empty(state) ? state.page == begin && state.text == 0
                           : state.page >= begin && (state.page < end || ends_in_file),
            "has pages that are out of range");
}

// Checks that this page continues the text with this checksum.
static void expect_page(
        const llama_h2o_archive_page_header & found, const archive_state & state, uint32_t page, uint64_t text) {
    const int32_t begin = int32_t(page * llama_h2o_archive::N_PAGE);

    llama_h2o_archive_page_header wanted = {};
    wanted.start(state.begin, std::max(begin, state.first), text);
    wanted.count = uint32_t(std::min<int64_t>(begin + int64_t(llama_h2o_archive::N_PAGE), state.next) - wanted.first);

    expect(found.magic == wanted.magic && found.page == wanted.page && found.begin == wanted.begin &&
                    found.first == wanted.first && found.count == wanted.count && found.text_before == text,
            "has inconsistent pages");
}

void llama_h2o_archive::write_state(const write_fn & write) const {
    const size_t n_left = n_in_file; // not written

    archive_state state = {};
    state.magic         = STATE_MAGIC;
    state.layout        = layout.checksum();
    state.begin         = pos_begin;
    state.first         = pos_first;
    state.next          = pos_next;
    state.page          = page_begin() + uint32_t(n_left);
    if (n_left < pages.size()) {
        state.text = llama_h2o_archive_header(pages[n_left].data).text_before;
    } else if (!is_empty(state)) {
        state.text = text_end();
    }
    write(&state, sizeof(state));

    for (size_t i = n_left; i < pages.size(); ++i) {
        const auto & page = pages[i];
        if (page.has_rows) {
            write(page.data, layout.size());
        } else {
            llama_h2o_archive_page_header header = llama_h2o_archive_header(page.data);
            header.magic                         = ~header.magic;
            write(&header, sizeof(header));
        }
        release(page_begin() + uint32_t(i));
    }
}

int32_t llama_h2o_archive::read_state(const read_fn & read) {
    archive_state state;
    read(&state, sizeof(state));
    expect_state(state, layout.checksum());

    std::vector<std::pair<page_memory, bool>> found; // and whether it has rows
    uint64_t text = state.text;
    for (uint32_t page = state.page; page < end_of_pages(state); ++page) {
        llama_h2o_archive_page_header header;
        read(&header, sizeof(header));
        const bool has_rows = header.magic >> 63 == 0;
        header.magic        = has_rows ? header.magic : ~header.magic;
        expect_page(header, state, page, text);
        expect(has_rows || header.is_whole(), "has incomplete pages without rows");
        text = header.text();

        const bool takes_rows = has_rows || file; // pages in a file always have rows
        page_memory memory    = takes_rows ? new_memory() : new_header(header);
        if (has_rows) {
            std::memcpy(memory.get(), &header, sizeof(header));
            read(memory.get() + sizeof(header), layout.size() - sizeof(header));
        } else if (file) {
            copy_page({ nullptr, reinterpret_cast<const char *>(&header), false }, memory.get());
        }
        found.emplace_back(std::move(memory), takes_rows);
    }

    const int64_t stored = int64_t(state.page) * N_PAGE;
    begin_at(std::max(state.first, int32_t(std::min<int64_t>(stored, state.next))));
    text_first = state.text;
    if (file) {
        file->find(state.page, state.text);
        hold_pages_of_file();
    }
    for (auto & [memory, has_rows] : found) {
        append_page(std::move(memory), has_rows);
    }
    pos_begin = state.begin;
    pos_next  = state.next;
    end_extend();
    if (file) {
        drop_damaged(page_begin(), page_begin() + uint32_t(n_in_file));
        share_file();
    }

    return std::max(0, pos_first - state.first);
}
