// Arguments of the kernels whose rows do not depend on each other, and what is left of a call for some of its rows.
//
// keep_rows(a, first, count) leaves the rows [first, first + count): each of them becomes what it would have become.
#pragma once

#include "paged.h"

namespace tf {

INLINE int64_t bytes_of(int64_t dtype) { return dtype == FP32 ? 4 : 2; }

template <typename T> INLINE void move(T*& p, int64_t bytes) {
    if (p) p = (T*)((uintptr_t)p + bytes);
}

// Each field is 8 bytes wide, in the order in which linear.py packs them.
struct LinearArguments {
    const uint8_t* weight;
    const float* scale;
    const int32_t* offset;
    const void* bias;
    int64_t in, columns;
    const void* x;
    void* out;
    int64_t x_stride, rows, dtype, path;
    const float* x_scales;  // of int8 x, zero from `in` to a multiple of 64; null where x is of dtype
};

INLINE int64_t rows_of(const LinearArguments& a) { return a.rows; }
INLINE void keep_rows(LinearArguments& a, int64_t first, int64_t count, int64_t columns) {
    move(a.x, first * a.x_stride * (a.x_scales ? 1 : bytes_of(a.dtype)));
    move(a.out, first * columns * bytes_of(a.dtype));
    move(a.x_scales, first * (int64_t)sizeof(float));
    a.rows = count;
}
INLINE void keep_rows(LinearArguments& a, int64_t first, int64_t count) { keep_rows(a, first, count, a.columns); }

// Each field is 8 bytes wide, in the order in which gated.py packs them.
struct GatedArguments {
    LinearArguments linear;  // `out` [rows, columns / 2]
    int64_t gate;
};

INLINE int64_t rows_of(const GatedArguments& a) { return a.linear.rows; }
INLINE void keep_rows(GatedArguments& a, int64_t first, int64_t count) {
    keep_rows(a.linear, first, count, a.linear.columns / 2);
}

// Each field is 8 bytes wide, in the order in which gated_mlp.py packs them.
struct GatedMlpArguments {
    LinearArguments gate_up, down;  // without an `out` and an `x`: what lies between them is the kernel's own
    int64_t gate;
};

INLINE int64_t rows_of(const GatedMlpArguments& a) { return a.gate_up.rows; }
INLINE void keep_rows(GatedMlpArguments& a, int64_t first, int64_t count) {
    keep_rows(a.gate_up, first, count);
    keep_rows(a.down, first, count);
}

// Each field is 8 bytes wide, in the order in which norm.py packs them.
struct NormArguments {
    const void *x, *weight;
    void* out;
    int64_t outer, inner, width, outer_stride, inner_stride, dtype;  // x is [outer, inner, width]
    double eps, offset;
};

INLINE int64_t rows_of(const NormArguments& a) { return a.outer; }
INLINE void keep_rows(NormArguments& a, int64_t first, int64_t count) {
    move(a.x, first * a.outer_stride * bytes_of(a.dtype));
    move(a.out, first * a.inner * a.width * bytes_of(a.dtype));
    a.outer = count;
}

struct AddNormArguments {  // all contiguous [rows, width]
    const void *x, *residual, *weight;
    void *out, *total;
    int64_t rows, width, dtype;
    double eps, offset;
};

INLINE int64_t rows_of(const AddNormArguments& a) { return a.rows; }
INLINE void keep_rows(AddNormArguments& a, int64_t first, int64_t count) {
    const int64_t bytes = first * a.width * bytes_of(a.dtype);
    move(a.x, bytes), move(a.residual, bytes), move(a.out, bytes), move(a.total, bytes);
    a.rows = count;
}

struct AddNormInt8Arguments {  // x, residual and total contiguous [rows, width]
    const void *x, *residual, *weight;
    int8_t* values;  // [rows, stride], zero beyond the width
    float* scales;   // [rows]
    void* total;
    int64_t rows, width, stride, dtype;
    double eps, offset;
};

INLINE int64_t rows_of(const AddNormInt8Arguments& a) { return a.rows; }
INLINE void keep_rows(AddNormInt8Arguments& a, int64_t first, int64_t count) {
    const int64_t bytes = first * a.width * bytes_of(a.dtype);
    move(a.x, bytes), move(a.residual, bytes), move(a.total, bytes);
    move(a.values, first * a.stride), move(a.scales, first * (int64_t)sizeof(float));
    a.rows = count;
}

// Each field is 8 bytes wide, in the order in which rope_kv.py packs them.
struct RopeArguments {
    Pool pool;
    Batch batch;
    const void *q, *k, *v;  // [tokens, heads, dim], a token's heads contiguous
    int64_t q_stride, k_stride, v_stride;
    const float* cos_sin;  // [positions, rot_dim]
    void* q_out;           // [tokens, q_heads, dim], contiguous
    int64_t rot_dim, tokens, q_heads, interleaved, dtype;
};

INLINE int64_t rows_of(const RopeArguments& a) { return a.tokens; }
INLINE void keep_rows(RopeArguments& a, int64_t first, int64_t count) {
    const int64_t bytes = first * bytes_of(a.dtype), index = first * (int64_t)sizeof(int64_t);
    move(a.batch.slots, index), move(a.batch.positions, index);
    move(a.q, bytes * a.q_stride), move(a.k, bytes * a.k_stride), move(a.v, bytes * a.v_stride);
    move(a.q_out, bytes * a.q_heads * a.pool.dim);
    a.tokens = count;
}

}  // namespace tf
