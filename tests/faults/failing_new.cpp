// Memory that runs out, for libraries that are tested: loaded in front of the C++ library
// (LD_PRELOAD). Of the allocations with `new` that functions at given addresses make, or that are
// made for them, each is asked about; the first one that is told to fail is the only one that does.

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

constexpr int DEPTH = 12; // calls between an allocation and the function that it is for

std::vector<range> ours;   // sorted
std::vector<range> theirs; // sorted; what they allocate for us is theirs
std::atomic<bool> is_armed;
std::atomic<long> n_done;
std::atomic<int (*)(long)> told_to_fail;
std::atomic<bool> counts_kinds; // of one call stack only the first allocation counts
thread_local bool is_looking;   // what is done here may allocate

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

// Whether the caller of new is one of ours, and of another call stack than before if that counts.
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
    const bool answer = counts() && told_to_fail.load()(n_done++);
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

// `ranges`: begin and end of each of our functions, sorted, and behind `n_ours` of them those of libraries that are not ours.
void failing_watch(const uintptr_t * ranges, long n_ours, long n_theirs) {
    ours.clear();
    theirs.clear();
    for (long i = 0; i < n_ours + n_theirs; i++) {
        (i < n_ours ? ours : theirs).push_back({ ranges[2 * i], ranges[2 * i + 1] });
    }
    void * frames[1];
    backtrace(frames, 1); // loads what it needs
}

// Allocations are counted from here on, and `fails` is asked about each, by its number from 0, until one fails. With `kinds`
// only the first of each call stack counts, in one thread.
void failing_arm(int (*fails)(long), int kinds) {
    seen().clear();
    counts_kinds = kinds != 0;
    n_done       = 0;
    told_to_fail = fails;
    is_armed     = true;
}

// The number of allocations since then.
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
