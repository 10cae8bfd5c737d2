// The choice of a compaction where the scores lie on a device that has a kernel for it: only positions go there, and only bits
// come back. The device fades what is collected, too.

#pragma once

#include "cache/h2o-parts.h"
#include "cache/h2o-plan.h"
#include "policies/h2o-selection.h"

#include <cstdint>
#include <vector>

// Whether devices choose by this rule, for the layers that they can choose for.
bool llama_h2o_asks_devices(const llama_h2o_parts & parts, uint32_t s, const llama_h2o_rule & rule);

// Asks them. Throws std::exception.
//   used        the cells in use, all listed
//   remaining   what is left of what was collected
void llama_h2o_ask_devices(const llama_h2o_parts & parts,
        uint32_t s,
        const llama_h2o_rule & rule,
        const std::vector<uint32_t> & used,
        float remaining);

// What they have chosen. Throws std::runtime_error if what was collected is no number.
void llama_h2o_read_answers(const llama_h2o_parts & parts, llama_h2o_keep & keep);
