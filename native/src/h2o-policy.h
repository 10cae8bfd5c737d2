// Which rows of one head stay: the eviction policy, apart from where rows lie and how they move.

#pragma once

#include "llama-h2o.h"

#include <cstdint>
#include <vector>

uint64_t llama_h2o_n_budget(const llama_h2o_params & params);
uint64_t llama_h2o_n_capacity(const llama_h2o_params & params);

// H2O as its authors drop rows for real (h2o_hf/utils_real_drop): the summed attention decides.
// Marks min(n_rows, budget) rows in keep; order is scratch space that is reused between heads.
void llama_h2o_select_rows(const float * score, // [n_rows]
        const int32_t * pos,                    // [n_rows] distinct
        uint32_t n_rows,
        const llama_h2o_params & params,
        uint8_t * keep, // [n_rows]
        std::vector<uint32_t> & order);
