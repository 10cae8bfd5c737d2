// Devices that write rows directly to the archive in host memory.

#pragma once

#include "cache/h2o-parts.h"
#include "cuda/h2o-cuda.h"

#include <cstdint>
#include <vector>

// Whether the device of a layer can write to an archive that is shared with it.
bool llama_h2o_archives_on_device(const llama_h2o_parts & parts, uint32_t ikv);

// Archives the rows in these cells, of the positions from `first` on, of all layers whose device can. The archive must have
// been extended already.
void llama_h2o_archive_on_devices(
        llama_h2o_parts & parts, uint32_t s, int32_t first, const std::vector<uint32_t> & cells);

// Reads the arguments of the op from its tensors.
llama_h2o_archived_rows llama_h2o_read_archived(const ggml_tensor * op, const void * userdata);
