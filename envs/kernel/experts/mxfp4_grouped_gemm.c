#include <immintrin.h>
#include <stdint.h>
#include <string.h>
static inline float power(uint8_t s) {
    uint32_t bits = s ? (uint32_t)s << 23 : 0x400000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static const float table[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, 0, -0.5f, -1, -1.5f, -2, -3, -4, -6};
/* weights: [depth, 8], decoded, eight outputs of one expert. */
static inline void tile(const float *x, const float *weights, float *y, int64_t depth, int64_t n, int64_t width,
                        int rows) {
    __m256 sum[8];
    __m256i some = first(width);
    for (int r = 0; r < rows; r++) sum[r] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m256 w = _mm256_loadu_ps(weights + k * 8);
        for (int r = 0; r < rows; r++) sum[r] = _mm256_fmadd_ps(_mm256_set1_ps(x[r * depth + k]), w, sum[r]);
    }
    for (int r = 0; r < rows; r++) _mm256_maskstore_ps(y + r * n, some, sum[r]);
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *x = in[0];
    const uint8_t *packed = in[1], *scale = in[2];
    const int32_t *offsets = in[3];
    float *y = out[0], *weights = scratch;
    int64_t experts = dim[0], depth = dim[2], n = dim[3];
    for (int64_t e = 0; e < experts; e++) {
        if (offsets[e] == offsets[e + 1]) continue;
        for (int64_t j = 0; j < n; j += 8) {
            int64_t width = n - j < 8 ? n - j : 8, m = offsets[e], last = offsets[e + 1];
            for (int64_t i = 0; i < width; i++) {
                const uint8_t *row = packed + (e * n + j + i) * (depth / 2);
                const uint8_t *factor = scale + (e * n + j + i) * (depth / 32);
                for (int64_t b = 0; b < depth / 32; b++) {
                    float s = power(factor[b]);
                    for (int64_t k = 0; k < 16; k++) {
                        weights[(b * 32 + 2 * k) * 8 + i] = table[row[b * 16 + k] & 15] * s;
                        weights[(b * 32 + 2 * k + 1) * 8 + i] = table[row[b * 16 + k] >> 4] * s;
                    }
                }
            }
            for (; m + 8 <= last; m += 8) tile(x + m * depth, weights, y + m * n + j, depth, n, width, 8);
            for (; m + 4 <= last; m += 4) tile(x + m * depth, weights, y + m * n + j, depth, n, width, 4);
            for (; m < last; m++) tile(x + m * depth, weights, y + m * n + j, depth, n, width, 1);
        }
    }
}
