// Fuzz target: the archive in a state, without a file. A loaded archive can be used, written and loaded again; a refused state
// changes nothing.
//
// The first byte of an input selects the archive settings, the second byte the operations; the state follows.

#include "archives.h"
#include "mutator.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>

static constexpr size_t FRONT = 2;

// Flag of page links that stay wrong. Most are corrected, so that the parser reaches the second page.
static constexpr uint8_t RAW = 0x80;

// The header of a state; its last field is the checksum of the text before the first page.
static constexpr size_t SIZE_OF_NUMBERS = 40;

static void make_right(bytes & state, size_t page_size) {
    if (state.size() < SIZE_OF_NUMBERS) {
        return;
    }

    uint64_t text;
    std::memcpy(&text, state.data() + SIZE_OF_NUMBERS - sizeof(text), sizeof(text));
    for (size_t at = SIZE_OF_NUMBERS; at + page_size <= state.size(); at += page_size) {
        llama_h2o_archive_page_header header;
        std::memcpy(&header, state.data() + at, sizeof(header));
        header.text_before = text;
        std::memcpy(state.data() + at, &header, sizeof(header));
        text = header.text();
    }
}

static size_t page_size_of(const llama_h2o_archive & archive) {
    return llama_h2o_archive_layout(archive.layers(), archive.type()).size();
}

static void check_state(const llama_h2o_archive & archive, uint8_t settings) {
    const auto other  = new_archive(settings);
    int32_t n_missing = 0;
    expect(read_state(*other, state_of(archive), n_missing), "what was written can be read");
    expect(n_missing == 0, "and lacks nothing");
    check_same(archive, *other);
    check_rows(*other);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size <= FRONT) {
        return 0;
    }

    const auto archive = new_archive(data[0]);
    random_numbers random(data[1]);
    extend(*archive, 2 * (data[1] & 0x7f), random);
    const bytes before = state_of(*archive);

    bytes state(data + FRONT, data + size);
    if (!(data[1] & RAW)) {
        make_right(state, page_size_of(*archive));
    }

    int32_t n_missing = 0;
    if (!read_state(*archive, state, n_missing)) {
        expect(state_of(*archive) == before, "what is refused changes nothing");
        return 0;
    }
    expect(n_missing >= 0, "no less than nothing is missing");
    check_rows(*archive);
    check_state(*archive, data[0]);

    // positions have 32 bits
    static constexpr uint32_t MORE = 140;
    if (archive->next() <= std::numeric_limits<int32_t>::max() - int32_t(MORE)) {
        extend(*archive, MORE, random);
        check_rows(*archive);
        check_state(*archive, data[0]);
    }

    return 0;
}

// Returns the offset of the numbers in the state's header or in a page.
static size_t begin_of_numbers(const uint8_t * data, size_t size, random_numbers & random) {
    const size_t page_size = page_size_of(*new_archive(data[0]));
    const size_t n_pages   = (size - FRONT) / page_size;
    const size_t page      = random.next(uint32_t(n_pages) + 1);

    return page == n_pages ? FRONT : FRONT + SIZE_OF_NUMBERS + page * page_size;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    return mutate(data, size, max_size, seed, FRONT, begin_of_numbers);
}
