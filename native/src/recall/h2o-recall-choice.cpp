#include "recall/h2o-recall-choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

// A needle's key words and what they stand for often lie in neighbouring blocks, more often behind the peak than before.
static constexpr int32_t N_BEFORE = 1;
static constexpr int32_t N_BEHIND = 2;

// Turns the sums of hidden blocks [n_blocks][n_rows] into parts of one softmax for each query, before they are divided by
// these: the sums of all parts, resident ones too, [n_rows].
static std::vector<double> sum_parts(const llama_h2o_scanned & scanned, std::vector<float> & parts) {
    const size_t n_rows = scanned.n_rows;

    std::vector<float> top = scanned.resident_max;
    for (size_t first = 0; first < parts.size(); first += n_rows) {
        for (size_t row = 0; row < n_rows; ++row) {
            top[row] = std::max(top[row], scanned.hidden_max[first + row]);
        }
    }

    std::vector<double> sum(n_rows);
    for (size_t row = 0; row < n_rows; ++row) {
        const float part = scanned.resident_sum[row];

        sum[row] = part > 0.0f ? part * std::exp(double(scanned.resident_max[row]) - top[row]) : 0.0;
    }

    for (size_t first = 0; first < parts.size(); first += n_rows) {
        for (size_t row = 0; row < n_rows; ++row) {
            float & part = parts[first + row];

            part      = part > 0.0f ? part * std::exp(scanned.hidden_max[first + row] - top[row]) : 0.0f;
            sum[row] += part;
        }
    }

    return sum;
}

llama_h2o_block_masses llama_h2o_weigh_blocks(const llama_h2o_scanned & scanned) {
    const size_t n_rows   = scanned.n_rows;
    const size_t n_group  = scanned.n_group;
    const size_t n_blocks = n_rows > 0 ? scanned.hidden_max.size() / n_rows : 0;

    std::vector<float> parts         = scanned.hidden_sum;
    const std::vector<double> totals = sum_parts(scanned, parts);

    std::vector<double> factors(n_rows);
    for (size_t row = 0; row < n_rows; ++row) {
        factors[row] = double(n_group) / n_rows / totals[row];
    }

    llama_h2o_block_masses res { std::vector<float>(n_blocks), std::vector<double>(n_blocks) };

    for (size_t block = 0; block < n_blocks; ++block) {
        for (size_t head = 0; head < n_group; ++head) {
            double mass = 0.0;
            for (size_t row = head; row < n_rows; row += n_group) {
                // a query with a logit that is no number pays nothing to anybody
                mass += totals[row] > 0.0 ? parts[block * n_rows + row] * factors[row] : 0.0;
            }

            res.mass[block]   += float(mass);
            res.weight[block] += mass * mass;
        }
    }

    return res;
}

namespace {

class chooser {
public:
    //   n_rows   most that a head takes
    chooser(const llama_h2o_hidden & hidden, uint32_t n_rows);

    llama_h2o_recall_choice run();

private:
    const llama_h2o_hidden & hidden;
    const uint32_t n_heads;

    uint32_t n_wanted; // rows of every head

    std::vector<double> weight; // [n_blocks]
    std::vector<int32_t> list;  // blocks, in the order in which they are taken

    int32_t begin(int32_t block) const { return std::max(hidden.first, hidden.start + block * hidden.N_BLOCK); }
    int32_t end(int32_t block) const { return std::min(hidden.next, hidden.start + (block + 1) * hidden.N_BLOCK); }

    uint32_t n_hidden(uint32_t head, int32_t block) const;
    void make_list();
    void take_rows(llama_h2o_recall_choice & choice) const;
    void find_spans(llama_h2o_recall_choice & choice) const;
};

chooser::chooser(const llama_h2o_hidden & hidden, uint32_t n_rows) :
    hidden(hidden), n_heads(uint32_t(hidden.resident.size())), n_wanted(n_rows), weight(hidden.n_blocks(), 0.0) {
    for (uint32_t head = 0; head < n_heads; ++head) {
        uint32_t n = 0;
        for (int32_t block = 0; block < hidden.n_blocks(); ++block) {
            n += n_hidden(head, block);
        }
        n_wanted = std::min(n_wanted, n);
    }
}

uint32_t chooser::n_hidden(uint32_t head, int32_t block) const {
    uint32_t n = 0;
    for (int32_t pos = begin(block); pos < end(block); ++pos) {
        n += hidden.is_hidden(head, pos);
    }

    return n;
}

void chooser::make_list() {
    const int32_t n_blocks = hidden.n_blocks();
    // the archive may begin inside a page
    const int32_t first_block = (hidden.first - hidden.start) / hidden.N_BLOCK;

    for (const auto & head : hidden.of_heads) {
        for (int32_t block = first_block; block < n_blocks; ++block) {
            weight[block] += head.weight[block];
        }
    }

    std::vector<int32_t> peaks(n_blocks - first_block);
    std::iota(peaks.begin(), peaks.end(), first_block);
    std::sort(peaks.begin(), peaks.end(),
            [&](int32_t a, int32_t b) { return weight[a] != weight[b] ? weight[a] > weight[b] : a > b; });

    std::vector<uint8_t> is_listed(n_blocks, 0);
    std::vector<uint32_t> n_found(n_heads, 0); // hidden rows of the listed blocks

    const auto is_enough = [&] {
        return *std::min_element(n_found.begin(), n_found.end()) >= n_wanted;
    };

    for (const int32_t peak : peaks) {
        if (weight[peak] == 0.0) {
            break;
        }
        const int32_t from = std::max(first_block, peak - N_BEFORE);
        const int32_t last = std::min(n_blocks - 1, peak + N_BEHIND);
        for (int32_t block = from; block <= last && !is_enough(); ++block) {
            if (is_listed[block]) {
                continue;
            }
            is_listed[block] = 1;
            list.push_back(block);
            for (uint32_t head = 0; head < n_heads; ++head) {
                n_found[head] += n_hidden(head, block);
            }
        }
    }

    n_wanted = std::min(n_wanted, *std::min_element(n_found.begin(), n_found.end()));
}

void chooser::take_rows(llama_h2o_recall_choice & choice) const {
    choice.n_rows = n_wanted;

    for (uint32_t head = 0; head < n_heads; ++head) {
        const auto & mass = hidden.of_heads[head].mass;

        choice.hidden += std::accumulate(mass.begin(), mass.end(), 0.0);

        uint32_t n_left = choice.n_rows;
        for (const int32_t block : list) {
            const uint32_t n_all  = n_hidden(head, block);
            const uint32_t n_take = std::min(n_left, n_all);

            uint32_t n = 0;
            for (int32_t pos = begin(block); n < n_take; ++pos) {
                if (hidden.is_hidden(head, pos)) {
                    choice.pos.push_back(pos);
                    n += 1;
                }
            }
            // of a block that is taken in part nobody knows which rows have the mass
            choice.missed -= n_all > 0 ? double(mass[block]) * n_take / n_all : 0.0;
            n_left        -= n_take;
        }
        std::sort(choice.pos.end() - choice.n_rows, choice.pos.end());
    }

    choice.missed  = std::max(0.0, choice.hidden + choice.missed) / hidden.n_query_heads;
    choice.hidden /= hidden.n_query_heads;
}

void chooser::find_spans(llama_h2o_recall_choice & choice) const {
    std::vector<int32_t> sorted = list;
    std::sort(sorted.begin(), sorted.end());

    for (const int32_t block : sorted) {
        auto & spans = choice.spans;
        if (spans.empty() || spans.back().p1 != begin(block)) {
            spans.push_back({ begin(block), end(block), weight[block] });
        } else {
            spans.back().p1      = end(block);
            spans.back().weight += weight[block];
        }
    }
}

llama_h2o_recall_choice chooser::run() {
    llama_h2o_recall_choice choice;

    make_list();
    take_rows(choice);
    if (choice.n_rows > 0) {
        find_spans(choice);
    }

    return choice;
}

} // namespace

llama_h2o_recall_choice llama_h2o_choose_rows(const llama_h2o_hidden & hidden, uint32_t n_rows) {
    return chooser(hidden, n_rows).run();
}

std::vector<int32_t> llama_h2o_place_spans(const std::vector<llama_h2o_recall_span> & spans, int32_t shift) {
    std::vector<int32_t> places;

    int32_t free = 0; // the first position behind the span before
    for (const auto & span : spans) {
        places.push_back(std::max(span.p0 - shift, free));
        free = places.back() + (span.p1 - span.p0);
    }

    return places;
}
