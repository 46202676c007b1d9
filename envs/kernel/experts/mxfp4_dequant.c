#include <immintrin.h>
#include <stdint.h>
#include <string.h>
/* 2^(s - 127) as float: s = 0 is a subnormal, and 255 does not occur. */
static inline float power(uint8_t s) {
    uint32_t bits = s ? (uint32_t)s << 23 : 0x400000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
void kernel(const int64_t *dim, const void *const *in, void *const *out, void *scratch) {
    const uint8_t *packed = in[0], *scale = in[1];
    float *y = out[0];
    int64_t blocks = dim[0] * dim[1] / 32;
    /* Twice the values, which are whole numbers. */
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m128i low = _mm_set1_epi8(15);
    for (int64_t b = 0; b < blocks; b++) {
        __m256 factor = _mm256_set1_ps(0.5f * power(scale[b]));
        __m128i bytes = _mm_loadu_si128((const __m128i *)(packed + b * 16));
        __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(bytes, low));
        __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
        __m128i first = _mm_unpacklo_epi8(even, odd), second = _mm_unpackhi_epi8(even, odd);
        float *to = y + b * 32;
        _mm256_storeu_ps(to, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first))));
        first = _mm_srli_si128(first, 8);
        _mm256_storeu_ps(to + 8, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first))));
        _mm256_storeu_ps(to + 16, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second))));
        second = _mm_srli_si128(second, 8);
        _mm256_storeu_ps(to + 24, _mm256_mul_ps(factor, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second))));
    }
}
