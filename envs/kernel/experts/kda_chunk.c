#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
static inline __m256i first(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
/* 16 value columns of one head and token: decay, read with k and with q in one pass, then the update. */
static inline void columns(float *s, const float *decay, const float *k, const float *q, const float *v, float *y,
                           float beta, float both, int64_t keys, int64_t values, int64_t width, int whole) {
    __m256i left = first(width), right = first(width - 8);
    __m256 u0 = _mm256_maskload_ps(v, left), u1 = _mm256_maskload_ps(v + 8, right);
    __m256 o0 = _mm256_setzero_ps(), o1 = o0, rate = _mm256_set1_ps(beta), pair = _mm256_set1_ps(both);
    for (int64_t i = 0; i < keys; i++) {
        float *row = s + i * values;
        __m256 a = _mm256_set1_ps(decay[i]), ki = _mm256_set1_ps(k[i]), qi = _mm256_set1_ps(q[i]);
        __m256 c0 = _mm256_mul_ps(a, whole ? _mm256_loadu_ps(row) : _mm256_maskload_ps(row, left));
        __m256 c1 = _mm256_mul_ps(a, whole ? _mm256_loadu_ps(row + 8) : _mm256_maskload_ps(row + 8, right));
        if (whole) {
            _mm256_storeu_ps(row, c0);
            _mm256_storeu_ps(row + 8, c1);
        } else {
            _mm256_maskstore_ps(row, left, c0);
            _mm256_maskstore_ps(row + 8, right, c1);
        }
        u0 = _mm256_fnmadd_ps(c0, ki, u0);
        u1 = _mm256_fnmadd_ps(c1, ki, u1);
        o0 = _mm256_fmadd_ps(c0, qi, o0);
        o1 = _mm256_fmadd_ps(c1, qi, o1);
    }
    u0 = _mm256_mul_ps(u0, rate);
    u1 = _mm256_mul_ps(u1, rate);
    _mm256_maskstore_ps(y, left, _mm256_fmadd_ps(pair, u0, o0));
    _mm256_maskstore_ps(y + 8, right, _mm256_fmadd_ps(pair, u1, o1));
    for (int64_t i = 0; i < keys; i++) {
        float *row = s + i * values;
        __m256 ki = _mm256_set1_ps(k[i]);
        if (whole) {
            _mm256_storeu_ps(row, _mm256_fmadd_ps(ki, u0, _mm256_loadu_ps(row)));
            _mm256_storeu_ps(row + 8, _mm256_fmadd_ps(ki, u1, _mm256_loadu_ps(row + 8)));
        } else {
            _mm256_maskstore_ps(row, left, _mm256_fmadd_ps(ki, u0, _mm256_maskload_ps(row, left)));
            _mm256_maskstore_ps(row + 8, right, _mm256_fmadd_ps(ki, u1, _mm256_maskload_ps(row + 8, right)));
        }
    }
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const float *q = in[0], *k = in[1], *v = in[2], *g = in[3], *beta = in[4], *start = in[5];
    float *o = out[0], *state = out[1];
    int64_t tokens = dim[0], heads = dim[1], keys = dim[2], values = dim[3];
    float *restrict decay = scratch;
    memcpy(state, start, heads * keys * values * sizeof(float));
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t h = 0; h < heads; h++) {
            const float *kt = k + (t * heads + h) * keys, *qt = q + (t * heads + h) * keys;
            const float *restrict gt = g + (t * heads + h) * keys;
            const float *vt = v + (t * heads + h) * values;
            float *y = o + (t * heads + h) * values, *s = state + h * keys * values;
            float rate = beta[t * heads + h], both = 0.0f;
            for (int64_t i = 0; i < keys; i++) decay[i] = expf(gt[i]);
            for (int64_t i = 0; i < keys; i++) both += kt[i] * qt[i];
            int64_t j = 0;
            for (; j + 16 <= values; j += 16)
                columns(s + j, decay, kt, qt, vt + j, y + j, rate, both, keys, values, 16, 1);
            if (j < values) columns(s + j, decay, kt, qt, vt + j, y + j, rate, both, keys, values, values - j, 0);
        }
}
