// Gated activations; see activation.py for the contract.
#include "gates.h"

using namespace tf;

namespace {

// Each field is 8 bytes wide, in the order in which activation.py packs them.
struct GateArguments {
    const void* gate_up;  // [rows, 2 width] with a row stride
    void* out;            // [rows, width], contiguous
    int64_t rows, width, row_stride, dtype;
};

template <typename F> INLINE void gate(const GateArguments a, F act) {
    with_dtype(a.dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (a.rows * a.width > SERIAL_ELEMENTS / 2) schedule(static)
        for (int64_t row = 0; row < a.rows; row++) {
            const T* from = (const T*)a.gate_up + row * a.row_stride;
            for (int64_t i = 0; i < a.width; i += LANES) {
                int64_t n = a.width - i;
                f32x16 result = act(load_n(from + i, n)) * load_n(from + a.width + i, n);
                store_n((T*)a.out + row * a.width + i, result, n);
            }
        }
    });
}

}  // namespace

EXPORT void tf_silu_mul(const GateArguments* a) {
    gate(*a, [](f32x16 x) INLINE_LAMBDA { return silu(x); });
}

EXPORT void tf_gelu_tanh_mul(const GateArguments* a) {
    gate(*a, [](f32x16 x) INLINE_LAMBDA { return gelu_tanh(x); });
}
