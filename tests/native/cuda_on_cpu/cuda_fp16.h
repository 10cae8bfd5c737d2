// The part of CUDA that our kernels use, on a CPU, to test them without a GPU. Replaces the header of the same name.
//
// The threads of a block are coroutines: each runs until it waits for others.

#pragma once

#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
// shared by a block, and only one block runs at a time
#define __shared__ static

struct dim3 {
    uint32_t x;
    uint32_t y;

    explicit dim3(uint32_t x = 1, uint32_t y = 1) : x(x), y(y) {}
};

using cudaStream_t = void *;

struct uint2 {
    uint32_t x, y;
};

struct uint4 {
    uint32_t x, y, z, w;
};

struct float4 {
    float x, y, z, w;
};

inline dim3 gridDim;
inline dim3 blockDim;
inline dim3 blockIdx;
inline dim3 threadIdx;

// not every compiler has _Float16
struct __half {
    uint16_t bits;
};

inline __half __ushort_as_half(uint16_t bits) {
    return { bits };
}

inline float __half2float(__half x) {
    // a float with these bits has too small an exponent, except infinity and NaN
    const uint32_t bits = uint32_t(x.bits & 0x7fff) << 13;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(bits));
    magnitude = bits < 0x0f800000 ? magnitude * 0x1p112f : bits == 0x0f800000 ? INFINITY : NAN;

    return x.bits >> 15 ? -magnitude : magnitude;
}

inline uint16_t __half_as_ushort(__half x) {
    return x.bits;
}

inline __half __float2half_rn(float x) {
    const float magnitude = std::fabs(x);
    const int exponent    = magnitude > 0.0f ? std::max(std::ilogb(magnitude), -14) : -14;

    uint16_t bits = 0x7e00;
    if (magnitude >= 65520.0f) {
        bits = 0x7c00;
    } else if (magnitude >= 0.0f) {
        bits = uint16_t(((exponent + 14) << 10) + int(std::nearbyint(std::ldexp(magnitude, 10 - exponent))));
    }

    return { uint16_t(bits | (std::signbit(x) ? 0x8000 : 0)) };
}

inline float __fmaf_rn(float x, float y, float z) {
    return std::fma(x, y, z);
}

inline float __fmul_rn(float x, float y) {
    return x * y;
}

namespace cuda_on_cpu {

constexpr size_t STACK_SIZE = 128 * 1024;
constexpr uint32_t N_WARP   = 32;

// Whether blocks and threads run in reverse order, because CUDA guarantees none.
inline bool backwards = false;

inline uint32_t in_turn(uint32_t i, uint32_t n) {
    return backwards ? n - 1 - i : i;
}

class block {
public:
    static block & current() {
        static block instance;
        return instance;
    }

    void run(uint32_t n_threads, const std::function<void()> & kernel) {
        this->kernel = &kernel;
        if (threads.size() < n_threads) {
            threads = std::vector<thread>(n_threads);
        }
        shuffled.resize(n_threads);
        n_running = n_threads;
        n_waiting = 0;
        for (auto & thread : threads) {
            thread.stack.resize(STACK_SIZE);
            thread.done    = false;
            thread.barrier = UINT64_MAX;
        }
        while (n_running > 0) {
            for (uint32_t i = 0; i < n_threads; ++i) {
                running = in_turn(i, n_threads);
                if (!threads[running].done && threads[running].barrier != generation) {
                    threadIdx.x = running;
                    go_on(threads[running]);
                }
            }
        }
    }

    // Lets all others run until they wait.
    void yield() {
        if (!_setjmp(threads[running].place)) {
            _longjmp(scheduler, 1);
        }
    }

    // Waits for all threads of the block. If one has ended, the others would wait forever.
    void wait_for_all() {
        threads[running].barrier = generation;
        if (++n_waiting == shuffled.size()) {
            n_waiting = 0;
            ++generation;
        }
        yield();
    }

    // The threads of a warp take the same branches, so all have arrived here after each has run once.
    float shuffle_xor(float x, uint32_t offset) {
        const uint32_t self = running;
        shuffled[self]      = x;
        yield();
        const float res = shuffled[self / N_WARP * N_WARP + (self % N_WARP ^ offset)];
        yield();
        return res;
    }

    // the same
    uint32_t ballot(bool has) {
        const uint32_t self = running;
        shuffled[self]      = has ? 1.0f : 0.0f;
        yield();
        uint32_t res = 0;
        for (uint32_t i = 0; i < N_WARP; ++i) {
            res |= uint32_t(shuffled[self / N_WARP * N_WARP + i] > 0.0f) << i;
        }
        yield();
        return res;
    }

private:
    struct thread {
        std::jmp_buf place;
        std::vector<char> stack;
        bool begun       = false;
        bool done        = false;
        uint64_t barrier = UINT64_MAX; // at which it waits, if any
    };

    // setcontext() only starts a thread, because it makes a system call for the signal mask; later switches use longjmp.
    void go_on(thread & next) {
        if (_setjmp(scheduler)) {
            return;
        }
        if (next.begun) {
            _longjmp(next.place, 1);
        }
        next.begun = true;

        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp   = next.stack.data();
        context.uc_stack.ss_size = next.stack.size();
        context.uc_link          = nullptr;
        makecontext(&context, start, 0);
        setcontext(&context);
    }

    // Kernels run one after another.
    static void start() {
        block & self = current();
        for (;;) {
            (*self.kernel)();
            self.threads[self.running].done = true;
            --self.n_running;
            self.yield();
        }
    }

    const std::function<void()> * kernel = nullptr;
    std::jmp_buf scheduler;
    std::vector<thread> threads;
    std::vector<float> shuffled;
    uint32_t running    = 0;
    uint32_t n_running  = 0;
    uint32_t n_waiting  = 0;
    uint64_t generation = 0;
};

// kernel<<<grid, n_threads, 0, stream>>>()
inline void launch(dim3 grid, uint32_t n_threads, cudaStream_t, const std::function<void()> & kernel) {
    gridDim  = grid;
    blockDim = dim3(n_threads);
    for (uint32_t i = 0; i < grid.x * grid.y; ++i) {
        const uint32_t turn = in_turn(i, grid.x * grid.y);
        blockIdx            = dim3(turn % grid.x, turn / grid.x);
        block::current().run(n_threads, kernel);
    }
}

} // namespace cuda_on_cpu

inline void __syncthreads() {
    cuda_on_cpu::block::current().wait_for_all();
}

inline float __shfl_xor_sync(uint32_t, float x, uint32_t offset) {
    return cuda_on_cpu::block::current().shuffle_xor(x, offset);
}

inline void __syncwarp() {
    cuda_on_cpu::block::current().yield();
}

inline uint32_t __ballot_sync(uint32_t, bool has) {
    return cuda_on_cpu::block::current().ballot(has);
}

inline int __popc(uint32_t bits) {
    return __builtin_popcount(bits);
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof(bits));

    return bits;
}

inline long long __double_as_longlong(double x) {
    long long bits;
    std::memcpy(&bits, &x, sizeof(bits));

    return bits;
}

inline int __float2int_rn(float x) {
    return int(std::nearbyint(x));
}

// only one thread runs at a time
template <typename T>
T atomicAdd(T * sum, T x) {
    const T before  = *sum;
    *sum           += x;

    return before;
}

inline float __fsqrt_rn(float x) {
    return std::sqrt(x);
}

inline float __fdiv_rn(float x, float y) {
    return x / y;
}

using std::min;
