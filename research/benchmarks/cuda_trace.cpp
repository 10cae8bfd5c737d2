// Adds up the time of kernels, copies and calls of CUDA's runtime by name, between two marks that a program sets, such as
// cuda_profile.py. CUDA loads this library into any program whose environment has CUDA_INJECTION64_PATH=LIBRARY. With PDL
// kernels overlap, which counts time twice: GGML_CUDA_PDL=0 turns it off.
//
//   c++ -std=c++17 -O2 -shared -fPIC -I$CUPTI/include cuda_trace.cpp -L$CUPTI/lib64 -lcupti -o libcuda_trace.so

#include <cupti.h>
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t BUFFER_SIZE  = size_t(8) << 20;
constexpr size_t MAX_LINES    = 24; // of a table
constexpr size_t MAX_NAME     = 100;
constexpr double MIN_SHARE    = 0.002; // of the time of a table
constexpr const char * COPY[] = { "?", "host to device", "device to host", "host to array", "array to host",
    "array to array", "array to device", "device to array", "device to device", "host to host", "peer to peer" };

struct total {
    uint64_t n     = 0;
    uint64_t ns    = 0;
    uint64_t bytes = 0;

    void add(uint64_t start, uint64_t end, uint64_t size = 0) {
        n     += 1;
        ns    += end > start ? end - start : 0;
        bytes += size;
    }
};

using totals = std::map<std::string, total>;

// CUPTI hands over records in threads of its own.
std::mutex lock;
totals on_device, on_host;

void add(const CUpti_Activity * record) {
    switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
            const auto * kernel = reinterpret_cast<const CUpti_ActivityKernel9 *>(record);
            on_device[kernel->name ? kernel->name : "?"].add(kernel->start, kernel->end);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            const auto * copy   = reinterpret_cast<const CUpti_ActivityMemcpy5 *>(record);
            const uint32_t kind = copy->copyKind < std::size(COPY) ? copy->copyKind : 0;
            on_device[std::string("copy ") + COPY[kind]].add(copy->start, copy->end, copy->bytes);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
            const auto * set = reinterpret_cast<const CUpti_ActivityMemset4 *>(record);
            on_device["memset"].add(set->start, set->end, set->bytes);
            break;
        }
        case CUPTI_ACTIVITY_KIND_RUNTIME: {
            const auto * call = reinterpret_cast<const CUpti_ActivityAPI *>(record);
            const char * name = nullptr;
            cuptiGetCallbackName(CUPTI_CB_DOMAIN_RUNTIME_API, call->cbid, &name);
            on_host[name ? name : "?"].add(call->start, call->end);
            break;
        }
        default:
            break;
    }
}

void CUPTIAPI give_buffer(uint8_t ** buffer, size_t * size, size_t * max_records) {
    *buffer      = static_cast<uint8_t *>(std::aligned_alloc(8, BUFFER_SIZE));
    *size        = *buffer ? BUFFER_SIZE : 0;
    *max_records = 0;
}

void CUPTIAPI take_buffer(CUcontext, uint32_t, uint8_t * buffer, size_t, size_t n_valid) {
    const std::lock_guard<std::mutex> guard(lock);

    CUpti_Activity * record = nullptr;
    while (cuptiActivityGetNextRecord(buffer, n_valid, &record) == CUPTI_SUCCESS) {
        add(record);
    }
    std::free(buffer);
}

std::string short_name(const std::string & mangled) {
    int status   = 0;
    char * plain = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);

    std::string res = plain ? plain : mangled;
    std::free(plain);
    for (const std::string & part : { std::string("void "), std::string("(anonymous namespace)::") }) {
        for (size_t at; (at = res.find(part)) != std::string::npos;) {
            res.erase(at, part.size());
        }
    }

    return res.substr(0, MAX_NAME);
}

void print(const char * where, const totals & all) {
    std::vector<std::pair<std::string, total>> lines(all.begin(), all.end());
    std::sort(lines.begin(), lines.end(), [](const auto & a, const auto & b) { return a.second.ns > b.second.ns; });

    double ms = 0.0;
    for (const auto & line : lines) {
        ms += double(line.second.ns) / 1e6;
    }
    std::printf("%10.3f ms in all, %s\n", ms, where);
    for (size_t i = 0; i < lines.size() && i < MAX_LINES; ++i) {
        const total & sum = lines[i].second;
        if (double(sum.ns) / 1e6 < MIN_SHARE * ms) {
            break;
        }
        std::printf("%10.3f ms %7llu x %9.1f us", double(sum.ns) / 1e6, static_cast<unsigned long long>(sum.n),
                double(sum.ns) / 1e3 / double(sum.n));
        std::printf(sum.bytes > 0 ? " %9.2f MB" : "", double(sum.bytes) / 1e6);
        std::printf("  %s\n", short_name(lines[i].first).c_str());
    }
}

} // namespace

extern "C" {

// Prints what was done since the last mark, if there is a title. The GPU must be idle.
void trace_mark(const char * title) {
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);

    const std::lock_guard<std::mutex> guard(lock);

    if (title) {
        std::printf("%s\n", title);
        print("on the GPU", on_device);
        print("in calls on the host", on_host);
        std::fflush(stdout);
    }
    on_device.clear();
    on_host.clear();
}

// Called by CUDA.
int InitializeInjection() {
    cuptiActivityRegisterCallbacks(give_buffer, take_buffer);

    for (const CUpti_ActivityKind kind : { CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                 CUPTI_ACTIVITY_KIND_MEMSET, CUPTI_ACTIVITY_KIND_RUNTIME }) {
        if (cuptiActivityEnable(kind) != CUPTI_SUCCESS) {
            std::fprintf(stderr, "CUPTI refuses to record activities of kind %d\n", int(kind));
        }
    }

    return 1;
}
}
