// The kernel for x86 processors with AVX-512.

#include "kernels/h2o-kernel.h"

#if defined(__AVX512F__)
#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = make_kernel("avx512", llama_h2o_has_avx512, true);

const llama_h2o_kernel * const llama_h2o_kernel_avx512 = &kernel;
#else
const llama_h2o_kernel * const llama_h2o_kernel_avx512 = nullptr;
#endif
