// The activations of gated layers; see activation.py for their formulas.
#pragma once

#include "vec.h"

namespace tf {

enum Gate : int64_t { SILU = 0, GELU_TANH = 1 };

// 1 / d for d >= 1, within 2 ulp.
INLINE f32x16 reciprocal(f32x16 d) {
#if defined(__AVX512F__)
    const f32x16 near = (f32x16)_mm512_rcp14_ps((__m512)d);
    return near * (2.0f - d * near);
#else
    return 1.0f / d;
#endif
}

INLINE f32x16 silu(f32x16 x) { return x * reciprocal(1.0f + exp(-x)); }

// The same within 3e-6 of it, where 16 bits are kept of the result.
INLINE f32x16 silu_in_16_bits(f32x16 x) {
#if defined(__AVX512DQ__)
    // e^-x as a power of two; of a NaN the product makes a NaN again
    const f32x16 power = (f32x16)_mm512_min_ps((__m512)(x * -1.44269504088896341f), _mm512_set1_ps(126.0f));
    return x * reciprocal(1.0f + power_of_two_above(power));
#else
    return silu(x);
#endif
}

INLINE f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

// Calls f with the gate's function, for results of type T.
template <typename T, typename F> INLINE void with_gate(int64_t gate, F f) {
    if (gate == SILU && sizeof(T) == 2) f([](f32x16 x) INLINE_LAMBDA { return silu_in_16_bits(x); });
    else if (gate == SILU) f([](f32x16 x) INLINE_LAMBDA { return silu(x); });
    else f([](f32x16 x) INLINE_LAMBDA { return gelu_tanh(x); });
}

}  // namespace tf
