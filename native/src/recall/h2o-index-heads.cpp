// The part of the index that chooses the heads that search, and sums up the attention to retrieved rows.

#include "recall/h2o-index.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

//
// heads that search
//

static uint32_t n_searching(uint32_t n_heads) {
    return (n_heads + llama_h2o_index::HEADS_A_ONE - 1) / llama_h2o_index::HEADS_A_ONE;
}

uint32_t llama_h2o_index::max_find() const {
    return uint32_t(uint64_t(n_mean) * n_heads() / n_searching(n_heads()));
}

llama_h2o_gains llama_h2o_index::gains() const {
    collect(false);

    llama_h2o_gains res = measured;
    for (const auto & layer : layers) {
        const size_t n      = layer.pages.size();
        const double * rows = head_gains.data() + layer.first_head * (head_gains.size() / n_heads());

        for (size_t i = 0; searching.empty() && i < head_gains.size() / n_heads() * n; ++i) {
            res.squares[layer.first_head + i % n] += rows[i];
        }
    }
    res.interest = interest();

    return res;
}

std::vector<double> llama_h2o_index::interest() const {
    std::vector<double> res = measured.interest;
    for (const auto & row : slot_interest) {
        std::transform(row.begin(), row.end(), res.begin(), res.begin(), std::plus<double>());
    }

    return res;
}

void llama_h2o_index::set_slot_interest(size_t n_slots) {
    slot_interest.assign(n_slots, std::vector<double>(measured.interest.size()));
    slot_interest_rows.resize(n_slots);
    for (size_t i = 0; i < n_slots; ++i) {
        slot_interest_rows[i] = slot_interest[i].data();
    }
}

// Moves the interest to the passages of the current pages.
void llama_h2o_index::align_interest() {
    const std::vector<double> before = interest();

    measured.interest.assign(pages.size() * PASSAGES, 0.0);
    for (size_t i = 0; i < before.size(); ++i) {
        const size_t passage = size_t(measured.page) * PASSAGES + i;
        const size_t first   = size_t(begin) * PASSAGES;
        if (passage >= first && passage - first < measured.interest.size()) {
            measured.interest[passage - first] = before[i];
        }
    }
    measured.page = begin;
    set_slot_interest(slot_interest.size());
}

bool llama_h2o_index::set_gains(const llama_h2o_gains & gains) {
    collect(false);

    const std::vector<bool> before = std::exchange(searching, {});

    measured = gains;
    std::fill(head_gains.begin(), head_gains.end(), 0.0);
    set_slot_interest(slot_interest.size());
    if (measured.n_tokens >= N_MEASURED) {
        choose_heads();
    }
    if (before.empty() || before == searching) {
        return true;
    }
    clear();

    return false;
}

void llama_h2o_index::choose_heads() {
    measured.squares = gains().squares;

    std::vector<uint32_t> order(n_heads());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return measured.squares[a] > measured.squares[b]; });

    searching.assign(n_heads(), false);
    for (uint32_t i = 0; i < n_searching(n_heads()); ++i) {
        searching[order[i]] = true;
    }
    for (uint32_t ikv = 0; ikv < layers.size(); ++ikv) {
        for (uint32_t head = 0; head < layers[ikv].pages.size(); ++head) {
            if (!is_searching(ikv, head)) {
                layers[ikv].pages[head] = {};
                layers[ikv].first[head] = nullptr;
            }
        }
    }
}

void llama_h2o_index::prepare(uint32_t n_tokens) {
    collect(false);
    if (searching.empty() && measured.n_tokens >= N_MEASURED) {
        choose_heads();
    }
    // if all hidden rows are retrieved, there is nothing to choose
    const bool chooses = !searching.empty() || *std::max_element(n_hidden.begin(), n_hidden.end()) > n_mean;
    if (searching.empty() && chooses) {
        measured.n_tokens += n_tokens;
    }

    for (uint32_t i = 0; i < n_heads(); ++i) {
        n_together[i] = searching.empty() ? n_mean : searching[i] ? max_find() : 0;
        n_alone[i]    = chooses ? (n_together[i] + ALONE - 1) / ALONE : n_together[i];
    }

    align_interest();
    // the passage takes the rows that a single token does not retrieve
    choose_focus(n_tokens == 1 && !searching.empty() && n_mean - (n_mean + ALONE - 1) / ALONE >= PASSAGE);
    const double fading = std::exp2(-double(n_tokens) / HALF_LIFE);
    for (double & x : measured.interest) {
        x *= fading;
    }
    for (auto & device : devices) {
        device->prepare(*this);
    }
}

// All heads attend to the passage with the largest interest; the first one of equal ones.
void llama_h2o_index::choose_focus(bool may_be) {
    const auto & interest = measured.interest;
    const auto best       = std::max_element(interest.begin(), interest.end());
    const bool has_one    = may_be && best != interest.end() && *best > 0.0;

    for (auto & text : texts) {
        text.focus = has_one ? uint32_t(best - interest.begin()) * PASSAGE : llama_h2o_search_text::NO_FOCUS;
    }
}

//
// attention to retrieved rows
//

double llama_h2o_index::weight(int64_t pos) const {
    collect(true);

    double res = 0.0;
    for (const auto & row : weights) {
        const int64_t i = pos - int64_t(begin) * PAGE;

        res += i >= 0 && i < int64_t(row.size()) ? row[i] : 0.0;
    }

    return res;
}

double llama_h2o_index::share() const {
    collect(false);

    return std::accumulate(shares.begin(), shares.end(), 0.0);
}

void llama_h2o_index::reset_weights() {
    collect(true);
    for (auto & row : weights) {
        std::fill(row.begin(), row.end(), 0.0);
    }
    std::fill(shares.begin(), shares.end(), 0.0);
}
