// The state of a stream, saved and restored by llama.cpp's state functions: every row with its cell, so that the text continues
// bit for bit.

#pragma once

#include "cache/h2o-parts.h"

class llama_h2o_state_reader;
class llama_h2o_state_writer;
class llama_io_read_i;
class llama_io_write_i;

// Streams s0 <= s < s1. Both throw std::exception; after a failed read the content of the streams is undefined.
void llama_h2o_write_state(llama_io_write_i & io, const llama_h2o_parts & parts, uint32_t s0, uint32_t s1);
void llama_h2o_read_state(llama_io_read_i & io, llama_h2o_parts & parts, uint32_t s0, uint32_t s1);

// The part for recall: the archive, the tokens after it, and the attention to retrieved rows.
void llama_h2o_write_recall(llama_h2o_state_writer & out, const llama_h2o_stream & st);
void llama_h2o_read_recall(llama_h2o_state_reader & in, llama_h2o_parts & parts, uint32_t s);

// Checks the part for recall against the cells of the text, after both were read.
void llama_h2o_expect_recall(const llama_h2o_parts & parts, uint32_t s, int32_t pos_removable);
