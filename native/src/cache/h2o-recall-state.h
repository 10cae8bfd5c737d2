// What a state of a stream has for recall: the archive, the tokens behind it, and how much was looked at what was found.

#pragma once

#include "cache/h2o-state-io.h"

struct llama_h2o_parts;
struct llama_h2o_stream;

void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st);

void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s);

// What was read must go with the text, once its cells are there.
void llama_h2o_expect_recall(const llama_h2o_parts & parts, uint32_t s, int32_t pos_removable);
