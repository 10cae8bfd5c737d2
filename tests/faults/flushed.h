// Keeps what a disk has for certain of the files of a folder, for a power cut: what was flushed. For
// faulty_files.c alone; power_cut.py reads it.
//
// Beside the folder "files/<inode>" has the flushed content of each file, and "names/<name>" is a link to it for each name
// that the folder had when it was flushed itself.

#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char disk[PATH_MAX / 2]; // where; empty, where no power fails
static pthread_mutex_t disk_lock = PTHREAD_MUTEX_INITIALIZER;

// What is done to the folder, and kept of it, is done by one thread at a time.
static void disk_begin(void) {
    if (disk[0] != 0) {
        pthread_mutex_lock(&disk_lock);
    }
}

static void disk_end(void) {
    if (disk[0] != 0) {
        pthread_mutex_unlock(&disk_lock);
    }
}

static void kept_file(char out[PATH_MAX], ino_t inode) {
    snprintf(out, PATH_MAX, "%s/files/%lu", disk, (unsigned long) inode);
}

// The number may be that of a file which is gone.
static void disk_created(int fd) {
    char path[PATH_MAX];
    struct stat info;
    if (disk[0] != 0 && fstat(fd, &info) == 0) {
        kept_file(path, info.st_ino);
        unlink(path);
    }
}

static void keep_content(int fd, ino_t inode) {
    char path[PATH_MAX];
    char link[64];
    char data[1 << 16];
    ssize_t n;
    kept_file(path, inode);
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd); // it may be open for writing alone
    const int in  = open(link, O_RDONLY);
    const int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    while ((n = read(in, data, sizeof(data))) > 0) {
        if (write(out, data, (size_t) n) != n) {
            abort();
        }
    }
    if (in < 0 || out < 0 || n < 0) {
        abort();
    }
    close(in);
    close(out);
}

// Calls for each name in a folder.
static void for_names(const char * folder, void (*call)(const char * folder, const struct dirent * entry)) {
    DIR * dir = opendir(folder);
    if (dir == NULL) {
        abort();
    }
    for (const struct dirent * entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_type != DT_DIR) {
            call(folder, entry);
        }
    }
    closedir(dir);
}

static void forget_name(const char * names, const struct dirent * entry) {
    char path[PATH_MAX];
    snprintf(path, sizeof(path), "%s/%s", names, entry->d_name);
    unlink(path);
}

static void keep_name(const char * folder, const struct dirent * entry) {
    char path[PATH_MAX];
    char name[PATH_MAX];
    (void) folder;
    kept_file(path, entry->d_ino);
    close(open(path, O_WRONLY | O_CREAT, 0600)); // empty, unless it was flushed
    snprintf(name, sizeof(name), "%s/names/%s", disk, entry->d_name);
    if (link(path, name) != 0) {
        abort();
    }
}

static void disk_synced(int fd) {
    char path[PATH_MAX];
    struct stat info;
    if (disk[0] == 0 || fstat(fd, &info) != 0) {
        return;
    }
    if (!S_ISDIR(info.st_mode)) {
        keep_content(fd, info.st_ino);
        return;
    }
    snprintf(path, sizeof(path), "%s/names", disk);
    for_names(path, forget_name);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    for_names(path, keep_name);
}
