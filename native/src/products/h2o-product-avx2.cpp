// Products on x86 processors with AVX2.

#include "products/h2o-product.h"

#if defined(__AVX2__)
#    include "products/h2o-product-impl.h"

static const llama_h2o_product_kernel kernel = { "avx2", llama_h2o_has_avx2, W, read_scales, multiply };

const llama_h2o_product_kernel * const llama_h2o_product_avx2 = &kernel;
#else
const llama_h2o_product_kernel * const llama_h2o_product_avx2 = nullptr;
#endif
