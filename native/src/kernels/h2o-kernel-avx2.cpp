// The kernel for x86 processors with AVX2, FMA and F16C.

#include "kernels/h2o-kernel.h"

#if defined(__AVX2__)
#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = make_kernel("avx2", llama_h2o_has_avx2, true);

const llama_h2o_kernel * const llama_h2o_kernel_avx2 = &kernel;
#else
const llama_h2o_kernel * const llama_h2o_kernel_avx2 = nullptr;
#endif
