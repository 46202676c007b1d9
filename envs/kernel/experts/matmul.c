#include <immintrin.h>
#include <stdint.h>
static inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline void tile(const float *a, const float *b, float *y, int64_t depth, int64_t n, int64_t width, int rows) {
    __m256 sum[4][2];
    __m256i left = first(width), right = first(width - 8);
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm256_setzero_ps();
    for (int64_t k = 0; k < depth; k++) {
        __m256 b0 = width >= 16 ? _mm256_loadu_ps(b + k * n) : _mm256_maskload_ps(b + k * n, left);
        __m256 b1 = width >= 16 ? _mm256_loadu_ps(b + k * n + 8) : _mm256_maskload_ps(b + k * n + 8, right);
        for (int r = 0; r < rows; r++) {
            __m256 v = _mm256_set1_ps(a[r * depth + k]);
            sum[r][0] = _mm256_fmadd_ps(v, b0, sum[r][0]);
            sum[r][1] = _mm256_fmadd_ps(v, b1, sum[r][1]);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm256_maskstore_ps(y + r * n, left, sum[r][0]);
        _mm256_maskstore_ps(y + r * n + 8, right, sum[r][1]);
    }
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *a = in[0], *b = in[1];
    float *y = out[0];
    int64_t rows = dim[0], depth = dim[1], n = dim[2], m = 0;
    for (; m + 4 <= rows; m += 4) {
        int64_t j = 0;
        for (; j + 16 <= n; j += 16) tile(a + m * depth, b + j, y + m * n + j, depth, n, 16, 4);
        if (j < n) tile(a + m * depth, b + j, y + m * n + j, depth, n, n - j, 4);
    }
    for (; m < rows; m++)
        for (int64_t j = 0; j < n; j += 16) tile(a + m * depth, b + j, y + m * n + j, depth, n, n - j < 16 ? n - j : 16, 1);
}
