// Reading a prompt in full: for a while the context has a larger cache, in which nothing is evicted. Afterwards one
// compaction leaves what fits, and the rows go to the cache that the context had before.

#pragma once

#include "cache/h2o-parts.h"

// Takes all that another cache of the same kind holds, its cells in the same order but without gaps. Throws
// std::exception.
void llama_h2o_take_rows(llama_h2o_parts & parts, llama_h2o_parts & from);
