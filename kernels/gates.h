// The activations of gated layers; see activation.py for their formulas.
#pragma once

#include "four.h"

namespace tf {

enum Gate : int64_t { SILU = 0, GELU_TANH = 1 };

// 1 / d for d >= 1, within 2 ulp.
template <typename V> INLINE V reciprocal(V d) {
#if defined(__AVX512F__)
    const V near = each(d, [](f32x16 v) INLINE_LAMBDA { return (f32x16)_mm512_rcp14_ps((__m512)v); });
    return near * (2.0f - d * near);
#else
    return each(d, [](f32x16 v) INLINE_LAMBDA { return 1.0f / v; });
#endif
}

INLINE f32x16 silu(f32x16 x) { return x * reciprocal(1.0f + exp(-x)); }

// The same within 3e-6 of it, where 16 bits are kept of the result.
template <typename V> INLINE V silu_in_16_bits(V x) {
#if defined(__AVX512DQ__)
    // e^-x as a power of two; of a NaN the product makes a NaN again
    const V power = each(x * -1.44269504088896341f, [](f32x16 v) INLINE_LAMBDA {
        return (f32x16)_mm512_min_ps((__m512)v, _mm512_set1_ps(126.0f));
    });
    return x * reciprocal(1.0f + power_of_two_above(power));
#else
    return each(x, [](f32x16 v) INLINE_LAMBDA { return silu(v); });
#endif
}

INLINE f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

// Calls f with the gate's function of f32x16 or Four, for results of type T.
template <typename T, typename F> INLINE void with_gate(int64_t gate, F f) {
    if (gate == SILU && sizeof(T) == 2) f([](auto x) INLINE_LAMBDA { return silu_in_16_bits(x); });
    else if (gate == SILU) f([](auto x) INLINE_LAMBDA { return each(x, [](f32x16 v) INLINE_LAMBDA { return silu(v); }); });
    else f([](auto x) INLINE_LAMBDA { return each(x, [](f32x16 v) INLINE_LAMBDA { return gelu_tanh(v); }); });
}

}  // namespace tf
