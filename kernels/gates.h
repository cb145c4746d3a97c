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

INLINE f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

// Calls f with the gate's function.
template <typename F> INLINE void with_gate(int64_t gate, F f) {
    if (gate == SILU) f([](f32x16 x) INLINE_LAMBDA { return silu(x); });
    else f([](f32x16 x) INLINE_LAMBDA { return gelu_tanh(x); });
}

}  // namespace tf
