// A file that is written in parts and read through a memory map.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Allocates zeroed memory directly from the system: with malloc() each archiving thread would keep its peak. Throws
// std::bad_alloc.
char * llama_h2o_map_memory(uint64_t size);
void llama_h2o_unmap_memory(char * data, uint64_t size);

// Locks the file: only one object in all processes can have it open. Errors throw std::runtime_error with the reason. If
// another program truncates the file, or the disk fails, reading mapped memory ends the process (SIGBUS).
class llama_h2o_mapped_file {
public:
    // opens the file, or creates an empty one
    explicit llama_h2o_mapped_file(const std::string & path);
    ~llama_h2o_mapped_file();

    llama_h2o_mapped_file(const llama_h2o_mapped_file &)             = delete;
    llama_h2o_mapped_file & operator=(const llama_h2o_mapped_file &) = delete;

    uint64_t size() const;

    void read(uint64_t offset, void * data, size_t size) const;
    void write(uint64_t offset, const void * data, size_t size);
    void truncate(uint64_t size);

    // Maps a part of the file for the lifetime of the object. It may lie beyond the end of the file; read it only after it has
    // been written.
    const char * map(uint64_t offset, uint64_t size);

    // Releases the pages of mapped memory that the system has loaded, so that they do not count as used by this process.
    static void release(const char * data, uint64_t size);

private:
    struct mapping {
        void * data;
        size_t size;
    };

    const std::string path;
    const int fd;
    std::vector<mapping> mappings;

    [[noreturn]] void fail(const char * what) const;
};
