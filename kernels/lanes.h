// Sixteen floats or 32-bit integers as one value, whatever registers the CPU has.
//
// Where AVX-512 is missing a value is made of halves that fit a register: GCC keeps a vector that is wider than any
// register in memory, and takes its parts through it at every operation.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace tf {

constexpr int64_t LANES = 16;

// Of a native vector: itself for what follows below.
template <typename V> struct Element { typedef std::remove_cvref_t<decltype(std::declval<V>()[0])> type; };

// A vector of twice the size of H, itself a native vector or made of halves.
template <typename H> struct Halves {
    typedef typename Element<H>::type Scalar;
    H low, high;

    Halves() = default;
    INLINE Halves(H l, H h) : low(l), high(h) {}
    template <typename G> INLINE explicit Halves(const Halves<G>& v) : low((H)v.low), high((H)v.high) {}  // the same bits

    INLINE Scalar operator[](int64_t lane) const {
        Scalar all[sizeof(Halves) / sizeof(Scalar)];
        memcpy(all, this, sizeof(all));
        return all[lane];
    }
    INLINE Halves operator-() const { return {-low, -high}; }
    INLINE Halves operator~() const { return {~low, ~high}; }
};
template <typename H> struct Element<Halves<H>> { typedef typename Element<H>::type type; };

#define TF_OPERATOR(op)                                                                                              \
    template <typename H> INLINE auto operator op(const Halves<H>& a, const Halves<H>& b) {                           \
        return Halves<decltype(a.low op b.low)>(a.low op b.low, a.high op b.high);                                    \
    }                                                                                                                \
    template <typename H> INLINE auto operator op(const Halves<H>& a, typename Halves<H>::Scalar b) {                 \
        return Halves<decltype(a.low op b)>(a.low op b, a.high op b);                                                 \
    }                                                                                                                \
    template <typename H> INLINE auto operator op(typename Halves<H>::Scalar a, const Halves<H>& b) {                 \
        return Halves<decltype(a op b.low)>(a op b.low, a op b.high);                                                 \
    }
#define TF_ASSIGNMENT(op)                                                                                            \
    template <typename H> INLINE Halves<H>& operator op##=(Halves<H>& a, const Halves<H>& b) { return a = a op b; }   \
    template <typename H> INLINE Halves<H>& operator op##=(Halves<H>& a, typename Halves<H>::Scalar b) { return a = a op b; }
#define TF_BOTH(op) TF_OPERATOR(op) TF_ASSIGNMENT(op)
TF_BOTH(+) TF_BOTH(-) TF_BOTH(*) TF_BOTH(/) TF_BOTH(&) TF_BOTH(|) TF_BOTH(^)
TF_OPERATOR(<<) TF_OPERATOR(>>)
TF_OPERATOR(<) TF_OPERATOR(>) TF_OPERATOR(<=) TF_OPERATOR(>=) TF_OPERATOR(==) TF_OPERATOR(!=)
#undef TF_BOTH
#undef TF_ASSIGNMENT
#undef TF_OPERATOR

#if defined(__AVX512F__)
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
#else
#if defined(__AVX2__)
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
#else
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef Halves<f32x4> f32x8;
typedef Halves<i32x4> i32x8;
typedef Halves<u32x4> u32x8;
#endif
typedef Halves<f32x8> f32x16;
typedef Halves<i32x8> i32x16;
typedef Halves<u32x8> u32x16;
#endif

// From and to memory, register by register.
template <typename V> struct Memory {
    static INLINE V load(const void* p) { V v; memcpy(&v, p, sizeof(V)); return v; }
    static INLINE void store(void* p, V v) { memcpy(p, &v, sizeof(V)); }
};
template <typename H> struct Memory<Halves<H>> {
    static INLINE Halves<H> load(const void* p) { return {Memory<H>::load(p), Memory<H>::load((const char*)p + sizeof(H))}; }
    static INLINE void store(void* p, const Halves<H>& v) {
        Memory<H>::store(p, v.low);
        Memory<H>::store((char*)p + sizeof(H), v.high);
    }
};

// mask ? a : b, lane by lane; a mask is what a comparison gives.
template <typename M, typename V> INLINE V select(M mask, V a, V b) { return mask ? a : b; }
template <typename M, typename H> INLINE Halves<H> select(const Halves<M>& mask, const Halves<H>& a, const Halves<H>& b) {
    return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
}

// To, lane by lane, of a native vector or of halves of it.
template <typename To, typename V> INLINE To convert(const V& v) { return __builtin_convertvector(v, To); }
template <typename To, typename H> INLINE To convert(const Halves<H>& v) {
    typedef decltype(To::low) Half;
    return {convert<Half>(v.low), convert<Half>(v.high)};
}
INLINE f32x16 to_floats(i32x16 v) { return convert<f32x16>(v); }
INLINE i32x16 to_ints(f32x16 v) { return convert<i32x16>(v); }  // towards zero

#if defined(__AVX512F__)
INLINE f32x16 splat(float x) { return (f32x16)_mm512_set1_ps(x); }
#elif defined(__AVX2__)
INLINE f32x16 splat(float x) { return {(f32x8)_mm256_set1_ps(x), (f32x8)_mm256_set1_ps(x)}; }
#else
INLINE f32x16 splat(float x) {
    const float all[LANES] = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
    f32x16 v;
    memcpy(&v, all, sizeof(v));
    return v;
}
#endif

}  // namespace tf
