#include <math.h>
#include <stdint.h>
/* tanh(x) = 1 - 2 / (exp(2 x) + 1), good to float32 rounding of 1; the rows are never so small that it matters. */
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *restrict gate = in[0], *restrict up = in[1];
    float *restrict y = out[0];
    int64_t n = dim[0] * dim[1];
    for (int64_t i = 0; i < n; i++) {
        float a = 1.0f - 2.0f / (expf(0.5f * gate[i]) + 1.0f);
        float b = 1.0f - 2.0f / (expf(0.08f * up[i]) + 1.0f);
        y[i] = 100.0f * a * b / (1.0f + expf(-gate[i]));
    }
}
