// Archives of random texts.

#pragma once

#include "program.h"

#include "recall/h2o-archive.h"

#include <cstdint>
#include <memory>
#include <string>

static constexpr llama_h2o_archive_id TEXT_ID = { 'o', 'n', 'e', ' ', 'o', 'f', ' ', 't', 'h', 'e', ' ', 't', 'e', 'x',
    't', 's' };

// What an input begins with: which type, how many layers and how many pages at most.
std::unique_ptr<llama_h2o_archive> new_archive(uint8_t settings);

// Goes on with n tokens.
void extend(llama_h2o_archive & archive, uint32_t n, random_numbers & random);

bytes state_of(const llama_h2o_archive & archive);

// Whether it could be read. Tells how many tokens are missing.
bool read_state(llama_h2o_archive & archive, const bytes & state, int32_t & n_missing);

// All rows and tokens that are held can be read, and the numbers go together.
void check_rows(const llama_h2o_archive & archive);

// Both hold the same tokens with the same rows, bit for bit.
void check_same(const llama_h2o_archive & one, const llama_h2o_archive & other);

// A file in memory alone, which can be opened by its path.
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
