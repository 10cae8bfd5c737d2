// A failing operator new, preloaded before the C++ library (LD_PRELOAD). A callback decides about each allocation by
// functions at given addresses, or on their behalf; the first one that it selects fails, and no other.

#include <execinfo.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <unordered_set>
#include <vector>

namespace {

struct range {
    uintptr_t begin;
    uintptr_t end;
};

constexpr int DEPTH = 12; // maximum calls between a function and its allocation

std::vector<range> ours;   // sorted
std::vector<range> theirs; // sorted; their allocations do not count
std::atomic<bool> is_armed;
std::atomic<long> n_done;
std::atomic<int (*)(long)> callback;
std::atomic<bool> counts_kinds; // count only the first allocation of a call stack
thread_local bool is_looking;   // this library may allocate itself

std::unordered_set<uint64_t> & seen() {
    static std::unordered_set<uint64_t> stacks;
    return stacks;
}

bool is_in(const std::vector<range> & ranges, const void * address) {
    const auto at   = reinterpret_cast<uintptr_t>(address);
    const auto next = std::upper_bound(
            ranges.begin(), ranges.end(), at, [](uintptr_t value, const range & each) { return value < each.begin; });
    return next != ranges.begin() && at < std::prev(next)->end;
}

bool is_ours(void * const * frames, int n_frames) {
    const auto first = std::find_if(frames, frames + n_frames,
            [](const void * address) { return is_in(ours, address) || is_in(theirs, address); });
    return first != frames + n_frames && is_in(ours, *first);
}

bool is_new(void * const * frames, int n_frames) {
    uint64_t stack = 0;
    for (int i = 0; i < n_frames; i++) {
        stack = (stack ^ reinterpret_cast<uintptr_t>(frames[i])) * 0x9e3779b97f4a7c15u;
    }
    return seen().insert(stack).second;
}

// Whether the caller of new is ours and, with counts_kinds, the call stack is new.
bool counts() {
    void * frames[DEPTH];
    const int n_frames = backtrace(frames, DEPTH);

    return is_ours(frames, n_frames) && (!counts_kinds || is_new(frames, n_frames));
}

bool fails() {
    if (!is_armed || is_looking) {
        return false;
    }
    is_looking        = true;
    const int error   = errno;
    const bool answer = counts() && callback.load()(n_done++);
    errno             = error;
    is_looking        = false;
    if (answer) {
        is_armed = false;
    }
    return answer;
}

void * allocated(size_t size, size_t alignment) {
    if (fails()) {
        return nullptr;
    }
    return alignment == 0 ? malloc(size == 0 ? 1 : size)
                          : aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

void * allocated_or_thrown(size_t size, size_t alignment) {
    void * data = allocated(size, alignment);
    if (data == nullptr) {
        throw std::bad_alloc();
    }
    return data;
}

} // namespace

extern "C" {

// ranges: begin and end of each of our functions, sorted, followed by those of the libraries that do not count.
void failing_watch(const uintptr_t * ranges, long n_ours, long n_theirs) {
    ours.clear();
    theirs.clear();
    for (long i = 0; i < n_ours + n_theirs; i++) {
        (i < n_ours ? ours : theirs).push_back({ ranges[2 * i], ranges[2 * i + 1] });
    }
    void * frames[1];
    backtrace(frames, 1); // loads its library
}

// Starts to count allocations. fails() decides about each by its number from 0, until one fails. With kinds only the first
// of each call stack counts, in one thread.
void failing_arm(int (*fails)(long), int kinds) {
    seen().clear();
    counts_kinds = kinds != 0;
    n_done       = 0;
    callback     = fails;
    is_armed     = true;
}

// Stops, and returns the number of allocations.
long failing_disarm(void) {
    is_armed = false;
    return n_done;
}
}

void * operator new(size_t size) {
    return allocated_or_thrown(size, 0);
}

void * operator new[](size_t size) {
    return allocated_or_thrown(size, 0);
}

void * operator new(size_t size, const std::nothrow_t &) noexcept {
    return allocated(size, 0);
}

void * operator new[](size_t size, const std::nothrow_t &) noexcept {
    return allocated(size, 0);
}

void * operator new(size_t size, std::align_val_t alignment) {
    return allocated_or_thrown(size, size_t(alignment));
}

void * operator new[](size_t size, std::align_val_t alignment) {
    return allocated_or_thrown(size, size_t(alignment));
}

void operator delete(void * data) noexcept {
    free(data);
}

void operator delete[](void * data) noexcept {
    free(data);
}

void operator delete(void * data, size_t) noexcept {
    free(data);
}

void operator delete[](void * data, size_t) noexcept {
    free(data);
}

void operator delete(void * data, std::align_val_t) noexcept {
    free(data);
}

void operator delete[](void * data, std::align_val_t) noexcept {
    free(data);
}

void operator delete(void * data, size_t, std::align_val_t) noexcept {
    free(data);
}

void operator delete[](void * data, size_t, std::align_val_t) noexcept {
    free(data);
}
