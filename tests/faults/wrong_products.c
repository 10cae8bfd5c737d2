// Wrong matrix products, preloaded before ggml's (LD_PRELOAD): those of repacked Q4_0 weights end the process, those of Q5_1
// are wrong in every form.

#include <signal.h>
#include <stddef.h>

#define ENDS(name)      \
    void name(void) {   \
        raise(SIGSEGV); \
    }

// on x86 and on ARM
ENDS(ggml_gemm_q4_0_8x8_q8_0)
ENDS(ggml_gemm_q4_0_4x8_q8_0)
ENDS(ggml_gemm_q4_0_4x4_q8_0)
// void ggml_backend_amx_mul_mat(const ggml_compute_params *, ggml_tensor *)
ENDS(_Z24ggml_backend_amx_mul_matPK19ggml_compute_paramsP11ggml_tensor)

void ggml_vec_dot_q5_1_q8_1(
        int n, float * s, size_t bs, const void * x, size_t bx, const void * y, size_t by, int nrc) {
    (void) n, (void) bs, (void) x, (void) bx, (void) y, (void) by, (void) nrc;
    *s = 1;
}
