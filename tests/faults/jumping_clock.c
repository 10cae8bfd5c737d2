// Clocks that jump, for programs that are tested: loaded in front of the C library (LD_PRELOAD).
//
// From clock_arm() on the time of day jumps back and forth by years, as on a machine that is set,
// and the monotonic clock forward by hours, as on one that slept. Whoever is continued (SIGCONT)
// finds both clocks hours ahead. Files get the time of day when they get their names.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

#define HOUR 3600
#define YEAR (8766L * HOUR)

// One question in so many makes a clock jump.
#define DAY_JUMPS_IN       2
#define MONOTONIC_JUMPS_IN 40

static bool armed;
static bool jumps;          // by itself, and not only when it is continued
static atomic_long day_off; // seconds
static atomic_long monotonic_off;
static atomic_long n_jumps;
static atomic_ullong state;

static uint64_t random_below(uint64_t n) { // splitmix64
    uint64_t z = atomic_fetch_add(&state, 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u;
    z          = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z          = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return (z ^ (z >> 31)) % n;
}

static void wake_up(int signal) {
    (void) signal;
    const long hours = 1 + (long) random_below(12);
    atomic_fetch_add(&day_off, hours * HOUR);
    atomic_fetch_add(&monotonic_off, hours * HOUR);
    atomic_fetch_add(&n_jumps, 1);
}

void clock_arm(bool jumps_by_itself, unsigned long long seed) {
    atomic_store(&state, seed * 2654435761u + 1);
    jumps                        = jumps_by_itself;
    armed                        = true;
    const struct sigaction woken = { .sa_handler = wake_up, .sa_flags = SA_RESTART };
    sigaction(SIGCONT, &woken, NULL);
}

// How often a clock has jumped.
long clock_jumps(void) {
    return atomic_load(&n_jumps);
}

#define REAL(name)                                           \
    static __typeof__(name) * real;                          \
    if (real == NULL) {                                      \
        real = (__typeof__(name) *) dlsym(RTLD_NEXT, #name); \
    }

// Seconds to add to a clock; it jumps first, where that was drawn.
static long off(clockid_t clock) {
    if (!armed) {
        return 0;
    }
    switch (clock) {
        case CLOCK_REALTIME:
        case CLOCK_REALTIME_COARSE:
            if (jumps && random_below(DAY_JUMPS_IN) == 0) {
                atomic_store(&day_off, (long) random_below(11 * YEAR) - YEAR);
                atomic_fetch_add(&n_jumps, 1);
            }
            return atomic_load(&day_off);
        case CLOCK_MONOTONIC:
        case CLOCK_MONOTONIC_COARSE:
        case CLOCK_MONOTONIC_RAW:
        case CLOCK_BOOTTIME:
            if (jumps && random_below(MONOTONIC_JUMPS_IN) == 0) {
                atomic_fetch_add(&monotonic_off, HOUR + (long) random_below(12 * HOUR));
                atomic_fetch_add(&n_jumps, 1);
            }
            return atomic_load(&monotonic_off);
        default: // the time of a process or a thread
            return 0;
    }
}

int clock_gettime(clockid_t clock, struct timespec * now) {
    REAL(clock_gettime)
    const long seconds = off(clock);
    const int result   = real(clock, now);
    if (result == 0) {
        now->tv_sec += seconds;
    }
    return result;
}

int gettimeofday(struct timeval * restrict now, void * restrict zone) {
    REAL(gettimeofday)
    const int result = real(now, zone);
    if (result == 0) {
        now->tv_sec += off(CLOCK_REALTIME);
    }
    return result;
}

time_t time(time_t * now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now != NULL) {
        *now = exact.tv_sec;
    }
    return exact.tv_sec;
}

// The kernel waits by its own clocks, and not by those that were read here.
static struct timespec kernels(clockid_t clock, const struct timespec * end) {
    struct timespec result = *end;
    result.tv_sec -= !armed ? 0 : clock == CLOCK_REALTIME ? atomic_load(&day_off) : atomic_load(&monotonic_off);
    if (result.tv_sec < 0) {
        result = (struct timespec) { 0, 0 };
    }
    return result;
}

int sem_timedwait(sem_t * restrict semaphore, const struct timespec * restrict end) {
    REAL(sem_timedwait)
    const struct timespec then = kernels(CLOCK_REALTIME, end);
    return real(semaphore, &then);
}

int sem_clockwait(sem_t * restrict semaphore, clockid_t clock, const struct timespec * restrict end) {
    REAL(sem_clockwait)
    const struct timespec then = kernels(clock, end);
    return real(semaphore, clock, &then);
}

int pthread_cond_timedwait(
        pthread_cond_t * restrict condition, pthread_mutex_t * restrict mutex, const struct timespec * restrict end) {
    REAL(pthread_cond_timedwait)
    // Python's conditions wait by the monotonic clock; nobody else waits so in a program here.
    const struct timespec then = kernels(CLOCK_MONOTONIC, end);
    return real(condition, mutex, &then);
}

int pthread_cond_clockwait(pthread_cond_t * restrict condition,
        pthread_mutex_t * restrict mutex,
        clockid_t clock,
        const struct timespec * restrict end) {
    REAL(pthread_cond_clockwait)
    const struct timespec then = kernels(clock, end);
    return real(condition, mutex, clock, &then);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec * end, struct timespec * left) {
    REAL(clock_nanosleep)
    const struct timespec then = (flags & TIMER_ABSTIME) ? kernels(clock, end) : *end;
    return real(clock, flags, &then, left);
}

// A file that is saved gets its name by this (of faulty_files.c, if that is loaded behind).
int rename(const char * from, const char * to) {
    REAL(rename)
    if (armed) {
        struct timespec times[2] = { { .tv_nsec = UTIME_OMIT } };
        clock_gettime(CLOCK_REALTIME, &times[1]);
        utimensat(AT_FDCWD, from, times, 0);
    }
    return real(from, to);
}
