#include <math.h>
#include <stdint.h>
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *x = in[0], *w = in[1];
    int64_t rows = dim[0], n = dim[1];
    float *restrict taps = scratch;
    for (int64_t c = 0; c < n; c++)
        for (int64_t j = 0; j < 4; j++) taps[j * n + c] = w[c * 4 + j];
    for (int64_t t = 0; t < rows; t++) {
        float *restrict y = (float *)out[0] + t * n;
        if (t < 3) {
            for (int64_t c = 0; c < n; c++) {
                float sum = 0.0f;
                for (int64_t j = 3 - t; j < 4; j++) sum += taps[j * n + c] * x[(t - 3 + j) * n + c];
                y[c] = sum / (1.0f + expf(-sum));
            }
            continue;
        }
        const float *restrict a = x + (t - 3) * n, *restrict b = a + n, *restrict d = b + n, *restrict e = d + n;
        for (int64_t c = 0; c < n; c++) {
            float sum = taps[c] * a[c] + taps[n + c] * b[c] + taps[2 * n + c] * d[c] + taps[3 * n + c] * e[c];
            y[c] = sum / (1.0f + expf(-sum));
        }
    }
}
