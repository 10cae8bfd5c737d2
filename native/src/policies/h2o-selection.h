// Selects the rows of one head that are kept: pinned and recent rows, then rows by score, and dropped rows only if budget remains.

#pragma once

#include "llama-h2o.h"

#include <cstddef>
#include <cstdint>
#include <vector>

uint64_t llama_h2o_n_budget(const llama_h2o_params & params);
uint64_t llama_h2o_n_capacity(const llama_h2o_params & params);

// maximum number of segments, minus one
constexpr uint32_t LLAMA_H2O_MAX_STARTS = 1 << 20;

// Pins, segments and dropped spans of a text, by position.
struct llama_h2o_claims {
    uint32_t n_pinned = 0;               // first positions
    std::vector<llama_h2o_span> spans;   // pinned as well; ascending and disjoint
    std::vector<int32_t> starts;         // starts of segments with fair shares; ascending
    std::vector<llama_h2o_span> dropped; // not pinned; ascending and disjoint

    // Returns LLAMA_H2O_OK or an error. At most n_most positions may be pinned.
    int32_t check(uint64_t n_most) const;

    bool is_dropped(int32_t pos) const { return !dropped.empty() && is_in(dropped, pos); }

    // Adds dropped spans.
    void drop(const std::vector<llama_h2o_span> & more);

protected:
    static bool is_in(const std::vector<llama_h2o_span> & spans, int32_t pos);
};

// Settings of a compaction, the same for all heads.
struct llama_h2o_rule : llama_h2o_claims {
    uint32_t n_budget = 0;
    uint32_t n_recent = 0;
    int64_t newest    = -1; // position

    llama_h2o_standing standing(int32_t pos) const {
        if (pos < int64_t(n_pinned) || (!spans.empty() && is_in(spans, pos))) {
            return LLAMA_H2O_PINNED;
        }
        if (is_dropped(pos)) {
            return LLAMA_H2O_FORGOTTEN;
        }

        return pos > newest - int64_t(n_recent) ? LLAMA_H2O_RECENT : LLAMA_H2O_COMPETING;
    }

    size_t segment(int32_t pos) const;

    // number of positions of each segment whose rows compete, evicted ones included: [starts.size() + 1]
    std::vector<int64_t> segment_lengths() const;
};

// Divides n_places in proportion to the lengths of segments, by largest remainders, with ties to the newer segment.
std::vector<size_t> llama_h2o_quotas(const std::vector<int64_t> & lengths, size_t n_places);

// Selects the rows of one head after another. Reuses its work space.
class llama_h2o_selection {
public:
    explicit llama_h2o_selection(const llama_h2o_rule & rule);

    // Starts the next head. pos [n_rows], distinct.
    void set_rows(const int32_t * pos, uint32_t n_rows);

    const int32_t * positions() const { return pos; }

    const std::vector<uint8_t> & standings() const { return standing; }

    // newest position of the text
    int64_t newest() const { return rule.newest; }

    // number of competing rows to keep
    size_t n_places() const { return n_free; }

    // Marks min(n_rows, budget) rows in keep. score and keep [n_rows]; of equal scores the newer position is kept. Only scores
    // of competing rows are used.
    void choose(const double * score, uint8_t * keep);

private:
    const llama_h2o_rule & rule;
    const std::vector<int64_t> lengths; // of the segments

    const int32_t * pos = nullptr;

    std::vector<uint8_t> standing;   // [n_rows] llama_h2o_standing
    std::vector<uint32_t> competing; // rows
    std::vector<uint32_t> dropped;
    size_t n_free = 0;
    std::vector<std::vector<uint32_t>> members; // of the segments
};
