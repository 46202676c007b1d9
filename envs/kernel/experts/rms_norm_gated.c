#include <math.h>
#include <stdint.h>
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *restrict w = in[2];
    int64_t rows = dim[0], n = dim[1];
    for (int64_t t = 0; t < rows; t++) {
        const float *restrict x = (const float *)in[0] + t * n, *restrict g = (const float *)in[1] + t * n;
        float *restrict y = (float *)out[0] + t * n;
        float sum = 0.0f;
        for (int64_t i = 0; i < n; i++) sum += x[i] * x[i];
        float scale = 1.0f / sqrtf(sum / n + 1e-5f);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * w[i] / (1.0f + expf(-g[i]));
    }
}
