// Rows that a device writes to the archive itself, which it reaches in the host's memory.

#pragma once

#include "cache/h2o-parts.h"
#include "cuda/h2o-cuda.h"

#include <cstdint>
#include <vector>

// Whether the device of a layer can, of an archive that is shared with it.
bool llama_h2o_archives_on_device(const llama_h2o_parts & parts, uint32_t ikv);

// The rows in some cells, of the positions from `first` on, of all layers whose device can: there is room for them.
void llama_h2o_archive_on_devices(
        llama_h2o_parts & parts, uint32_t s, int32_t first, const std::vector<uint32_t> & cells);

// How the tensors of the op are read.
llama_h2o_archived_rows llama_h2o_read_archived(const ggml_tensor * op, const void * userdata);
