// The instructions that this machine has, for kernels of x86: other processors have no choice among them.

#pragma once

// with FMA and F16C, which kernels for AVX2 use, too
bool llama_h2o_has_avx2();

// each with all of AVX2
bool llama_h2o_has_avx512();
bool llama_h2o_has_avx512bf16();
bool llama_h2o_has_avx512vnni();
