// Inputs of a product with int8 weights, held in two bytes each: scale x (high + low / 256), to within 2^-16 of the
// largest of their row. Next to nothing is lost beside the rounding of the weights.
#pragma once

#include "linear_layer.h"

namespace tf {

constexpr int64_t TALL = 16;  // rows whose high bytes lie together, and then their low ones

struct TwoBytes {
    int8_t* values;  // [rows / 16][32][stride], zero beyond the layer's width
    float* scales;   // [rows]: of 256 x high + low
    int64_t stride;

    INLINE int8_t* high(int64_t row) const { return values + (row / TALL * 2 * TALL + row % TALL) * stride; }
    INLINE int8_t* low(int64_t row) const { return high(row) + TALL * stride; }
};

// One buffer, owned by the calling thread, which all threads of its team read and write.
inline TwoBytes two_bytes_memory(const Layer& layer) {
    static thread_local std::vector<int8_t> memory;
    const int64_t stride = layer.depth_blocks * DEPTH_BYTES, rows = round_up(layer.rows, TALL);
    if ((int64_t)memory.size() < rows * (2 * stride + 4) + 64) memory.resize(rows * (2 * stride + 4) + 64);
    int8_t* values = (int8_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    return {values, (float*)(values + 2 * rows * stride), stride};
}

// A NaN or infinity makes the scale NaN.
template <typename T> void split_row(const T* x, int64_t width, int8_t* high, int8_t* low, int64_t stride, float* scale) {
    f32x16 top = {}, check = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const f32x16 v = load_n(x + i, width - i);
        top = max(top, magnitude(v));
        check += v * 0.0f;
    }
    const float highest = max(top), inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    *scale = highest / (127.0f * 256.0f) + sum(check);
    for (int64_t i = 0; i < stride; i += LANES) {
        const f32x16 v = i < width ? load_n(x + i, width - i) * inverse : f32x16{};
        const i32x16 whole = round_to_int(v), left = round_to_int((v - to_floats(whole)) * 256.0f);
        store_bytes(high + i, whole, LANES);
        store_bytes(low + i, select(left > 127, i32x16{} + 127, left), LANES);
    }
}

// All rows of the layer, shared by the threads of a team, who wait for each other at the end.
template <typename T> INLINE void split_rows(const Layer& layer, const TwoBytes& to) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < layer.rows; row++)
        split_row((const T*)layer.x + row * layer.x_stride, layer.in, to.high(row), to.low(row), to.stride, to.scales + row);
}

// One row of up to 16 columns -> out.
template <typename T>
INLINE void finish_two_bytes(const Layer& layer, i32x16 high, i32x16 low, float row_scale, int64_t row, int64_t column) {
    const Scales columns = scales_of<T>(layer, column);
    const f32x16 both = to_floats(high) * 256.0f + to_floats(low);
    store_n((T*)layer.out + row * layer.columns + column, both * (columns.scale * row_scale) + columns.bias,
            layer.columns - column);
}

}  // namespace tf
