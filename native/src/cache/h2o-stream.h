// A stream of the cache: one text, and everything about its rows that is not in tensors.

#pragma once

#include "cache/h2o-marks.h"
#include "cache/h2o-query-ring.h"
#include "cache/h2o-row-positions.h"
#include "policies/h2o-selection.h"
#include "recall/h2o-archive.h"
#include "recall/h2o-index.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// Counters of a text, see llama_h2o_stats.
struct llama_h2o_counters {
    uint64_t n_compactions    = 0;
    uint64_t n_cells_freed    = 0;
    uint64_t n_rows_evicted   = 0;
    uint64_t n_rows_moved     = 0;
    uint64_t n_rebases        = 0;
    uint64_t t_compactions_us = 0;
    uint64_t t_rebases_us     = 0;
};

struct llama_h2o_stream {
    llama_h2o_row_positions rows;
    llama_h2o_query_ring queries; // for the policy
    llama_h2o_claims claims;

    std::shared_ptr<llama_h2o_archive> archive; // null: none
    std::shared_ptr<llama_h2o_index> index;     // of the archive; may be null
    std::vector<int32_t> tokens;                // ids of the tokens that are not archived yet
    std::string archive_error;                  // its error in one line, or empty
    uint64_t n_looked = 0;                      // tokens that have searched it, see llama_h2o_stats

    std::vector<llama_h2o_text_mark> marks; // ascending; none from before the last compaction or re-base

    // mark before the current batch, if it can be aborted and there is no other mark at this position
    std::optional<llama_h2o_text_mark> before;

    // a change of its rows failed halfway: decoding and saving fail until the text is cleared
    bool broken = false;

    // cells were freed since their scores were last zeroed
    bool stale = false;

    // from here on every head has all of its rows, each in its own cell
    int32_t pos_removable = 0;

    // the newest position when the decay of the scores was last applied, or -1
    int32_t pos_decayed = -1;

    llama_h2o_counters count;

    llama_h2o_stream(uint32_t n_heads, uint32_t n_cells, uint32_t n_queries, uint32_t n_pinned) :
        rows(n_heads, n_cells), queries(n_queries) {
        claims.n_pinned = n_pinned;
    }

    // Resets everything for a stream without rows.
    void reset(uint32_t n_pinned) {
        rows.reset();
        queries.drop(0);
        claims = { n_pinned, {}, {}, {} };
        marks.clear();
        before.reset();
        tokens.clear();
        if (archive) {
            archive->clear();
            index->follow(*archive, {});
            index->reset_gains();
            reset_retrieved();
        }
        archive_error.clear();
        count = {};

        broken        = false;
        stale         = true;
        pos_removable = 0;
        pos_decayed   = -1;
    }

    // resets the attention to retrieved rows
    void reset_retrieved() {
        index->reset_weights();
        n_looked = 0;
    }
};
