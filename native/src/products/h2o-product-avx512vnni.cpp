// Products on x86 processors with AVX-512 VNNI.

#include "products/h2o-product.h"

#if defined(__AVX512VNNI__)
#    include "products/h2o-product-impl.h"

static const llama_h2o_product_kernel kernel = { "avx512vnni", llama_h2o_has_avx512vnni, W, read_scales, multiply };

const llama_h2o_product_kernel * const llama_h2o_product_avx512vnni = &kernel;
#else
const llama_h2o_product_kernel * const llama_h2o_product_avx512vnni = nullptr;
#endif
