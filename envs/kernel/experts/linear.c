#include <immintrin.h>
#include <stdint.h>
static inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* turned: [depth, 16], the columns of one tile; a tile that has fewer than 16 is filled up with zeros. */
static inline void tile(const float *a, const float *turned, const float *bias, float *y, int64_t depth, int64_t n,
                        int64_t width, int rows) {
    __m256 sum[4][2];
    __m256i left = first(width), right = first(width - 8);
    for (int r = 0; r < rows; r++) {
        sum[r][0] = _mm256_maskload_ps(bias, left);
        sum[r][1] = _mm256_maskload_ps(bias + 8, right);
    }
    for (int64_t k = 0; k < depth; k++) {
        __m256 b0 = _mm256_loadu_ps(turned + k * 16), b1 = _mm256_loadu_ps(turned + k * 16 + 8);
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
    const float *a = in[0], *b = in[1], *bias = in[2];
    float *y = out[0], *turned = scratch;
    int64_t rows = dim[0], depth = dim[1], n = dim[2];
    for (int64_t j = 0; j < n; j += 16) {
        int64_t width = n - j < 16 ? n - j : 16, m = 0;
        for (int64_t k = 0; k < depth * 16; k++) turned[k] = 0.0f;
        for (int64_t i = 0; i < width; i++)
            for (int64_t k = 0; k < depth; k++) turned[k * 16 + i] = b[(j + i) * depth + k];
        for (; m + 4 <= rows; m += 4) tile(a + m * depth, turned, bias + j, y + m * n + j, depth, n, width, 4);
        for (; m < rows; m++) tile(a + m * depth, turned, bias + j, y + m * n + j, depth, n, width, 1);
    }
}
