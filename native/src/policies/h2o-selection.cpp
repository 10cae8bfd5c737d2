#include "policies/h2o-selection.h"

#include <algorithm>
#include <functional>
#include <numeric>

uint64_t llama_h2o_n_budget(const llama_h2o_params & params) {
    return uint64_t(params.pinned) + params.heavy + params.recent;
}

uint64_t llama_h2o_n_capacity(const llama_h2o_params & params) {
    return llama_h2o_n_budget(params) + params.slack;
}

//
// claims
//

static bool are_apart(const std::vector<llama_h2o_span> & spans) {
    int32_t end = 0;
    for (const auto & span : spans) {
        if (span.p0 < end || span.p1 <= span.p0) {
            return false;
        }
        end = span.p1;
    }

    return true;
}

static bool are_starts(const std::vector<int32_t> & starts) {
    const bool is_ascending = std::adjacent_find(starts.begin(), starts.end(), std::greater_equal<>()) == starts.end();

    return is_ascending && (starts.empty() || starts[0] > 0) && starts.size() <= LLAMA_H2O_MAX_STARTS;
}

int32_t llama_h2o_claims::check(uint64_t n_most) const {
    if (!are_apart(spans) || !are_starts(starts) || !are_apart(dropped)) {
        return LLAMA_H2O_ERR_SPANS;
    }

    // the first pinned span that ends after the start of a dropped one
    const auto is_pinned = [&](const llama_h2o_span & gone) {
        const auto next = std::upper_bound(spans.begin(), spans.end(), gone.p0,
                [](int32_t p, const llama_h2o_span & span) { return p < span.p1; });

        return gone.p0 < int64_t(n_pinned) || (next != spans.end() && next->p0 < gone.p1);
    };
    if (std::any_of(dropped.begin(), dropped.end(), is_pinned)) {
        return LLAMA_H2O_ERR_FORGOTTEN;
    }

    uint64_t n = n_pinned;
    for (const auto & span : spans) {
        n += std::max<int64_t>(0, int64_t(span.p1) - std::max<int64_t>(span.p0, n_pinned));
    }

    return n <= n_most ? LLAMA_H2O_OK : LLAMA_H2O_ERR_PIN;
}

void llama_h2o_claims::drop(const std::vector<llama_h2o_span> & more) {
    std::vector<llama_h2o_span> all = dropped;
    all.insert(all.end(), more.begin(), more.end());
    std::sort(all.begin(), all.end(), [](const auto & a, const auto & b) { return a.p0 < b.p0; });

    dropped.clear();
    for (const auto & span : all) {
        if (dropped.empty() || dropped.back().p1 < span.p0) {
            dropped.push_back(span);
        } else {
            dropped.back().p1 = std::max(dropped.back().p1, span.p1);
        }
    }
}

//
// the rule
//

bool llama_h2o_claims::is_in(const std::vector<llama_h2o_span> & spans, int32_t pos) {
    const auto next = std::upper_bound(
            spans.begin(), spans.end(), pos, [](int32_t p, const llama_h2o_span & span) { return p < span.p0; });

    return next != spans.begin() && pos < std::prev(next)->p1;
}

size_t llama_h2o_rule::segment(int32_t pos) const {
    return std::upper_bound(starts.begin(), starts.end(), pos) - starts.begin();
}

std::vector<int64_t> llama_h2o_rule::segment_lengths() const {
    // all positions that do not compete, as one list of spans
    std::vector<llama_h2o_span> others = { { 0, int32_t(n_pinned) } };
    others.insert(others.end(), spans.begin(), spans.end());
    others.insert(others.end(), dropped.begin(), dropped.end());
    std::sort(others.begin(), others.end(), [](const auto & a, const auto & b) { return a.p0 < b.p0; });

    const int64_t end = newest - int64_t(n_recent) + 1;

    std::vector<int64_t> lengths(starts.size() + 1);
    for (size_t i = 0; i < lengths.size(); ++i) {
        const int64_t p0 = i == 0 ? 0 : starts[i - 1];
        const int64_t p1 = std::min<int64_t>(i < starts.size() ? starts[i] : end, end);

        int64_t length = std::max<int64_t>(0, p1 - p0);
        int64_t from   = p0; // earlier positions are counted already
        for (const auto & span : others) {
            const int64_t first = std::max<int64_t>(span.p0, from);
            const int64_t last  = std::min<int64_t>(span.p1, p1);

            length -= std::max<int64_t>(0, last - first);
            from    = std::max(from, last);
        }
        lengths[i] = length;
    }

    return lengths;
}

std::vector<size_t> llama_h2o_quotas(const std::vector<int64_t> & lengths, size_t n_places) {
    const int64_t total = std::accumulate(lengths.begin(), lengths.end(), int64_t(0));

    std::vector<size_t> quotas(lengths.size(), 0);
    if (total == 0) {
        return quotas;
    }

    std::vector<size_t> order(lengths.size());
    std::iota(order.begin(), order.end(), 0);

    size_t n_left = n_places;
    for (size_t i = 0; i < lengths.size(); ++i) {
        quotas[i]  = size_t(int64_t(n_places) * lengths[i] / total);
        n_left    -= quotas[i];
    }

    const auto larger_rest = [&](size_t a, size_t b) {
        const int64_t rest_a = int64_t(n_places) * lengths[a] % total;
        const int64_t rest_b = int64_t(n_places) * lengths[b] % total;
        return rest_a != rest_b ? rest_a > rest_b : a > b;
    };
    std::sort(order.begin(), order.end(), larger_rest);
    for (size_t i = 0; i < n_left; ++i) {
        quotas[order[i]] += 1;
    }

    return quotas;
}

//
// selection
//

llama_h2o_selection::llama_h2o_selection(const llama_h2o_rule & rule) :
    rule(rule), lengths(rule.segment_lengths()), members(lengths.size()) {}

void llama_h2o_selection::set_rows(const int32_t * pos, uint32_t n_rows) {
    this->pos = pos;

    standing.clear();
    competing.clear();
    dropped.clear();
    for (uint32_t i = 0; i < n_rows; ++i) {
        standing.push_back(rule.standing(pos[i]));
        if (standing.back() == LLAMA_H2O_COMPETING) {
            competing.push_back(i);
        } else if (standing.back() == LLAMA_H2O_FORGOTTEN) {
            dropped.push_back(i);
        }
    }

    const size_t n_safe = n_rows - competing.size() - dropped.size();
    const size_t n_keep = std::min<size_t>(n_rows, rule.n_budget);

    n_free = n_keep - std::min(n_keep, n_safe);
}

void llama_h2o_selection::choose(const double * score, uint8_t * keep) {
    const auto better = [&](uint32_t a, uint32_t b) {
        return score[a] != score[b] ? score[a] > score[b] : pos[a] > pos[b];
    };

    // keeps the best n of these rows and leaves the others
    const auto take_best = [&](std::vector<uint32_t> & rows, size_t n) {
        n = std::min(n, rows.size());
        std::nth_element(rows.begin(), rows.begin() + n, rows.end(), better);
        for (size_t i = 0; i < n; ++i) {
            keep[rows[i]] = 1;
        }
        rows.erase(rows.begin(), rows.begin() + n);

        return n;
    };

    for (size_t i = 0; i < standing.size(); ++i) {
        keep[i] = standing[i] == LLAMA_H2O_PINNED || standing[i] == LLAMA_H2O_RECENT;
    }

    size_t n_left = n_free;

    if (members.size() > 1) {
        for (auto & rows : members) {
            rows.clear();
        }
        for (const uint32_t i : competing) {
            members[rule.segment(pos[i])].push_back(i);
        }

        const std::vector<size_t> quotas = llama_h2o_quotas(lengths, n_free);

        competing.clear();
        for (size_t i = 0; i < members.size(); ++i) {
            n_left -= take_best(members[i], quotas[i]);
            competing.insert(competing.end(), members[i].begin(), members[i].end());
        }
    }

    n_left -= take_best(competing, n_left);

    std::sort(dropped.begin(), dropped.end(), [&](uint32_t a, uint32_t b) { return pos[a] < pos[b]; });
    for (size_t i = 0; i < std::min(n_left, dropped.size()); ++i) {
        keep[dropped[i]] = 1;
    }
}
