// Choosing the rows of a compaction on the device that holds the scores: only positions are sent there, and only bits are
// returned. The device also applies the decay of the scores.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"
#include "policies/h2o-selection.h"

#include <cstdint>
#include <vector>

// Whether devices choose rows by this rule, for the layers that they support.
bool llama_h2o_asks_devices(const llama_h2o_parts & parts, uint32_t s, const llama_h2o_rule & rule);

// Starts the choice on the devices. Throws std::exception.
//   used        the cells in use, all listed
//   remaining   decay factor of the collected scores
void llama_h2o_ask_devices(const llama_h2o_parts & parts,
        uint32_t s,
        const llama_h2o_rule & rule,
        const std::vector<uint32_t> & used,
        float remaining);

// Reads the chosen rows. Throws std::runtime_error if a score is NaN.
void llama_h2o_read_answers(const llama_h2o_parts & parts, llama_h2o_keep & keep);
