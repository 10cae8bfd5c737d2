// A file that is written piece by piece and read as memory.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

// Memory of the system's own, all 0: of malloc's each thread that archives would keep what it ever took. Throws
// std::bad_alloc.
char * llama_h2o_map_memory(uint64_t size);
void llama_h2o_unmap_memory(char * data, uint64_t size);

// Only one such object in all processes has the file at a time. What fails throws std::runtime_error with the reason.
// Another program that makes the file shorter, or a disk that cannot be read, ends the process when its memory is read.
class llama_h2o_mapped_file {
public:
    // opens it, or makes an empty one
    explicit llama_h2o_mapped_file(const std::string & path);
    ~llama_h2o_mapped_file();

    llama_h2o_mapped_file(const llama_h2o_mapped_file &)             = delete;
    llama_h2o_mapped_file & operator=(const llama_h2o_mapped_file &) = delete;

    uint64_t size() const;

    void read(uint64_t offset, void * data, size_t size) const;
    void write(uint64_t offset, const void * data, size_t size);
    void truncate(uint64_t size);

    // what was written is there after a power cut
    void sync();

    // This part of the file as memory, for as long as the object lives. It may lie beyond the end: it can be read once
    // it has been written.
    const char * map(uint64_t offset, uint64_t size);

    // Memory of map() is not read for a while, so what the system has loaded of it shall not count as ours.
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
