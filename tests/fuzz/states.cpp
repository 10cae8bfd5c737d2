// Fuzz target: states of a text. A loaded text can be continued; a refused state leaves an empty cache.
//
// The first byte of an input selects the cache settings, the second byte the operations; the state follows.

#include "caches.h"
#include "mutator.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>

static constexpr size_t FRONT = 2;

// Flag of a checksum that stays wrong. Most are corrected, so that the parser continues after it.
static constexpr uint8_t RAW = 0x80;

// Logits of a new text, which must not depend on a refused state.
static const std::vector<float> & logits_of_new_text(size_t i) {
    static std::map<size_t, std::vector<float>> all;

    auto & res = all[i];
    if (res.empty()) {
        cache & empty = cache::of(i);
        empty.clear();
        expect(empty.read({ 1, 7, 42 }), "a new text can be read");
        res = empty.logits();
    }

    return res;
}

static void check_new_text(size_t i) {
    cache & cleared = cache::of(i);
    expect(cleared.is_empty(), "a cleared cache is empty");
    expect(cleared.read({ 1, 7, 42 }), "a new text can be read");
    expect(cleared.logits() == logits_of_new_text(i), "a new text is what it always is");
}

// A written state can be loaded, and is the same.
static void check_state(cache & text) {
    const bytes state = text.state();
    expect(text.load(state), "what was written can be loaded");
    expect(text.state() == state, "and is the same then");
}

// Returns false if the state has rows that are not finite: then the logits are not finite either, or llama.cpp fails.
static bool read(cache & text, uint32_t n, random_numbers & random) {
    if (!text.read(random_tokens(n, random))) {
        return false;
    }

    const auto logits = text.logits();

    return std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); });
}

static void go_on(cache & text, uint8_t what) {
    random_numbers random(what);

    // llama.cpp counts positions in 32 bits
    static constexpr llama_pos MOST_TOKENS = 64;
    if (text.newest() > std::numeric_limits<llama_pos>::max() - MOST_TOKENS) {
        return;
    }

    if (what & 1) {
        text.remove_tail(random.next(8));
    }
    if (what & 2) {
        text.reset_found();
    }
    if (!read(text, 1, random)) {
        return;
    }
    text.check_rows();
    check_state(text);

    for (uint32_t i = 0; i < uint32_t(what >> 2 & 7); ++i) {
        if (!read(text, 1 + random.next(16), random)) {
            return;
        }
        text.check_rows();
    }
    check_state(text);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size <= FRONT) {
        return 0;
    }

    const size_t i = data[0] % n_caches();
    logits_of_new_text(i);

    cache & text = cache::of(i);
    text.clear();

    bytes state(data + FRONT, data + size);
    if (!(data[1] & RAW)) {
        set_checksum(state);
    }

    if (text.load(state)) {
        text.check_rows();
        check_state(text);
        go_on(text, data[1]);
        text.clear();
    }
    check_new_text(i);

    return 0;
}

static size_t begin_of_numbers(const uint8_t *, size_t, random_numbers &) {
    return FRONT;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned seed) {
    return mutate(data, size, max_size, seed, FRONT, begin_of_numbers);
}
