// Sixteen floats at a time on any CPU, and the dtypes of activations and KV.
//
// Arithmetic is always fp32; bf16, fp16 and int8 exist only in memory. Built on the vector extensions of
// GCC and Clang, which become AVX-512, AVX2 or NEON by -march=native.
#pragma once

#include <cstdint>
#include <cstring>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace tf {

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int64_t LANES = 16;

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct i8 { int8_t value; };  // of KV only, over a scale that its rows bring

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, I8 = 3 };

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }
INLINE f32x16 splat(float x) { return f32x16{} + x; }

INLINE f32x16 load(const float* p) { f32x16 v; memcpy(&v, p, 64); return v; }
INLINE void store(float* p, f32x16 v) { memcpy(p, &v, 64); }

INLINE f32x16 load(const bf16* p) {
#if defined(__AVX512F__)  // GCC splits the conversion below in two and glues the halves together
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#else
    u16x16 half;
    memcpy(&half, p, 32);
    return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
#endif
}

// Round to nearest even; a NaN stays one. (The instruction of AVX-512 BF16 makes 0 of what is below 2^-126.)
INLINE void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    u32x16 bits = (u32x16)v;
    bits += 0x7fffu + ((bits >> 16) & 1u);
    bits = (v == v) ? bits : u32x16{} + 0x7fc00000u;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)(bits >> 16)));
#else
    u16x16 half = __builtin_convertvector(bits >> 16, u16x16);
    memcpy(p, &half, 32);
#endif
#endif
}

#if defined(__AVX512F__)
INLINE f32x16 load(const f16* p) { return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE void store(f16* p, f32x16 v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__)
INLINE f32x16 load(const f16* p) {
    __m256 parts[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
                       _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
    f32x16 v;
    memcpy(&v, parts, 64);
    return v;
}
INLINE void store(f16* p, f32x16 v) {
    __m256 parts[2];
    memcpy(parts, &v, 64);
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(parts[0], _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(parts[1], _MM_FROUND_TO_NEAREST_INT));
}
#else
typedef _Float16 half16 __attribute__((vector_size(32)));
INLINE f32x16 load(const f16* p) { half16 h; memcpy(&h, p, 32); return __builtin_convertvector(h, f32x16); }
INLINE void store(f16* p, f32x16 v) { half16 h = __builtin_convertvector(v, half16); memcpy(p, &h, 32); }
#endif

INLINE f32x16 load(const i8* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
    typedef int8_t i8x16 __attribute__((vector_size(16)));
    i8x16 bytes;
    memcpy(&bytes, p, 16);
    return __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16);
#endif
}

// The first n < 16 elements; lanes beyond them are zero and their memory is not touched.
template <typename T> INLINE f32x16 load_part(const T* p, int64_t n) {
    T buffer[LANES] = {};
    memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
}
template <typename T> INLINE void store_part(T* p, f32x16 v, int64_t n) {
    T buffer[LANES];
    store(buffer, v);
    memcpy(p, buffer, n * sizeof(T));
}
// body(offset, count) over n elements in vectors; count < 16 only for the last one.
template <typename T> INLINE f32x16 load_n(const T* p, int64_t n) { return n >= LANES ? load(p) : load_part(p, n); }
template <typename T> INLINE void store_n(T* p, f32x16 v, int64_t n) {
    if (n >= LANES) store(p, v); else store_part(p, v, n);
}

#if defined(__AVX512F__)
INLINE float sum(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float max(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
#else
INLINE float sum(f32x16 v) {
    float total[8];
    for (int i = 0; i < 8; i++) total[i] = v[i] + v[i + 8];
    for (int i = 0; i < 4; i++) total[i] += total[i + 4];
    return (total[0] + total[2]) + (total[1] + total[3]);
}
INLINE float max(f32x16 v) {
    float top = v[0];
    for (int i = 1; i < 16; i++) top = v[i] > top ? v[i] : top;
    return top;
}
#endif
// out[i] = sum(v[i]) for four vectors at the price of little more than one.
INLINE void sum4(const f32x16* v, float* out) {
    const i32x16 low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const i32x16 high = low + 2;
    f32x16 a = __builtin_shuffle(v[0], v[1], low) + __builtin_shuffle(v[0], v[1], high);
    f32x16 b = __builtin_shuffle(v[2], v[3], low) + __builtin_shuffle(v[2], v[3], high);
    const i32x16 first = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i32x16 second = first + 2;
    f32x16 four = __builtin_shuffle(a, b, first) + __builtin_shuffle(a, b, second);
    typedef float f32x4 __attribute__((vector_size(16)));
    f32x4 part[4];
    memcpy(part, &four, 64);
    part[0] = (part[0] + part[1]) + (part[2] + part[3]);
    memcpy(out, part, 16);
}
INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

// To the nearest integer, ties to even. (Adding and subtracting 1.5 * 2^23 would do, if the compiler
// did not fuse the addition with the product before it.)
INLINE i32x16 round_to_int(f32x16 v) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtps_epi32((__m512)v);
#else
    f32x16 rounded;
    for (int i = 0; i < 16; i++) rounded[i] = __builtin_rintf(v[i]);
    return __builtin_convertvector(rounded, i32x16);
#endif
}

// e^x within 2 ulp; below -87.3 it is exactly 0, above 88.3 it stays at e^88.3; a NaN stays one.
INLINE f32x16 exp(f32x16 x) {
    const f32x16 top = splat(88.3f), bottom = splat(-87.3f);
    f32x16 bounded = x > top ? top : x;
    bounded = bounded < bottom ? bottom : bounded;
    const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
    f32x16 n = (bounded * 1.44269504088896341f + magic) - magic;
    f32x16 r = bounded - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i32x16 exponent = __builtin_convertvector(n, i32x16) + 127;
    f32x16 result = p * (f32x16)(exponent << 23);
    return x < bottom ? f32x16{} : result;
}

// Of one vector as of Four: f of each.
template <typename F> INLINE f32x16 each(f32x16 x, F f) { return f(x); }
template <typename F> INLINE f32x16 each(f32x16 x, f32x16 y, F f) { return f(x, y); }

#if defined(__AVX512DQ__)

// 2^x within 3e-6 of it, for x that is not below -126. V: f32x16 or Four.
template <typename V> INLINE V power_of_two_above(V x) {
    const V r = each(x, [](f32x16 v) INLINE_LAMBDA {  // x - floor(x)
        return (f32x16)_mm512_reduce_ps((__m512)v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    });
    V p = r * 1.3534094093e-2f + 5.2011608187e-2f;
    p = p * r + 2.4144266077e-1f;
    p = p * r + 6.9300385761e-1f;
    p = p * r + 1.0000025917f;
    return each(p, x, [](f32x16 v, f32x16 power) INLINE_LAMBDA { return (f32x16)_mm512_scalef_ps((__m512)v, (__m512)power); });
}

#endif

// tanh through e^(-2|x|): no overflow, the sign put back at the end.
INLINE f32x16 tanh(f32x16 x) {
    f32x16 magnitude = x < 0.0f ? -x : x;
    f32x16 e = exp(magnitude * -2.0f);
    f32x16 t = (1.0f - e) / (1.0f + e);
    // near zero the quotient loses digits, the series does not
    f32x16 s = x * x;
    f32x16 small = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * -0.0539682540f)));
    f32x16 large = x < 0.0f ? -t : t;
    return magnitude < 0.1f ? small : large;
}

// Calls f with a null pointer of the dtype's type: f(T*).
template <typename F> INLINE void with_dtype(int64_t dtype, F f) {
    if (dtype == FP32) f((float*)nullptr);
    else if (dtype == BF16) f((bf16*)nullptr);
    else f((f16*)nullptr);
}

// The same for the dtypes of KV.
template <typename F> INLINE void with_kv_dtype(int64_t dtype, F f) {
    if (dtype == I8) f((i8*)nullptr);
    else with_dtype(dtype, f);
}

// Below this many elements a second thread costs more than it brings.
constexpr int64_t SERIAL_ELEMENTS = 65536;

}  // namespace tf
