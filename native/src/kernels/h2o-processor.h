// Instruction sets of this x86 processor. On other processors all kernels that are built can run.

#pragma once

// includes FMA and F16C, which kernels for AVX2 use, too
bool llama_h2o_has_avx2();

// each includes AVX2
bool llama_h2o_has_avx512();
bool llama_h2o_has_avx512bf16();
bool llama_h2o_has_avx512vnni();
