// Sixteen numbers at a time on any CPU: the dtypes of activations and KV in memory, sums, and functions.
//
// Arithmetic is always fp32; bf16, fp16 and int8 exist only in memory.
#pragma once

#include "lanes.h"

#include <omp.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace tf {

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct i8 { int8_t value; };  // of KV only, over a scale that its rows bring

enum Dtype : int64_t { FP32 = 0, BF16 = 1, FP16 = 2, I8 = 3 };

INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

INLINE f32x16 load(const float* p) { return Memory<f32x16>::load(p); }
INLINE void store(float* p, f32x16 v) { Memory<f32x16>::store(p, v); }
INLINE i32x16 load(const int32_t* p) { return Memory<i32x16>::load(p); }
INLINE u32x16 load(const uint32_t* p) { return Memory<u32x16>::load(p); }

// The bits of a bf16 number: rounded to nearest even; a NaN stays one.
template <typename Bits, typename Floats> INLINE Bits bf16_bits(Floats v) {
    Bits bits = (Bits)v;
    bits += ((bits >> 16) & 1u) + 0x7fffu;
    return select(v == v, bits, Bits{} + 0x7fc00000u) >> 16;
}

#if defined(__AVX512F__)

INLINE f32x16 load(const bf16* p) {
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
INLINE f32x16 load(const f16* p) { return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE f32x16 load(const i8* p) {
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
INLINE void store(bf16* p, f32x16 v) {
#if defined(__AVX512BF16__)  // (makes 0 of what is below 2^-126)
    _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)bf16_bits<u32x16>(v)));
#endif
}
INLINE void store(f16* p, f32x16 v) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
}

#elif defined(__AVX2__) && defined(__F16C__)

INLINE __m128i eight_at(const void* p) { return _mm_loadu_si128((const __m128i*)p); }
// 16 values of 0 to 65,535 in two bytes each.
INLINE __m256i narrowed(__m256i low, __m256i high) {
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8);
}

INLINE f32x16 load(const bf16* p) {
    const auto half = [](__m128i v) INLINE_LAMBDA { return (f32x8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16); };
    return {half(eight_at(p)), half(eight_at(p + 8))};
}
INLINE f32x16 load(const f16* p) { return {(f32x8)_mm256_cvtph_ps(eight_at(p)), (f32x8)_mm256_cvtph_ps(eight_at(p + 8))}; }
INLINE f32x16 load(const i8* p) {
    const auto half = [](const i8* from) INLINE_LAMBDA {
        return (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
    };
    return {half(p), half(p + 8)};
}
INLINE void store(bf16* p, f32x16 v) {
    _mm256_storeu_si256((__m256i*)p, narrowed((__m256i)bf16_bits<u32x8>(v.low), (__m256i)bf16_bits<u32x8>(v.high)));
}
INLINE void store(f16* p, f32x16 v) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph((__m256)v.high, _MM_FROUND_TO_NEAREST_INT));
}

#else  // number by number, as the compiler makes it

typedef _Float16 half_float;
INLINE float one(bf16 x) { const uint32_t bits = (uint32_t)x.bits << 16; float v; memcpy(&v, &bits, 4); return v; }
INLINE float one(f16 x) { half_float h; memcpy(&h, &x, 2); return (float)h; }
INLINE float one(i8 x) { return x.value; }
template <typename T> INLINE f32x16 load(const T* p) {
    float all[LANES];
    for (int i = 0; i < LANES; i++) all[i] = one(p[i]);
    return load(all);
}
INLINE void store(bf16* p, f32x16 v) {
    const u32x16 bits = bf16_bits<u32x16>(v);
    uint32_t all[LANES];
    memcpy(all, &bits, 64);
    for (int i = 0; i < LANES; i++) p[i].bits = (uint16_t)all[i];
}
INLINE void store(f16* p, f32x16 v) {
    float all[LANES];
    store(all, v);
    for (int i = 0; i < LANES; i++) {
        const half_float h = (half_float)all[i];
        memcpy(p + i, &h, 2);
    }
}

#endif

// a * b + c, rounded once where the CPU can.
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    const auto half = [](f32x8 x, f32x8 y, f32x8 z) INLINE_LAMBDA { return (f32x8)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); };
    return {half(a.low, b.low, c.low), half(a.high, b.high, c.high)};
#else
    return a * b + c;
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
// The first n elements, whole vectors where n is 16 or more.
template <typename T> INLINE f32x16 load_n(const T* p, int64_t n) { return n >= LANES ? load(p) : load_part(p, n); }
template <typename T> INLINE void store_n(T* p, f32x16 v, int64_t n) {
    if (n >= LANES) store(p, v); else store_part(p, v, n);
}

INLINE bool any(i32x16 mask) {
    uint64_t parts[8], all = 0;
    memcpy(parts, &mask, 64);
    for (uint64_t part : parts) all |= part;
    return all != 0;
}

// The highest lane, leaving out NaN, but for the first one's.
INLINE float highest(f32x16 v) {
    float all[LANES];
    store(all, v);
    float top = all[0];
    for (int i = 1; i < LANES; i++) top = all[i] > top ? all[i] : top;
    return top;
}

#if defined(__AVX512F__)

INLINE float sum(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float max(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE f32x16 max(f32x16 a, f32x16 b) { return a > b ? a : b; }

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

// To the nearest integer, ties to even. (Adding and subtracting 1.5 * 2^23 would do, if the compiler
// did not fuse the addition with the product before it.)
INLINE i32x16 round_to_int(f32x16 v) { return (i32x16)_mm512_cvtps_epi32((__m512)v); }

#elif defined(__AVX2__)

// f of both parts of eight numbers.
template <typename F> INLINE __m128 join(f32x8 v, F f) {
    return f(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
}
INLINE f32x16 max(f32x16 a, f32x16 b) {  // of a NaN and a number, b
    return {(f32x8)_mm256_max_ps((__m256)a.low, (__m256)b.low), (f32x8)_mm256_max_ps((__m256)a.high, (__m256)b.high)};
}
INLINE float sum(f32x16 v) {
    const __m128 four = join(v.low + v.high, [](__m128 a, __m128 b) INLINE_LAMBDA { return _mm_add_ps(a, b); });
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float max(f32x16 v) {
    const __m256 eight = _mm256_max_ps((__m256)v.low, (__m256)v.high);
    const __m128 four = join((f32x8)eight, [](__m128 a, __m128 b) INLINE_LAMBDA { return _mm_max_ps(a, b); });
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE void sum4(const f32x16* v, float* out) {
    const auto pair = [&](int i) INLINE_LAMBDA {
        return _mm256_hadd_ps((__m256)(v[i].low + v[i].high), (__m256)(v[i + 1].low + v[i + 1].high));
    };
    const f32x8 eight = (f32x8)_mm256_hadd_ps(pair(0), pair(2));
    _mm_storeu_ps(out, join(eight, [](__m128 a, __m128 b) INLINE_LAMBDA { return _mm_add_ps(a, b); }));
}
INLINE i32x16 round_to_int(f32x16 v) {
    return {(i32x8)_mm256_cvtps_epi32((__m256)v.low), (i32x8)_mm256_cvtps_epi32((__m256)v.high)};
}

#else

INLINE f32x16 max(f32x16 a, f32x16 b) { return select(a > b, a, b); }
INLINE float sum(f32x16 v) {
    float total[LANES];
    store(total, v);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) total[i] += total[i + n];
    return total[0];
}
INLINE float max(f32x16 v) {
    float all[LANES];
    store(all, v);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) all[i] = all[i] > all[i + n] ? all[i] : all[i + n];
    return all[0];
}
INLINE void sum4(const f32x16* v, float* out) {
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
}
INLINE i32x16 round_to_int(f32x16 v) {
    float all[LANES];
    store(all, v);
    for (float& x : all) x = __builtin_rintf(x);
    return to_ints(load(all));
}

#endif

// The first n elements; lanes beyond them are `beyond`.
INLINE f32x16 load_or(const float* p, int64_t n, float beyond) {
    if (n >= LANES) return load(p);
    float all[LANES];
    for (int64_t i = 0; i < LANES; i++) all[i] = i < n ? p[i] : beyond;
    return load(all);
}

// e^x within 2 ulp; below -87.3 it is exactly 0, above 88.3 it stays at e^88.3; a NaN stays one.
INLINE f32x16 exp(f32x16 x) {
    const f32x16 top = splat(88.3f), bottom = splat(-87.3f);
    f32x16 bounded = select(x > top, top, x);
    bounded = select(bounded < bottom, bottom, bounded);
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
    i32x16 exponent = to_ints(n) + 127;
    f32x16 result = p * (f32x16)(exponent << 23);
    return select(x < bottom, f32x16{}, result);
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
    f32x16 magnitude = select(x < 0.0f, -x, x);
    f32x16 e = exp(magnitude * -2.0f);
    f32x16 t = (1.0f - e) / (1.0f + e);
    // near zero the quotient loses digits, the series does not
    f32x16 s = x * x;
    f32x16 small = x * (1.0f + s * (-0.333333333f + s * (0.133333333f + s * -0.0539682540f)));
    f32x16 large = select(x < 0.0f, -t, t);
    return select(magnitude < 0.1f, small, large);
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
