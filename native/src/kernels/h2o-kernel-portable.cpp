// The kernel in plain C++, for every processor.

#define H2O_PORTABLE

#include "kernels/h2o-kernel-impl.h"

static const llama_h2o_kernel kernel = { "portable", W, true, attend, combine, scan };

const llama_h2o_kernel * const llama_h2o_kernel_portable = &kernel;
