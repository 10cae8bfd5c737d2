// Fuzz target: archive files. An opened file can be read and extended; a refused file is unchanged.
//
// The first byte of an input selects the archive settings, the second byte the operations; the file follows.

#include "archives.h"
#include "mutator.h"

#include "recall/h2o-checksum.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <utility>

static constexpr size_t FRONT       = 2;
static constexpr uint64_t PADDING   = llama_h2o_archive_layout::PADDING;
static constexpr uint64_t N_NUMBERS = 56; // bytes that a file begins with; the layers and a checksum follow

// Flags of checksums that stay wrong. Most are corrected, so that the parser continues after them.
static constexpr uint8_t RAW_FILE  = 0x80;
static constexpr uint8_t RAW_PAGES = 0x40;
static constexpr uint8_t RAW_ROWS  = 0x20;

static llama_h2o_archive_layout layout_of(const llama_h2o_archive & archive) {
    return { archive.layers(), archive.type() };
}

static void make_file_right(bytes & file, const llama_h2o_archive_layout & layout) {
    const size_t size = N_NUMBERS + layout.layers().size() * sizeof(llama_h2o_archive_layer);
    if (file.size() < size + sizeof(uint64_t)) {
        return;
    }

    llama_h2o_checksum sum;
    sum.add(file.data(), size);
    const uint64_t value = sum.value();
    std::memcpy(file.data() + size, &value, sizeof(value));
}

static void make_pages_right(bytes & file, const llama_h2o_archive_layout & layout, bool with_rows) {
    for (size_t at = PADDING; at + layout.size() <= file.size(); at += layout.size()) {
        const char * page = reinterpret_cast<const char *>(file.data() + at);

        llama_h2o_archive_page_header header;
        std::memcpy(&header, page, sizeof(header));
        if (with_rows) {
            header.checksum_rows = layout.checksum_rows(page);
        }
        header.set_checksum();
        std::memcpy(file.data() + at, &header, sizeof(header));
    }
}

static bool open(llama_h2o_archive & archive, const memory_file & file) {
    try {
        archive.open_file(file.path(), TEXT_ID);
    } catch (const std::exception &) {
        return false;
    }

    return true;
}

// The archive is the same after the file was closed and opened again.
static void check_again(std::unique_ptr<llama_h2o_archive> archive, uint8_t settings, const memory_file & file) {
    archive->drop_damaged(archive->page_begin(), archive->page_end());
    const bytes state   = state_of(*archive);
    const int32_t first = archive->first();
    archive.reset(); // the file is locked

    const auto other = new_archive(settings);
    expect(open(*other, file), "the file can be opened again");
    int32_t n_missing = 0;
    expect(read_state(*other, state, n_missing), "the state that needs it can be read");
    expect(n_missing == 0, "and lacks nothing");
    check_rows(*other);
    if (other->first() == first) { // its own limit may be less than the file's
        expect(state_of(*other) == state, "the state is the same");
    }
}

static void resume(std::unique_ptr<llama_h2o_archive> archive,
        uint8_t settings,
        const memory_file & file,
        random_numbers & random) {
    check_rows(*archive);
    archive->drop_damaged(archive->page_begin(), archive->page_end());
    check_rows(*archive);

    // positions have 32 bits
    static constexpr uint32_t MORE = 300;
    if (archive->next() <= std::numeric_limits<int32_t>::max() - int32_t(MORE)) {
        extend(*archive, MORE, random);
        check_rows(*archive);
    }
    if (archive->error().empty()) {
        check_again(std::move(archive), settings, file);
    }
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size <= FRONT) {
        return 0;
    }

    auto archive      = new_archive(data[0]);
    const auto layout = layout_of(*archive);

    bytes content(data + FRONT, data + size);
    if (!(data[1] & RAW_PAGES)) {
        make_pages_right(content, layout, !(data[1] & RAW_ROWS));
    }
    if (!(data[1] & RAW_FILE)) {
        make_file_right(content, layout);
    }

    const memory_file file(content);
    random_numbers random(data[1]);
    if (open(*archive, file)) {
        resume(std::move(archive), data[0], file, random);
    } else {
        expect(file.content() == content, "a file that is refused stays as it is");
        extend(*archive, 140, random);
        check_rows(*archive);
    }

    return 0;
}

// Returns the offset of the numbers in the file's header or in a page.
static size_t begin_of_numbers(const uint8_t * data, size_t size, random_numbers & random) {
    const size_t page_size = layout_of(*new_archive(data[0])).size();
    const size_t n_pages   = (size - FRONT) / page_size;
    const size_t page      = random.next(uint32_t(n_pages) + 1);

    return page == n_pages ? FRONT : FRONT + PADDING + page * page_size;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    return mutate(data, size, max_size, seed, FRONT, begin_of_numbers);
}
