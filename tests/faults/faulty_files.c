// A disk that fails, for programs that are tested: loaded in front of the C library (LD_PRELOAD).
//
// What a program does to the files in one folder is counted: creating, writing, shortening,
// flushing, renaming and removing them, and making folders. From an operation on that faulty_arm()
// names, the process is killed, a device fails, is full, or does its work in small pieces. For a
// power cut all of it is noted, and the process is killed; power_cut.py takes away what is lost.

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

#include "disk_log.h"

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

// What is done is noted in this file from here on, which is not in the folder.
void faulty_log(const char * path) {
    log_file = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
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

static bool is_inside(int dir, const char * path) {
    char whole[PATH_MAX];
    return folder[0] != 0 && absolute_path(dir, path, whole) && starts_inside(whole);
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

// A plain operation: killed before it or behind it.
#define PLAIN(inside, takes_room, call, note) \
    do {                                      \
        bool kills = false;                   \
        if (!(inside)) {                      \
            return (call);                    \
        }                                     \
        if (fails(takes_room, &kills)) {      \
            return -1;                        \
        }                                     \
        if (kills && random_below(2) == 0) {  \
            die();                            \
        }                                     \
        log_begin();                          \
        const int result = (call);            \
        if (result >= 0) {                    \
            note;                             \
        }                                     \
        if (kills) {                          \
            die();                            \
        }                                     \
        log_end();                            \
        return result;                        \
    } while (0)

#define WRITING(fd, n, call, note)                  \
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
        log_begin();                                \
        const ssize_t done = now == 0 ? 0 : (call); \
        if (done > 0) {                             \
            note;                                   \
        }                                           \
        if (kills) {                                \
            die();                                  \
        }                                           \
        log_end();                                  \
        return done;                                \
    } while (0)

ssize_t write(int fd, const void * data, size_t n) {
    REAL(write)
    WRITING(fd, n, real(fd, data, now), log_appended(fd, data, (size_t) done));
}

ssize_t pwrite(int fd, const void * data, size_t n, off_t at) {
    REAL(pwrite)
    WRITING(fd, n, real(fd, data, now, at), log_written(fd, (uint64_t) at, data, (size_t) done));
}

ssize_t pwrite64(int fd, const void * data, size_t n, off64_t at) {
    REAL(pwrite64)
    WRITING(fd, n, real(fd, data, now, at), log_written(fd, (uint64_t) at, data, (size_t) done));
}

ssize_t copy_file_range(int in, off64_t * from, int out, off64_t * to, size_t n, unsigned flags) {
    REAL(copy_file_range)
    WRITING(out, n, real(in, from, out, to, now, flags),
            log_copied(out, (uint64_t) (to != NULL ? *to : lseek(out, 0, SEEK_CUR)), (size_t) done));
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate)
    PLAIN(is_open_inside(fd), true, real(fd, size), log_resized(fd, (uint64_t) size));
}

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64)
    PLAIN(is_open_inside(fd), true, real(fd, size), log_resized(fd, (uint64_t) size));
}

int fsync(int fd) {
    REAL(fsync)
    PLAIN(is_open_inside(fd), false, real(fd), log_synced(fd));
}

int fdatasync(int fd) {
    REAL(fdatasync)
    PLAIN(is_open_inside(fd), false, real(fd), log_synced(fd));
}

int rename(const char * from, const char * to) {
    REAL(rename)
    PLAIN(is_inside(AT_FDCWD, to), false, real(from, to), log_names(STEP_RENAME, AT_FDCWD, from, AT_FDCWD, to));
}

int renameat(int from_dir, const char * from, int to_dir, const char * to) {
    REAL(renameat)
    PLAIN(is_inside(to_dir, to), false, real(from_dir, from, to_dir, to),
            log_names(STEP_RENAME, from_dir, from, to_dir, to));
}

int link(const char * from, const char * to) {
    REAL(link)
    PLAIN(is_inside(AT_FDCWD, to), true, real(from, to), log_names(STEP_LINK, AT_FDCWD, from, AT_FDCWD, to));
}

int unlink(const char * path) {
    REAL(unlink)
    PLAIN(is_inside(AT_FDCWD, path), false, real(path), log_name(STEP_REMOVE, AT_FDCWD, path));
}

int unlinkat(int dir, const char * path, int flags) {
    REAL(unlinkat)
    PLAIN(is_inside(dir, path), false, real(dir, path, flags), log_name(STEP_REMOVE, dir, path));
}

int mkdir(const char * path, mode_t mode) {
    REAL(mkdir)
    PLAIN(is_inside(AT_FDCWD, path), true, real(path, mode), log_name(STEP_FOLDER, AT_FDCWD, path));
}

#define MODE(flags)                  \
    mode_t mode = 0;                 \
    if ((flags) & O_CREAT) {         \
        va_list more;                \
        va_start(more, flags);       \
        mode = va_arg(more, mode_t); \
        va_end(more);                \
    }

int open(const char * path, int flags, ...) {
    REAL(open)
    MODE(flags)
    const bool is_new = (flags & O_CREAT) && faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    PLAIN((flags & O_CREAT) && is_inside(AT_FDCWD, path), true, real(path, flags, mode),
            log_created(result, is_new, AT_FDCWD, path, flags));
}

int open64(const char * path, int flags, ...) {
    REAL(open64)
    MODE(flags)
    const bool is_new = (flags & O_CREAT) && faccessat(AT_FDCWD, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    PLAIN((flags & O_CREAT) && is_inside(AT_FDCWD, path), true, real(path, flags, mode),
            log_created(result, is_new, AT_FDCWD, path, flags));
}

int openat(int dir, const char * path, int flags, ...) {
    REAL(openat)
    MODE(flags)
    const bool is_new = (flags & O_CREAT) && faccessat(dir, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    PLAIN((flags & O_CREAT) && is_inside(dir, path), true, real(dir, path, flags, mode),
            log_created(result, is_new, dir, path, flags));
}

int openat64(int dir, const char * path, int flags, ...) {
    REAL(openat64)
    MODE(flags)
    const bool is_new = (flags & O_CREAT) && faccessat(dir, path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    PLAIN((flags & O_CREAT) && is_inside(dir, path), true, real(dir, path, flags, mode),
            log_created(result, is_new, dir, path, flags));
}
