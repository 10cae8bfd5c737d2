// The kernel for x86 processors with AVX-512 that multiply bf16 numbers: K, V, queries and probabilities of many
// queries are rounded to those before they are multiplied.

#include "kernels/h2o-kernel.h"

#if defined(__AVX512BF16__)

#    include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = { "avx512bf16", W, false, attend, look, found, combine, beside, encode_page,
    turn_key };

const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16 = &kernel;

#else

const llama_h2o_kernel * const llama_h2o_kernel_avx512bf16 = nullptr;

#endif
