#include "recall/h2o-archive-map.h"

#include <algorithm>
#include <cerrno>
#include <new>
#include <stdexcept>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static_assert(sizeof(off_t) == sizeof(uint64_t), "files have 64-bit offsets");

// maximum size of one system call: limits differ between systems
static constexpr size_t MAX_PIECE = 1 << 26;

static uint64_t system_page() {
    static const uint64_t res = sysconf(_SC_PAGESIZE);

    return res;
}

// Calls fn(offset, done, size) for the remaining bytes until all are done; fn returns the number of bytes, or -1.
template <typename F>
static bool in_pieces(uint64_t offset, size_t size, F fn) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = fn(off_t(offset + done), done, std::min(size - done, MAX_PIECE));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n < 0 ? errno : EIO; // unexpected end of file
            return false;
        }
        done += size_t(n);
    }

    return true;
}

llama_h2o_mapped_file::llama_h2o_mapped_file(const std::string & path) :
    path(path), fd(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR)) {
    if (fd < 0) {
        fail("opened");
    }

    struct stat info;
    const bool is_file = fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
    // some file systems do not support locks
    const bool is_ours = flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
    if (!is_file || !is_ours) {
        close(fd);
        throw std::runtime_error(path + (is_file ? " is in use: by another model or process" : " is not a file"));
    }
}

llama_h2o_mapped_file::~llama_h2o_mapped_file() {
    for (const auto & each : mappings) {
        munmap(each.data, each.size);
    }
    close(fd);
}

void llama_h2o_mapped_file::fail(const char * what) const {
    throw std::runtime_error(path + " cannot be " + what + ": " + std::system_category().message(errno));
}

uint64_t llama_h2o_mapped_file::size() const {
    struct stat info;
    if (fstat(fd, &info) != 0) {
        fail("read");
    }

    return uint64_t(info.st_size);
}

void llama_h2o_mapped_file::read(uint64_t offset, void * data, size_t size) const {
    const auto piece = [&](off_t at, size_t done, size_t n) {
        return pread(fd, static_cast<char *>(data) + done, n, at);
    };
    if (!in_pieces(offset, size, piece)) {
        fail("read");
    }
}

void llama_h2o_mapped_file::write(uint64_t offset, const void * data, size_t size) {
    const auto piece = [&](off_t at, size_t done, size_t n) {
        return pwrite(fd, static_cast<const char *>(data) + done, n, at);
    };
    if (!in_pieces(offset, size, piece)) {
        fail("written");
    }
}

void llama_h2o_mapped_file::truncate(uint64_t size) {
    if (ftruncate(fd, off_t(size)) != 0) {
        fail("written");
    }
}

const char * llama_h2o_mapped_file::map(uint64_t offset, uint64_t size) {
    const uint64_t before = offset % system_page();

    // reserved first: a mapping that is not recorded would keep the file and its lock open
    mappings.reserve(mappings.size() + 1);

    void * data = mmap(nullptr, before + size, PROT_READ, MAP_SHARED, fd, off_t(offset - before));
    if (data == MAP_FAILED) {
        fail("read");
    }
    mappings.push_back({ data, before + size });

    return static_cast<const char *>(data) + before;
}

void llama_h2o_mapped_file::release(const char * data, uint64_t size) {
    // neighbouring data in the same system page is loaded again when it is read
    const uint64_t before = reinterpret_cast<uintptr_t>(data) % system_page();

    madvise(const_cast<char *>(data - before), before + size, MADV_DONTNEED);
}

char * llama_h2o_map_memory(uint64_t size) {
    void * data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
        throw std::bad_alloc();
    }
#ifdef MADV_HUGEPAGE
    madvise(data, size, MADV_HUGEPAGE);
#endif

    return static_cast<char *>(data);
}

void llama_h2o_unmap_memory(char * data, uint64_t size) {
    munmap(data, size);
}
