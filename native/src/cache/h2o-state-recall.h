// The part of a stream's state that is there for recall: its archive, and the tokens behind it.

#pragma once

#include "cache/h2o-state-io.h"
#include "cache/h2o-stream.h"

#include <cstdint>

struct llama_h2o_parts;

void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st);

// Into a stream without rows. Like the others it throws std::runtime_error if the state does not fit.
void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s);

// What was read must go with the text.
void llama_h2o_check_recall(const llama_h2o_parts & parts, uint32_t s, int32_t pos_removable);
