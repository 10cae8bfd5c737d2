// The state of a stream, as llama.cpp's state functions save and restore it: every row at its cell,
// so that a text goes on from it bit for bit as it would have gone on.

#pragma once

#include "cache/h2o-parts.h"

class llama_h2o_state_reader;
class llama_h2o_state_writer;
class llama_io_read_i;
class llama_io_write_i;

// Streams s0 <= s < s1. Both throw std::exception; after a failed read nobody knows what these streams hold.
void llama_h2o_write_state(llama_io_write_i & io, const llama_h2o_parts & parts, uint32_t s0, uint32_t s1);
void llama_h2o_read_state(llama_io_read_i & io, llama_h2o_parts & parts, uint32_t s0, uint32_t s1);

// What it has for recall: the archive, the tokens behind it, and how much was looked at what was found.
void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st);
void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s);

// What was read must go with the text, once its cells are there.
void llama_h2o_expect_recall(const llama_h2o_parts & parts, uint32_t s, int32_t pos_removable);
