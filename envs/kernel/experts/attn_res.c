#include <math.h>
#include <stdint.h>
#include <string.h>
static inline float wide(uint16_t bits) {
    union { uint32_t i; float f; } u = {(uint32_t)bits << 16};
    return u.f;
}
static inline uint16_t narrow(float value) {
    union { float f; uint32_t i; } u = {value};
    return (u.i + ((u.i >> 16 & 1) + 0x7fff)) >> 16;
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const uint16_t *v = in[0];
    const float *restrict w = in[1];
    int64_t sources = dim[0], tokens = dim[1], n = dim[2];
    float *restrict mix = scratch, *restrict score = mix + n;
    for (int64_t t = 0; t < tokens; t++) {
        float top = -INFINITY, total = 0.0f;
        for (int64_t s = 0; s < sources; s++) {
            const uint16_t *restrict x = v + (s * tokens + t) * n;
            float square = 0.0f, dot = 0.0f;
            for (int64_t i = 0; i < n; i++) {
                float value = wide(x[i]);
                square += value * value;
                dot += value * w[i];
            }
            score[s] = dot / sqrtf(square / n + 1e-5f);
            top = fmaxf(top, score[s]);
        }
        for (int64_t s = 0; s < sources; s++) {
            score[s] = expf(score[s] - top);
            total += score[s];
        }
        for (int64_t i = 0; i < n; i++) mix[i] = 0.0f;
        for (int64_t s = 0; s < sources; s++) {
            const uint16_t *restrict x = v + (s * tokens + t) * n;
            float p = score[s] / total;
            for (int64_t i = 0; i < n; i++) mix[i] += p * wide(x[i]);
        }
        uint16_t *restrict y = (uint16_t *)out[0] + t * n;
        for (int64_t i = 0; i < n; i++) y[i] = narrow(mix[i]);
    }
}
