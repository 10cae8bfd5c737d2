// Archives of random texts.

#pragma once

#include "program.h"

#include "recall/h2o-archive.h"

#include <cstdint>
#include <memory>
#include <string>

static constexpr llama_h2o_archive_id TEXT_ID = { 'o', 'n', 'e', ' ', 'o', 'f', ' ', 't', 'h', 'e', ' ', 't', 'e', 'x',
    't', 's' };

// The settings of an input: type, number of layers, maximum number of pages.
std::unique_ptr<llama_h2o_archive> new_archive(uint8_t settings);

// Appends n tokens.
void extend(llama_h2o_archive & archive, uint32_t n, random_numbers & random);

bytes state_of(const llama_h2o_archive & archive);

// Returns whether the state could be read; n_missing is the number of missing tokens.
bool read_state(llama_h2o_archive & archive, const bytes & state, int32_t & n_missing);

// Checks that all rows and tokens can be read, and that the counts are consistent.
void check_rows(const llama_h2o_archive & archive);

// Checks that both have the same tokens and rows, bit for bit.
void check_same(const llama_h2o_archive & one, const llama_h2o_archive & other);

// A file in memory that has a path.
class memory_file {
public:
    explicit memory_file(const bytes & content);
    ~memory_file();

    memory_file(const memory_file &)             = delete;
    memory_file & operator=(const memory_file &) = delete;

    std::string path() const;
    bytes content() const;

private:
    int fd;
};
