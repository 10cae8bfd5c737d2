// The kernel for x86 processors with AVX-512 and bf16 products: with many queries, it rounds K, V, queries and probabilities to
// bf16 before they are multiplied.

#include "kernels/h2o-kernel.h"

#if defined(__AVX512BF16__)
#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = make_kernel("avx512bf16", llama_h2o_has_avx512bf16, false);

const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16 = &kernel;
#else
const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16 = nullptr;
#endif
