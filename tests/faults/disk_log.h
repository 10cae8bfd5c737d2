// Notes what a program does to the files of a folder, so that power_cut.py can tell what a disk
// would have had of it when the power failed. For faulty_files.c alone.

#pragma once

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

// As in power_cut.py.
enum step {
    STEP_CREATE,
    STEP_WRITE,
    STEP_RESIZE,
    STEP_SYNC,
    STEP_RENAME,
    STEP_LINK,
    STEP_REMOVE,
    STEP_FOLDER,
};

struct step_head {
    uint64_t step;
    uint64_t file;   // its inode
    uint64_t offset; // of a write; the new size
    uint64_t n_from; // bytes of the names and of what was written, which follow
    uint64_t n_to;
    uint64_t n_data;
};

static int log_file             = -1;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_logged(void) {
    return log_file >= 0;
}

// The log has the steps in the order in which they were done.
static void log_begin(void) {
    if (is_logged()) {
        pthread_mutex_lock(&log_lock);
    }
}

static void log_end(void) {
    if (is_logged()) {
        pthread_mutex_unlock(&log_lock);
    }
}

// Not by write(), which is counted.
static void log_bytes(const void * data, size_t n) {
    for (size_t done = 0; done < n;) {
        const long now = syscall(SYS_write, log_file, (const char *) data + done, n - done);
        if (now <= 0) {
            abort();
        }
        done += (size_t) now;
    }
}

static void log_step(enum step step,
        uint64_t file,
        uint64_t offset,
        const char * from,
        const char * to,
        const void * data,
        size_t n) {
    const struct step_head head = { step, file, offset, strlen(from), strlen(to), n };

    log_bytes(&head, sizeof(head));
    log_bytes(from, head.n_from);
    log_bytes(to, head.n_to);
    log_bytes(data, n);
}

static uint64_t inode(int fd) {
    struct stat info;
    return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

// `path` may be beside `dir`; false if there is no such folder.
static bool absolute_path(int dir, const char * path, char out[PATH_MAX]) {
    char link[64];
    size_t n = 0;
    if (path == NULL) {
        return false;
    }
    if (path[0] != '/') {
        if (dir == AT_FDCWD) {
            strcpy(link, "/proc/self/cwd");
        } else {
            snprintf(link, sizeof(link), "/proc/self/fd/%d", dir);
        }
        const ssize_t found = readlink(link, out, PATH_MAX - 1);
        if (found <= 0) {
            return false;
        }
        n        = (size_t) found;
        out[n++] = '/';
    }
    if (n + strlen(path) >= PATH_MAX) {
        return false;
    }
    strcpy(out + n, path);
    return true;
}

static void log_names(enum step step, int from_dir, const char * from, int to_dir, const char * to) {
    char from_path[PATH_MAX] = "";
    char to_path[PATH_MAX]   = "";
    if (is_logged() && absolute_path(from_dir, from, from_path) && absolute_path(to_dir, to, to_path)) {
        log_step(step, 0, 0, from_path, to_path, NULL, 0);
    }
}

static void log_name(enum step step, int dir, const char * name) {
    log_names(step, dir, name, dir, name);
}

static void log_created(int fd, bool is_new, int dir, const char * name, int flags) {
    char path[PATH_MAX];
    if (!is_logged() || !absolute_path(dir, name, path)) {
        return;
    }
    if (is_new) {
        log_step(STEP_CREATE, inode(fd), 0, path, "", NULL, 0);
    } else if (flags & O_TRUNC) {
        log_step(STEP_RESIZE, inode(fd), 0, "", "", NULL, 0);
    }
}

static void log_written(int fd, uint64_t offset, const void * data, size_t n) {
    if (is_logged()) {
        log_step(STEP_WRITE, inode(fd), offset, "", "", data, n);
    }
}

// `n` bytes were written, up to where the file is now.
static void log_appended(int fd, const void * data, size_t n) {
    if (is_logged()) {
        log_written(fd, (uint64_t) lseek(fd, 0, SEEK_CUR) - n, data, n);
    }
}

// `n` bytes were written up to `end` by somebody else, so they are read again.
static void log_copied(int fd, uint64_t end, size_t n) {
    char link[64];
    if (!is_logged()) {
        return;
    }
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    const int in = open(link, O_RDONLY);
    char * data  = malloc(n);
    if (in < 0 || data == NULL || pread(in, data, n, (off_t) (end - n)) != (ssize_t) n) {
        abort();
    }
    log_written(fd, end - n, data, n);
    free(data);
    close(in);
}

static void log_resized(int fd, uint64_t size) {
    if (is_logged()) {
        log_step(STEP_RESIZE, inode(fd), size, "", "", NULL, 0);
    }
}

// A file, or a folder, by its name.
static void log_synced(int fd) {
    char link[64];
    char path[PATH_MAX] = "";
    struct stat info;
    if (!is_logged() || fstat(fd, &info) != 0) {
        return;
    }
    if (S_ISDIR(info.st_mode)) {
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        const ssize_t n     = readlink(link, path, sizeof(path) - 1);
        path[n > 0 ? n : 0] = 0;
    }
    log_step(STEP_SYNC, info.st_ino, 0, path, "", NULL, 0);
}
