// The kernel for ARM processors, all of which have NEON in 64-bit mode.

#include "kernels/h2o-kernel.h"

#if defined(__ARM_NEON) && defined(__aarch64__)
#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = make_kernel("neon", nullptr, true);

const llama_h2o_kernel * const llama_h2o_kernel_neon = &kernel;
#else
const llama_h2o_kernel * const llama_h2o_kernel_neon = nullptr;
#endif
