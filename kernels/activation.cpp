// Gated activations; see activation.py for the contract.
#include "vec.h"

using namespace tf;

namespace {

INLINE f32x16 silu(f32x16 x) { return x / (1.0f + exp(-x)); }

INLINE f32x16 gelu_tanh(f32x16 x) {
    f32x16 inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + tanh(inner));
}

template <typename F>
INLINE void gate(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride, int32_t dtype, F act) {
    with_dtype(dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (rows * width > SERIAL_ELEMENTS / 2) schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            const T* from = (const T*)gate_up + row * row_stride;
            for (int64_t i = 0; i < width; i += LANES) {
                int64_t n = width - i;
                f32x16 result = act(load_n(from + i, n)) * load_n(from + width + i, n);
                store_n((T*)out + row * width + i, result, n);
            }
        }
    });
}

}  // namespace

// gate_up [rows, 2 width] with a row stride -> out [rows, width] contiguous.
EXPORT void tf_silu_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride, int32_t dtype) {
    gate(gate_up, out, rows, width, row_stride, dtype, [](f32x16 x) INLINE_LAMBDA { return silu(x); });
}

EXPORT void tf_gelu_tanh_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t row_stride,
                             int32_t dtype) {
    gate(gate_up, out, rows, width, row_stride, dtype, [](f32x16 x) INLINE_LAMBDA { return gelu_tanh(x); });
}
