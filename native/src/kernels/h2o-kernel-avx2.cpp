// The kernel for x86 processors with AVX2, FMA and F16C.

#include "kernels/h2o-kernel.h"

#if defined(__AVX2__)

#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = { "avx2", W, true, attend, look, found, combine, beside, encode_page, turn_key };

const llama_h2o_kernel * const llama_h2o_kernel_avx2 = &kernel;

#else

const llama_h2o_kernel * const llama_h2o_kernel_avx2 = nullptr;

#endif
