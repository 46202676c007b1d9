#include <math.h>
#include <stdint.h>
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    int64_t rows = dim[0], n = dim[1];
    for (int64_t t = 0; t < rows; t++) {
        const float *restrict x = (const float *)in[0] + t * n;
        float top = x[0], sum = 0.0f;
        for (int64_t i = 0; i < n; i++) top = fmaxf(top, x[i]);
        for (int64_t i = 0; i < n; i++) sum += expf(x[i] - top);
        ((float *)out[0])[t] = top + logf(sum);
    }
}
