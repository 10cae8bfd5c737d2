// The rows of a stream that are recalled at the moment.

#pragma once

#include "recall/h2o-recall-choice.h"

#include <cstdint>
#include <vector>

struct llama_h2o_recalled {
    std::vector<llama_h2o_recall_span> spans; // ascending
    std::vector<uint32_t> cells;              // ascending
    std::vector<int32_t> pos;                 // [n_heads][cells.size()] of the rows, ascending for each head
    std::vector<int32_t> places;              // that the spans are rotated to; none where a state was loaded

    // shares of the attention of the queries that chose, see llama_h2o_recall_choice
    double hidden = 0.0;
    double missed = 0.0;
};
