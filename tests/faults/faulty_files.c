// A disk that fails, for programs that are tested: loaded in front of the C library (LD_PRELOAD).
//
// What a program does to the files in one folder is counted: creating, writing, shortening,
// flushing, renaming and removing them, and making folders. From an operation on that faulty_arm()
// names, the process is killed, a device fails, is full, or does its work in small pieces. For a
// power cut what was flushed is kept, and the process is killed; power_cut.py takes away the rest.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include "flushed.h"

enum fault {
    FAULT_NONE,
    FAULT_KILL,  // SIGKILL in operation `at`; a write has written some of its bytes by then
    FAULT_EIO,   // operation `at` fails
    FAULT_FULL,  // from there on nothing can be created or written
    FAULT_SHORT, // from there on writes are short, or interrupted by a signal before they begin
    FAULT_POWER, // as FAULT_KILL
};

static enum fault armed;
static long armed_at;
static char folder[4096];
static atomic_long n_done;
static atomic_ullong state;

// `path` must be absolute, without links. Operations are counted from here on.
void faulty_arm(const char * path, int fault, long at, unsigned long long seed) {
    snprintf(folder, sizeof(folder), "%s/", path);
    armed    = (enum fault) fault;
    armed_at = at;
    atomic_store(&n_done, 0);
    atomic_store(&state, seed * 2654435761u + 1);
}

// What is flushed is kept in this folder from here on, which has the folders "files" and "names".
void faulty_disk(const char * path) {
    snprintf(disk, sizeof(disk), "%s", path);
}

long faulty_count(void) {
    return atomic_load(&n_done);
}

static uint64_t random_below(uint64_t n) { // splitmix64
    uint64_t z = atomic_fetch_add(&state, 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return n == 0 ? 0 : (z ^ (z >> 31)) % n;
}

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) {
        pause();
    }
}

static bool starts_inside(const char * path) {
    return strncmp(path, folder, strlen(folder)) == 0;
}

// `path` may be beside `dir`.
static bool is_inside(int dir, const char * path) {
    char place[64] = "/proc/self/cwd";
    char whole[PATH_MAX];
    if (folder[0] == 0 || path == NULL) {
        return false;
    }
    if (path[0] == '/') {
        return starts_inside(path);
    }
    if (dir != AT_FDCWD) {
        snprintf(place, sizeof(place), "/proc/self/fd/%d", dir);
    }
    const ssize_t n = readlink(place, whole, PATH_MAX / 2);
    if (n <= 0) {
        return false;
    }
    snprintf(whole + n, PATH_MAX - (size_t) n, "/%s", path);
    return starts_inside(whole);
}

static bool is_open_inside(int fd) {
    char link[64];
    char path[4096];
    if (folder[0] == 0) {
        return false;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const ssize_t n = readlink(link, path, sizeof(path) - 2);
    if (n <= 0) {
        return false;
    }
    path[n]     = '/'; // the folder itself is inside, too
    path[n + 1] = 0;
    return starts_inside(path);
}

// Counts an operation; true if it is to fail, with errno set.
static bool fails(bool takes_room, bool * kills) {
    const long i = atomic_fetch_add(&n_done, 1);
    *kills       = (armed == FAULT_KILL || armed == FAULT_POWER) && i == armed_at;
    if (armed == FAULT_EIO && i == armed_at) {
        errno = EIO;
        return true;
    }
    if (armed == FAULT_FULL && i >= armed_at && takes_room) {
        errno = ENOSPC;
        return true;
    }
    return false;
}

// Bytes of a write that are written now: 0 for a kill before it, or an interruption.
static size_t piece(size_t n, bool kills) {
    if (kills) {
        return random_below(n + 1);
    }
    if (armed == FAULT_SHORT && atomic_load(&n_done) > armed_at) {
        return random_below(3) == 0 ? 0 : 1 + random_below(n);
    }
    return n;
}

#define REAL(name)                                           \
    static __typeof__(name) * real;                          \
    if (real == NULL) {                                      \
        real = (__typeof__(name) *) dlsym(RTLD_NEXT, #name); \
    }

// A plain operation: killed before it or behind it. What is kept of it is noted.
#define PLAIN(inside, takes_room, call, note) \
    do {                                      \
        bool kills = false;                   \
        if (!(inside)) {                      \
            return (call);                    \
        }                                     \
        if (fails(takes_room, &kills)) {      \
            return -1;                        \
        }                                     \
        disk_begin();                         \
        if (kills && random_below(2) == 0) {  \
            die();                            \
        }                                     \
        const int result = (call);            \
        if (result >= 0) {                    \
            note;                             \
        }                                     \
        if (kills) {                          \
            die();                            \
        }                                     \
        disk_end();                           \
        return result;                        \
    } while (0)

#define WRITING(fd, n, call)                        \
    do {                                            \
        bool kills = false;                         \
        size_t now = n;                             \
        if (n == 0 || !is_open_inside(fd)) {        \
            return (call);                          \
        }                                           \
        if (fails(true, &kills)) {                  \
            return -1;                              \
        }                                           \
        now = piece(n, kills);                      \
        if (now == 0 && !kills) {                   \
            errno = EINTR;                          \
            return -1;                              \
        }                                           \
        disk_begin();                               \
        const ssize_t done = now == 0 ? 0 : (call); \
        if (kills) {                                \
            die();                                  \
        }                                           \
        disk_end();                                 \
        return done;                                \
    } while (0)

ssize_t write(int fd, const void * data, size_t n) {
    REAL(write)
    WRITING(fd, n, real(fd, data, now));
}

ssize_t pwrite(int fd, const void * data, size_t n, off_t at) {
    REAL(pwrite)
    WRITING(fd, n, real(fd, data, now, at));
}

ssize_t copy_file_range(int in, off64_t * from, int out, off64_t * to, size_t n, unsigned flags) {
    REAL(copy_file_range)
    WRITING(out, n, real(in, from, out, to, now, flags));
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate)
    PLAIN(is_open_inside(fd), true, real(fd, size), );
}

int fsync(int fd) {
    REAL(fsync)
    PLAIN(is_open_inside(fd), false, real(fd), disk_synced(fd));
}

int rename(const char * from, const char * to) {
    REAL(rename)
    PLAIN(is_inside(AT_FDCWD, to), false, real(from, to), );
}

int renameat(int from_dir, const char * from, int to_dir, const char * to) {
    REAL(renameat)
    PLAIN(is_inside(to_dir, to), false, real(from_dir, from, to_dir, to), );
}

int link(const char * from, const char * to) {
    REAL(link)
    PLAIN(is_inside(AT_FDCWD, to), true, real(from, to), );
}

int unlink(const char * path) {
    REAL(unlink)
    PLAIN(is_inside(AT_FDCWD, path), false, real(path), );
}

int unlinkat(int dir, const char * path, int flags) {
    REAL(unlinkat)
    PLAIN(is_inside(dir, path), false, real(dir, path, flags), );
}

int mkdir(const char * path, mode_t mode) {
    REAL(mkdir)
    PLAIN(is_inside(AT_FDCWD, path), true, real(path, mode), );
}

#define MODE(flags)                  \
    mode_t mode = 0;                 \
    if ((flags) & O_CREAT) {         \
        va_list more;                \
        va_start(more, flags);       \
        mode = va_arg(more, mode_t); \
        va_end(more);                \
    }

#define CREATING(dir, call)                                                                        \
    const bool is_new = (flags & O_CREAT) && faccessat(dir, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0; \
    PLAIN((flags & O_CREAT) && is_inside(dir, path), true, call, if (is_new) disk_created(result))

int open(const char * path, int flags, ...) {
    REAL(open)
    MODE(flags)
    CREATING(AT_FDCWD, real(path, flags, mode));
}

int openat(int dir, const char * path, int flags, ...) {
    REAL(openat)
    MODE(flags)
    CREATING(dir, real(dir, path, flags, mode));
}

// Where offsets have 64 bits anyway, these are the same.
#define SAME_AS(name) __attribute__((alias(#name)))

ssize_t pwrite64(int fd, const void * data, size_t n, off64_t at) SAME_AS(pwrite);
int ftruncate64(int fd, off64_t size) SAME_AS(ftruncate);
int fdatasync(int fd) SAME_AS(fsync);
int open64(const char * path, int flags, ...) SAME_AS(open);
int openat64(int dir, const char * path, int flags, ...) SAME_AS(openat);
