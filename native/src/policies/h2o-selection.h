// Which rows of one head stay, once each has a score: pinned and recent ones, the best of the others, and forgotten ones only in
// places that are left over.

#pragma once

#include "llama-h2o.h"

#include <cstddef>
#include <cstdint>
#include <vector>

uint64_t llama_h2o_n_budget(const llama_h2o_params & params);
uint64_t llama_h2o_n_capacity(const llama_h2o_params & params);

// segments that a text can be cut into, less one
constexpr uint32_t LLAMA_H2O_MAX_STARTS = 1 << 20;

// What a text asks for, by position.
struct llama_h2o_claims {
    uint32_t n_pinned = 0;               // first positions
    std::vector<llama_h2o_span> spans;   // pinned as well; ascending and apart
    std::vector<int32_t> starts;         // the text is cut here into segments with fair shares; ascending
    std::vector<llama_h2o_span> dropped; // not pinned; ascending and apart

    // LLAMA_H2O_OK, or why they cannot be met: no more than n_most positions may be pinned.
    int32_t check(uint64_t n_most) const;

    bool is_dropped(int32_t pos) const { return !dropped.empty() && is_in(dropped, pos); }

    // Adds to what is forgotten.
    void drop(const std::vector<llama_h2o_span> & more);

protected:
    static bool is_in(const std::vector<llama_h2o_span> & spans, int32_t pos);
};

// The rule of a compaction, the same for all heads.
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

    // positions of each segment whose rows compete, or did: [starts.size() + 1]
    std::vector<int64_t> segment_lengths() const;
};

// Places for each segment in proportion to its length: largest remainders, of equal ones the newer segment.
std::vector<size_t> llama_h2o_quotas(const std::vector<int64_t> & lengths, size_t n_places);

// Chooses the rows of one head after the other. Keeps its work space in between.
class llama_h2o_selection {
public:
    explicit llama_h2o_selection(const llama_h2o_rule & rule);

    // The next head. pos [n_rows], distinct.
    void set_rows(const int32_t * pos, uint32_t n_rows);

    const int32_t * positions() const { return pos; }

    const std::vector<uint8_t> & standings() const { return standing; }

    // position of the text
    int64_t newest() const { return rule.newest; }

    // places for competing rows
    size_t n_places() const { return n_free; }

    // Marks min(n_rows, budget) rows in keep. score and keep [n_rows]; of equal scores the newer position stays, and
    // only those of competing rows matter.
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
