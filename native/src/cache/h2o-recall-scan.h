// How the last queries look at the archive: the attention of one layer's heads to archived and resident rows.

#pragma once

#include "recall/h2o-recall-choice.h"

#include <cstdint>
#include <vector>

struct llama_h2o_parts;

// Of the KV heads of a layer: what they hold of the archive and how the last queries look at the rest. Blocks and
// positions count from the first page of the archive on. The graphs before must be done.
struct llama_h2o_layer_scan {
    std::vector<std::vector<uint8_t>> resident;
    std::vector<llama_h2o_scanned> of_heads;
};

//   asking   slots of the queries that ask
llama_h2o_layer_scan llama_h2o_scan_layer(
        const llama_h2o_parts & parts, uint32_t s, uint32_t ikv, const std::vector<uint32_t> & asking);
