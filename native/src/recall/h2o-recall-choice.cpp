#include "recall/h2o-recall-choice.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <stdexcept>

// A needle's key words and what they stand for often lie in neighbouring blocks, more often behind the peak than before.
// So a block is wanted nearly as much as the one or two before it and the one behind,
struct neighbour {
    int32_t offset;
    double share;
};
static constexpr neighbour NEARLY[] = {
    { -2, 0.8 },
    { -1, 0.9 },
    { 1, 0.7 },
};
// and from there on as much as these parts of the one before and behind.
static constexpr double FROM_BEFORE = 0.5;
static constexpr double FROM_BEHIND = 0.3;

// Recalled rows are no further away than this part of the positions: models find less at the end of what they were
// trained on.
static constexpr int32_t FURTHEST = 3;

void llama_h2o_add_logits(float & max, float & sum, float other_max, float other_sum) {
    if (other_sum == 0.0f) {
        return;
    }
    if (sum == 0.0f) {
        max = other_max;
        sum = other_sum;
        return;
    }
    const float top = std::max(max, other_max);

    sum = sum * std::exp(max - top) + other_sum * std::exp(other_max - top);
    max = top;
}

void llama_h2o_scanned::add_sinks(const float * logits) {
    for (uint32_t row = 0; row < n_rows; ++row) {
        llama_h2o_add_logits(resident_max[row], resident_sum[row], logits[row % n_group], 1.0f);
    }
}

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
    std::vector<double> find_wanted(int32_t first_block);
    void expect_numbers() const;
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

// How much each block is wanted [n_blocks]: for its own weight, or for a neighbour's.
std::vector<double> chooser::find_wanted(int32_t first_block) {
    for (const auto & head : hidden.of_heads) {
        for (size_t block = first_block; block < weight.size(); ++block) {
            weight[block] += head.weight[block];
        }
    }

    const int32_t n_blocks = int32_t(weight.size());

    std::vector<double> wanted = weight;
    for (int32_t block = first_block; block < n_blocks; ++block) {
        for (const auto & [offset, share] : NEARLY) {
            if (block + offset >= first_block && block + offset < n_blocks) {
                wanted[block] = std::max(wanted[block], share * weight[block + offset]);
            }
        }
    }
    for (size_t block = first_block + 1; block < wanted.size(); ++block) {
        wanted[block] = std::max(wanted[block], FROM_BEFORE * wanted[block - 1]);
    }
    for (size_t block = wanted.size() - 1; block > size_t(first_block); --block) {
        wanted[block - 1] = std::max(wanted[block - 1], FROM_BEHIND * wanted[block]);
    }

    return wanted;
}

void chooser::make_list() {
    // the archive may begin inside a page
    const int32_t first_block = (hidden.first - hidden.start) / hidden.N_BLOCK;

    const std::vector<double> wanted = find_wanted(first_block);

    std::vector<int32_t> order(wanted.size() - first_block);
    std::iota(order.begin(), order.end(), first_block);
    std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return wanted[a] != wanted[b] ? wanted[a] > wanted[b] : a > b; });

    std::vector<uint32_t> n_found(n_heads, 0); // hidden rows of the listed blocks

    for (const int32_t block : order) {
        if (wanted[block] == 0.0 || *std::min_element(n_found.begin(), n_found.end()) >= n_wanted) {
            break;
        }
        list.push_back(block);
        for (uint32_t head = 0; head < n_heads; ++head) {
            n_found[head] += n_hidden(head, block);
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

// Keys that are no numbers have no order to choose in, and shares of them could not be saved.
void chooser::expect_numbers() const {
    const auto is_number = [](double x) {
        return std::isfinite(x);
    };
    for (const auto & head : hidden.of_heads) {
        if (!std::all_of(head.mass.begin(), head.mass.end(), is_number) ||
                !std::all_of(head.weight.begin(), head.weight.end(), is_number)) {
            throw std::runtime_error("the archive has keys that are no numbers");
        }
    }
}

llama_h2o_recall_choice chooser::run() {
    llama_h2o_recall_choice choice;

    expect_numbers();
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

std::vector<int32_t> llama_h2o_place_spans(
        const std::vector<llama_h2o_recall_span> & spans, int32_t shift, int32_t next, int32_t n_pos) {
    int32_t n_all = 0;
    for (const auto & span : spans) {
        n_all += span.p1 - span.p0;
    }
    const int32_t distance = std::max(n_pos / FURTHEST, 2 * n_all);

    std::vector<int32_t> places;

    int32_t free = std::max(next - distance, 0); // the first position behind the span before
    for (const auto & span : spans) {
        places.push_back(std::max(span.p0 - shift, free));
        free = places.back() + (span.p1 - span.p0);
    }

    return places;
}
