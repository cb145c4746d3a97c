// RMSNorm, alone and with the residual sum before it; see norm.py for the contract.
#include "vec.h"

using namespace tf;

namespace {

template <typename T>
INLINE void scale_row(const T* x, const T* weight, T* out, int64_t width, float scale, float offset) {
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t n = width - i;
        store_n(out + i, load_n(x + i, n) * scale * (load_n(weight + i, n) + offset), n);
    }
}

INLINE float rsqrt_mean(f32x16 squares, int64_t width, float eps) {
    return 1.0f / __builtin_sqrtf(sum(squares) / (float)width + eps);
}

template <typename T> void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps, float offset) {
    f32x16 squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 v = load_n(x + i, width - i);
        squares += v * v;
    }
    scale_row(x, weight, out, width, rsqrt_mean(squares, width, eps), offset);
}

template <typename T>
void add_norm_row(const T* x, const T* residual, const T* weight, T* out, T* total, int64_t width, float eps,
                  float offset) {
    f32x16 squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t n = width - i;
        store_n(total + i, load_n(x + i, n) + load_n(residual + i, n), n);
        f32x16 rounded = load_n(total + i, n);
        squares += rounded * rounded;
    }
    scale_row(total, weight, out, width, rsqrt_mean(squares, width, eps), offset);
}

}  // namespace

// x is [outer, inner, width] with two strides; out is contiguous.
EXPORT void tf_rms_norm(const void* x, const void* weight, void* out, int64_t outer, int64_t inner, int64_t width,
                        int64_t outer_stride, int64_t inner_stride, float eps, float offset, int32_t dtype) {
    with_dtype(dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (outer * inner * width > SERIAL_ELEMENTS) schedule(static)
        for (int64_t row = 0; row < outer * inner; row++) {
            const T* from = (const T*)x + row / inner * outer_stride + row % inner * inner_stride;
            norm_row(from, (const T*)weight, (T*)out + row * width, width, eps, offset);
        }
    });
}

// All contiguous [rows, width].
EXPORT void tf_add_rms_norm(const void* x, const void* residual, const void* weight, void* out, void* total,
                            int64_t rows, int64_t width, float eps, float offset, int32_t dtype) {
    with_dtype(dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (rows * width > SERIAL_ELEMENTS) schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            int64_t at = row * width;
            add_norm_row((const T*)x + at, (const T*)residual + at, (const T*)weight, (T*)out + at, (T*)total + at,
                         width, eps, offset);
        }
    });
}
