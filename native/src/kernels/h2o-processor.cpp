#include "kernels/h2o-processor.h"

#if defined(__x86_64__)

#    include <cpuid.h>

// __builtin_cpu_supports() of older clangs does not know it
static bool has_f16c() {
    unsigned eax = 0;
    unsigned ebx = 0;
    unsigned ecx = 0;
    unsigned edx = 0;

    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

bool llama_h2o_has_avx2() {
    __builtin_cpu_init();

    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool llama_h2o_has_avx512() {
    return llama_h2o_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
}

bool llama_h2o_has_avx512bf16() {
    return llama_h2o_has_avx512() && __builtin_cpu_supports("avx512bf16");
}

bool llama_h2o_has_avx512vnni() {
    return llama_h2o_has_avx512() && __builtin_cpu_supports("avx512vnni");
}

#endif
