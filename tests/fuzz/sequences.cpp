// Fuzz target: sequences of operations with a text. The cache must have the expected rows, saved states can be loaded, and the
// same steps give the same result, bit for bit, whatever the context did before.
//
// The first byte of an input selects the cache settings. Each following byte is a step: an operation and an amount.

#include "caches.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>

static constexpr size_t MAX_STEPS = 24;

// Header of a state: a magic number and its sequence, which may be any.
static constexpr size_t N_FRONT = 8;

// The expected text.
struct told {
    uint32_t n_tokens     = 0;
    uint32_t n_pinned     = 0; // the fewest that ever were
    llama_pos n_evictable = 0; // rows of positions before this one may have been evicted
};

struct saved {
    bytes state;
    told text;
    uint32_t n_changes = 0;
};

// Runs the steps of an input.
class sequence {
public:
    explicit sequence(cache & text) : text(text) {
        text.clear();
        now.n_pinned = text.n_pinned();
    }

    void step(uint8_t byte);

    // checks length and rows
    void check() const;

    std::vector<float> future() { return future(text.state()); }

private:
    std::vector<llama_token> next_tokens(uint32_t n);

    void have_read(uint32_t n);
    void read(uint32_t n);
    void read_after_breaking_off(uint32_t n);
    void read_exactly(uint32_t n);
    void remove(uint32_t n);
    void go_back_to_mark(uint32_t n);
    void mark();
    void pin(uint32_t n);
    void save(uint32_t i);
    void load(uint32_t i);
    void load_damaged(uint32_t i);
    void clear();
    void begin_anew();

    // returns logits and rows of a continuation with a compaction
    std::vector<float> future(const bytes & state);

    cache & text;
    told now;
    std::array<saved, 2> slots;
    std::map<llama_pos, saved> marks;
    uint32_t n_changes = 0; // of what a mark does not go back on: pins
    random_numbers random { 1 };
};

std::vector<llama_token> sequence::next_tokens(uint32_t n) {
    return random_tokens(n, random);
}

void sequence::have_read(uint32_t n) {
    now.n_tokens    += n;
    now.n_evictable  = std::max(now.n_evictable, llama_pos(now.n_tokens) - llama_pos(text.n_recent()));

    const auto logits = text.logits();
    expect(std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); }), "logits are numbers");
}

void sequence::read(uint32_t n) {
    expect(text.read(next_tokens(n)), "a text can be read");
    have_read(n);
}

void sequence::read_after_breaking_off(uint32_t n) {
    auto tokens = next_tokens(n);
    if (text.begin_to_read(tokens, n * n)) {
        // tokens before the aborted batch stay, and so do compactions
        const uint32_t n_done = uint32_t(text.newest() + 1) - now.n_tokens;
        expect(n_done < n, "not all is read");
        now.n_evictable  = std::max(now.n_evictable, llama_pos(now.n_tokens + n) - llama_pos(text.n_recent()));
        now.n_tokens    += n_done;
        check();
        tokens.erase(tokens.begin(), tokens.begin() + n_done);
        n -= n_done;
    } else if (text.newest() + 1 > llama_pos(now.n_tokens)) {
        return have_read(n);
    }
    expect(text.read(tokens), "what was broken off can be read");
    have_read(n);
}

void sequence::read_exactly(uint32_t n) {
    expect(text.read_exactly(next_tokens(n)), "a text can be read in full");
    have_read(n);
}

void sequence::remove(uint32_t n) {
    const llama_pos begin   = std::max(0, llama_pos(now.n_tokens) - llama_pos(n));
    const bool is_removable = begin == 0 || begin == llama_pos(now.n_tokens) || begin >= text.stats().pos_removable;

    expect(text.remove_from(begin) == is_removable, "what can be removed is removed, and nothing else");
    if (is_removable) {
        now.n_tokens    = uint32_t(begin);
        now.n_evictable = std::min(now.n_evictable, begin);
    }
    if (begin == 0) {
        clear();
    }
}

void sequence::mark() {
    if (now.n_tokens > 0 && text.mark() == LLAMA_H2O_OK) {
        marks[llama_pos(now.n_tokens)] = { text.state(), now, n_changes };
    }
}

void sequence::go_back_to_mark(uint32_t n) {
    const llama_pos pos = text.marked(std::max(0, llama_pos(now.n_tokens) - llama_pos(n)));
    if (pos > 0 && pos >= text.stats().pos_removable) { // recurrent layers cannot go back
        const saved & then = marks.at(pos);
        expect(text.remove_from(pos), "a text can go back to a mark");
        if (n_changes == then.n_changes) {
            const bytes here = text.state();
            expect(future(here) == future(then.state), "and goes on as if what followed had never been there");
            expect(text.load(here), "what was saved can be loaded");
        }
        now.n_tokens    = then.text.n_tokens;
        now.n_evictable = then.text.n_evictable;
    }
}

void sequence::pin(uint32_t n) {
    ++n_changes;
    switch (n % 4) {
        case 0:
            text.share_fairly(llama_pos(n + 1));
            break;
        case 1:
            text.pin_span({ llama_pos(2 * n), llama_pos(2 * n + 2) });
            break;
        default:
            if (text.pin(n / 4) == LLAMA_H2O_OK) {
                now.n_pinned = std::min(now.n_pinned, n / 4);
            }
    }
}

void sequence::save(uint32_t i) {
    slots[i] = { text.state(), now };
}

void sequence::load(uint32_t i) {
    if (slots[i].state.empty()) {
        return;
    }
    expect(text.load(slots[i].state), "what was saved can be loaded");
    expect(text.state() == slots[i].state, "and is the same then");
    now = slots[i].text;
}

void sequence::load_damaged(uint32_t i) {
    bytes state = slots[i].state;
    if (state.empty()) {
        return;
    }
    const size_t at  = N_FRONT + random.next(uint32_t(state.size() - N_FRONT));
    state[at]       ^= uint8_t(1 << random.next(8));
    expect(!text.load(state), "what is damaged is refused");
    begin_anew();
}

void sequence::clear() {
    text.clear();
    begin_anew();
}

void sequence::begin_anew() {
    expect(text.is_empty(), "a cache that was cleared, or has refused a state, is empty");
    now          = {};
    now.n_pinned = text.n_pinned();
}

void sequence::step(uint8_t byte) {
    const uint32_t n = byte >> 4;

    switch (byte & 15) {
        case 0:
            return remove(n);
        case 1:
            return remove(n / 4);
        case 2:
            return text.reset_found();
        case 3:
            return mark();
        case 4:
            return go_back_to_mark(n);
        case 5:
            return pin(n);
        case 6:
            return save(n % slots.size());
        case 7:
            return load(n % slots.size());
        case 8:
            return n == 0 ? clear() : n < 4 ? load_damaged(n % slots.size()) : read(1);
        case 9:
            return n < 4 ? read_exactly(8 * (n + 1)) : read_after_breaking_off(n);
        default:
            return read(n + 1);
    }
}

void sequence::check() const {
    text.check_rows();
    const auto found = text.found();
    expect(std::all_of(found.begin(), found.end(), [](double x) { return x >= 0.0 && std::isfinite(x); }),
            "what was looked at makes sense");
    expect(text.newest() + 1 == llama_pos(now.n_tokens), "a text is as long as what was read");

    std::vector<llama_pos> kept;
    for (llama_pos pos = 0; pos < llama_pos(now.n_tokens); ++pos) {
        if (pos < llama_pos(now.n_pinned) || pos >= now.n_evictable) {
            kept.push_back(pos);
        }
    }

    for (const auto & head : text.rows()) {
        expect(std::adjacent_find(head.begin(), head.end()) == head.end(), "a head has a position once");
        expect(std::includes(head.begin(), head.end(), kept.begin(), kept.end()), "recent and pinned rows are there");
    }
}

std::vector<float> sequence::future(const bytes & state) {
    static constexpr uint32_t N_TIMES = 5; // slack and recent rows are read in as many

    expect(text.load(state), "what was saved can be loaded");

    std::vector<float> res;
    random_numbers numbers(2);
    for (uint32_t i = 0; i < N_TIMES; ++i) {
        expect(text.read(random_tokens(2, numbers)), "a text can be read");
        const auto logits = text.logits();
        res.insert(res.end(), logits.begin(), logits.end());
    }
    for (const auto & head : text.rows()) {
        res.insert(res.end(), head.begin(), head.end());
    }
    const auto found = text.found();
    res.insert(res.end(), found.begin(), found.end());

    return res;
}

static std::vector<float> end_of(cache & text, const uint8_t * steps, size_t n) {
    sequence res(text);
    for (size_t i = 0; i < n; ++i) {
        res.step(steps[i]);
        res.check();
    }

    return res.future();
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    if (size < 2) {
        return 0;
    }

    cache & text    = cache::of(data[0] % n_caches());
    const size_t n  = std::min(size - 1, MAX_STEPS);
    const auto once = end_of(text, data + 1, n);
    expect(end_of(text, data + 1, n) == once, "the same steps lead to the same end");

    return 0;
}
