#include "recall/h2o-index.h"

#include "kernels/h2o-kernel.h"

#include <algorithm>
#include <cmath>
#include <numeric>

static_assert(LLAMA_H2O_PAGE == llama_h2o_archive::N_PAGE, "a page of codes belongs to a page of the archive");

llama_h2o_index::llama_h2o_index(const std::vector<llama_h2o_archive_layer> & shapes, uint32_t n_find) :
    texts(shapes.size()), n_mean(n_find) {
    for (const auto & shape : shapes) {
        const size_t n = shape.n_head_kv;

        layers.push_back({ { shape.n_embd_k }, std::vector<std::vector<char>>(n), std::vector<const char *>(n),
                std::vector<std::vector<uint64_t>>(n), std::vector<const uint64_t *>(n), std::vector<uint64_t>(n),
                std::vector<uint64_t>(n), 0, n_heads() });
        n_hidden.resize(n_hidden.size() + n);
    }
    n_alone.resize(n_heads());
    n_together.resize(n_heads());
    measured.squares.resize(n_heads());
    rotations.push_back({ {}, {}, {} });
    set_slots(1);
}

void llama_h2o_index::set_rotation(uint32_t ikv, const std::vector<double> & angles, const llama_h2o_rotation & how) {
    const auto same = std::find_if(rotations.begin(), rotations.end(), [&](const rotation & other) {
        return other.angles == angles && other.how.first == how.first && other.how.neox == how.neox;
    });

    layers[ikv].rotation = size_t(same - rotations.begin());
    if (same == rotations.end()) {
        rotations.push_back({ angles, how, {} });
    }
}

void llama_h2o_index::set_slots(uint32_t n_slots) {
    if (n_slots <= weights.size()) {
        return;
    }

    weights.resize(n_slots, std::vector<double>(pages.size() * PAGE));
    shares.resize(n_slots, 0.0);
    measured = gains();
    head_gains.assign(n_slots * n_heads(), 0.0);
    set_slot_interest(n_slots);
    set_texts();
}

//
// following the archive
//

void llama_h2o_index::clear() {
    collect(true);
    for (auto & layer : layers) {
        for (auto & codes : layer.pages) {
            codes.clear();
        }
    }
    for (auto & row : weights) {
        row.clear();
    }
    std::fill(n_hidden.begin(), n_hidden.end(), 0);
    pages.clear();
    n_dead = 0;
    begin  = 0;
    first  = 0;
    next   = 0;
    places.clear();
    suspend();
}

void llama_h2o_index::suspend() {
    for (auto & text : texts) {
        text.n_pages = 0;
        text.focus   = llama_h2o_search_text::NO_FOCUS;
    }
}

void llama_h2o_index::drop_front(uint32_t n_pages) {
    n_dead += n_pages;
    begin  += n_pages;

    const size_t n_live  = pages.size() - n_pages;
    const bool is_mostly = n_dead > n_live; // mostly dead pages: worth moving the live ones
    for (auto & layer : layers) {
        for (auto & codes : layer.pages) {
            if (is_mostly && !codes.empty()) {
                codes.erase(codes.begin(), codes.begin() + std::ptrdiff_t(n_dead * layer.layout.size()));
            }
        }
    }
    n_dead = is_mostly ? 0 : n_dead;

    for (auto & row : weights) {
        row.erase(row.begin(), row.begin() + std::ptrdiff_t(n_pages) * PAGE);
    }
    pages.erase(pages.begin(), pages.begin() + n_pages);
    places.erase(places.begin(), places.begin() + n_pages);
}

// Sets the bits of rows i0 <= i < i1.
static void fill_bits(std::vector<uint64_t> & bits, uint32_t i0, uint32_t i1, bool value) {
    for (uint32_t i = i0; i < i1; i = (i / 64 + 1) * 64) {
        const uint32_t n    = std::min(i1, (i / 64 + 1) * 64) - i;
        const uint64_t mask = (n < 64 ? (uint64_t(1) << n) - 1 : ~uint64_t(0)) << i % 64;

        bits[i / 64] = value ? bits[i / 64] | mask : bits[i / 64] & ~mask;
    }
}

bool llama_h2o_index::follow(const llama_h2o_archive & archive, const std::vector<int32_t> & now) {
    collect(true);
    suspend();

    const uint32_t page_begin = archive.page_begin();
    const uint32_t page_end   = archive.page_end();
    const uint32_t n_pages    = page_end - page_begin;
    const uint32_t end        = begin + uint32_t(pages.size());

    const bool goes_on = archive.first() >= first && archive.next() >= next && page_begin < end;
    if (goes_on) {
        drop_front(page_begin - begin);
    } else {
        drop_front(uint32_t(pages.size()));
        begin = page_begin;
    }

    // encode from the page of the last token on, or all pages if the first one differs
    fresh = goes_on ? llama_h2o_archive::page_of(next) : begin;
    if (archive.first() != first && archive.first() % int32_t(PAGE) != 0) {
        fresh = begin;
    }
    bool has_changed = fresh < page_end && (archive.next() != next || archive.first() != first);
    // and pages with a new RoPE position
    const auto [was, is] = std::mismatch(places.begin(), places.end(), now.begin(), now.end());
    if (was != places.end() && is != now.end()) {
        fresh       = std::min(fresh, begin + uint32_t(was - places.begin()));
        has_changed = true;
    }

    first  = archive.first();
    next   = archive.next();
    places = now;

    if (n_pages == 0) {
        std::fill(n_hidden.begin(), n_hidden.end(), 0);
    }
    wanted.assign(size_t(n_pages) * (PAGE / 64), 0);
    fill_bits(wanted, uint32_t(first) - begin * PAGE, uint32_t(next) - begin * PAGE, true);
    pages.resize(n_pages);
    for (uint32_t i = 0; i < n_pages; ++i) {
        pages[i] = archive.k(begin + i, 0, 0);
    }
    for (uint32_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];
        for (uint32_t head = 0; head < layer.pages.size(); ++head) {
            layer.pages[head].resize(is_searching(ikv, head) ? (n_dead + n_pages) * layer.layout.size() : 0);
            layer.hidden[head].resize(size_t(n_pages) * (PAGE / 64));
            if (n_pages > 0) {
                layer.keys[head] = uint64_t(archive.k(begin, ikv, head) - pages[0]);
                // V is a part of K if it has no rows
                const bool has_values = archive.layers()[ikv].n_embd_v > 0;
                layer.values[head] = has_values ? uint64_t(archive.v(begin, ikv, head) - pages[0]) : layer.keys[head];
            }
        }
    }
    for (auto & row : weights) {
        row.resize(size_t(n_pages) * PAGE);
    }
    set_factors();
    set_texts();
    has_fresh = has_fresh || has_changed;

    return has_changed;
}

void llama_h2o_index::exclude(int32_t p0, int32_t p1) {
    p0 = std::max(p0, first);
    p1 = std::min(p1, next);
    if (p0 < p1) {
        fill_bits(wanted, uint32_t(p0) - begin * PAGE, uint32_t(p1) - begin * PAGE, false);
    }
}

void llama_h2o_index::update_devices(const llama_h2o_archive & archive) {
    for (auto & device : devices) {
        device->update(*this, archive, has_fresh ? fresh - begin : n_pages());
    }
    has_fresh = false;
}

bool llama_h2o_index::has_room() const {
    return std::all_of(devices.begin(), devices.end(), [](const auto & device) { return device->has_room(); });
}

// Adds the sums of the devices.
void llama_h2o_index::collect(bool rows) const {
    for (const auto & device : devices) {
        device->collect(*this, rows);
    }
}

void llama_h2o_index::encode(const llama_h2o_archive & archive, uint32_t ikv) {
    auto & layer = layers[ikv];

    const uint32_t n_embd = layer.layout.n_embd;
    const size_t row_size = archive.row_size(ikv);

    const auto & kernel = *llama_h2o_best_kernel(n_embd, n_embd);

    std::vector<float> keys(size_t(PAGE) * n_embd);
    std::vector<float> space(2 * n_embd);
    for (uint32_t page = fresh; page < begin + pages.size(); ++page) {
        const int32_t start = int32_t(page * PAGE);
        const uint32_t i0   = uint32_t(std::max(first - start, 0));
        const uint32_t i1   = uint32_t(std::min(next - start, int32_t(PAGE)));

        // rotates keys from their position in the page to their RoPE position
        const uint32_t n_unrotated = texts[ikv].n_unrotated;
        const float * factors      = page - begin < n_unrotated
                                             ? nullptr
                                             : texts[ikv].factors + size_t(page - begin - n_unrotated) * n_factors(ikv);

        for (uint32_t head = 0; head < layer.pages.size(); ++head) {
            if (!is_searching(ikv, head)) {
                continue;
            }
            const char * rows = archive.k(page, ikv, head);
            for (uint32_t i = i0; i < i1; ++i) {
                kernel.rotate(rotations[layer.rotation].how, factors, n_embd, { archive.type(), 0 },
                        rows + i * row_size, { GGML_TYPE_F32, 0 }, keys.data() + size_t(i) * n_embd, space.data());
            }
            char * codes = layer.pages[head].data() + (n_dead + page - begin) * layer.layout.size();
            kernel.encode(keys.data(), i0, i1, n_embd, codes, space.data());
        }
        archive.release(page);
    }
}

void llama_h2o_index::hide(uint32_t ikv, uint32_t head, const std::vector<int32_t> & held) {
    auto & layer = layers[ikv];
    auto & bits  = layer.hidden[head];

    std::copy(wanted.begin(), wanted.end(), bits.begin());
    for (const int32_t pos : held) {
        if (pos >= first && pos < next) {
            const uint32_t i  = uint32_t(pos) - begin * PAGE;
            bits[i / 64]     &= ~(uint64_t(1) << i % 64);
        }
    }
    n_hidden[layer.first_head + head] = std::accumulate(bits.begin(), bits.end(), 0u,
            [](uint32_t n, uint64_t word) { return n + uint32_t(__builtin_popcountll(word)); });
}

//
// RoPE positions of pages
//

void llama_h2o_index::set_factors() {
    const uint32_t n_pages = uint32_t(pages.size());

    uint32_t n_unrotated = 0;
    while (n_unrotated < n_pages && places[n_unrotated] == 0) {
        ++n_unrotated;
    }
    for (auto & one : rotations) {
        one.factors.resize(size_t(2) * one.how.n_dims * (n_pages - n_unrotated));

        float * factors = one.factors.data();
        for (uint32_t page = n_unrotated; page < n_pages; ++page, factors += 2 * one.how.n_dims) {
            for (size_t i = 0; i < one.angles.size(); ++i) {
                const double angle = one.angles[i] * places[page];
                one.how.set_factors(i, std::cos(angle), std::sin(angle), factors);
            }
        }
    }
    for (uint32_t ikv = 0; ikv < layers.size(); ++ikv) {
        const bool rotates     = !rotations[layers[ikv].rotation].angles.empty();
        texts[ikv].n_unrotated = rotates ? n_unrotated : n_pages;
    }
}

void llama_h2o_index::set_texts() {
    weight_rows.clear();
    for (auto & row : weights) {
        weight_rows.push_back(row.data());
    }
    for (uint32_t ikv = 0; ikv < layers.size(); ++ikv) {
        auto & layer = layers[ikv];
        for (size_t head = 0; head < layer.pages.size(); ++head) {
            auto & codes             = layer.pages[head];
            layer.first[head]        = codes.empty() ? nullptr : codes.data() + n_dead * layer.layout.size();
            layer.first_hidden[head] = layer.hidden[head].data();
        }

        auto & text   = texts[ikv];
        text.n_pages  = uint32_t(pages.size());
        text.pages    = pages.data();
        text.codes    = layer.first.data();
        text.hidden   = layer.first_hidden.data();
        text.keys     = layer.keys.data();
        text.values   = layer.values.data();
        text.factors  = rotations[layer.rotation].factors.data();
        text.weights  = weight_rows.data();
        text.interest = slot_interest_rows.data();
        text.shares   = shares.data();

        text.n_alone    = n_alone.data() + layer.first_head;
        text.n_together = n_together.data() + layer.first_head;
        text.gains      = head_gains.data() + layer.first_head * weights.size();
    }
}
