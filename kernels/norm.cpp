// RMSNorm, alone and with the residual sum before it; see norm.py for the contract.
#include "linear_layer.h"

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

// Each field is 8 bytes wide, in the order in which norm.py packs them.
struct NormArguments {
    const void *x, *weight;
    void* out;
    int64_t outer, inner, width, outer_stride, inner_stride, dtype;  // x is [outer, inner, width]
    double eps, offset;
};

struct AddNormArguments {  // all contiguous [rows, width]
    const void *x, *residual, *weight;
    void *out, *total;
    int64_t rows, width, dtype;
    double eps, offset;
};

struct AddNormInt8Arguments {  // x, residual and total contiguous [rows, width]
    const void *x, *residual, *weight;
    int8_t* values;  // [rows, stride], zero beyond the width
    float* scales;   // [rows]
    void* total;
    int64_t rows, width, stride, dtype;
    double eps, offset;
};

EXPORT void tf_rms_norm(const NormArguments* arguments) {
    const NormArguments a = *arguments;
    with_dtype(a.dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (a.outer * a.inner * a.width > SERIAL_ELEMENTS) schedule(static)
        for (int64_t row = 0; row < a.outer * a.inner; row++) {
            const T* from = (const T*)a.x + row / a.inner * a.outer_stride + row % a.inner * a.inner_stride;
            norm_row(from, (const T*)a.weight, (T*)a.out + row * a.width, a.width, a.eps, a.offset);
        }
    });
}

EXPORT void tf_add_rms_norm(const AddNormArguments* arguments) {
    const AddNormArguments a = *arguments;
    with_dtype(a.dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (a.rows * a.width > SERIAL_ELEMENTS) schedule(static)
        for (int64_t row = 0; row < a.rows; row++) {
            const int64_t at = row * a.width;
            add_norm_row((const T*)a.x + at, (const T*)a.residual + at, (const T*)a.weight, (T*)a.out + at,
                         (T*)a.total + at, a.width, a.eps, a.offset);
        }
    });
}

// The norm of a row goes no further than the first cache before it is rounded to int8.
EXPORT void tf_add_rms_norm_int8(const AddNormInt8Arguments* arguments) {
    const AddNormInt8Arguments a = *arguments;
    with_dtype(a.dtype, [&]<typename T>(T*) {
#pragma omp parallel if (a.rows * a.width > SERIAL_ELEMENTS)
        {
            static thread_local std::vector<T> normed;
            if ((int64_t)normed.size() < a.width) normed.resize(a.width);
#pragma omp for schedule(static)
            for (int64_t row = 0; row < a.rows; row++) {
                const int64_t at = row * a.width;
                add_norm_row((const T*)a.x + at, (const T*)a.residual + at, (const T*)a.weight, normed.data(),
                             (T*)a.total + at, a.width, a.eps, a.offset);
                quantize_row<T>(normed.data(), a.width, a.values + row * a.stride, a.stride, a.scales + row);
            }
        }
    });
}
