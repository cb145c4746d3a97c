// Rotary embedding and the write into the paged cache; see rope_kv.py for the contract.
#include "vec.h"

using namespace tf;

namespace {

template <typename T> INLINE float load_one(const T* p) { return load_part(p, 1)[0]; }
template <> INLINE float load_one(const float* p) { return *p; }
template <typename T> INLINE void store_one(T* p, float x) { store_part(p, splat(x), 1); }
template <> INLINE void store_one(float* p, float x) { *p = x; }

template <typename From, typename To>
void rotate_halves(const From* x, To* out, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t n = half - i;
        f32x16 a = load_n(x + i, n), b = load_n(x + half + i, n), c = load_n(cos + i, n), s = load_n(sin + i, n);
        store_n(out + i, a * c - b * s, n);
        store_n(out + half + i, b * c + a * s, n);
    }
}

template <typename From, typename To>
void rotate_pairs(const From* x, To* out, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = load_one(x + 2 * i), b = load_one(x + 2 * i + 1);
        store_one(out + 2 * i, a * cos[i] - b * sin[i]);
        store_one(out + 2 * i + 1, b * cos[i] + a * sin[i]);
    }
}

template <typename From, typename To> INLINE void copy(const From* x, To* out, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_n(out + i, load_n(x + i, count - i), count - i);
}

template <typename From, typename To>
INLINE void rotate(const From* x, To* out, const float* angles, int64_t dim, int64_t rot_dim, bool interleaved) {
    int64_t half = rot_dim / 2;
    if (interleaved) rotate_pairs(x, out, angles, angles + half, half);
    else rotate_halves(x, out, angles, angles + half, half);
    copy(x + rot_dim, out + rot_dim, dim - rot_dim);
}

}  // namespace

// q, k, v: heads of dim elements each, contiguous within a token; *_stride between tokens.
EXPORT void tf_rope_kv(const void* q, const void* k, const void* v, int64_t q_stride, int64_t k_stride, int64_t v_stride,
                       const float* cos_sin, int64_t rot_dim, void* q_out, void* k_pool, void* v_pool,
                       const int64_t* slots, const int64_t* positions, int64_t tokens, int64_t q_heads, int64_t kv_heads,
                       int64_t dim, int64_t block_size, int32_t interleaved, int32_t dtype, int32_t kv_dtype) {
    with_dtype(dtype, [&]<typename Q>(Q*) {
        with_dtype(kv_dtype, [&]<typename KV>(KV*) {
#pragma omp parallel for if (tokens * (q_heads + kv_heads) * dim > SERIAL_ELEMENTS) schedule(static)
            for (int64_t t = 0; t < tokens; t++) {
                const float* angles = cos_sin + positions[t] * rot_dim;
                const Q* from = (const Q*)q + t * q_stride;
                Q* to = (Q*)q_out + t * q_heads * dim;
                for (int64_t h = 0; h < q_heads; h++)
                    rotate(from + h * dim, to + h * dim, angles, dim, rot_dim, interleaved);
                if (slots[t] < 0) continue;
                int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
                for (int64_t h = 0; h < kv_heads; h++) {
                    int64_t at = ((block * kv_heads + h) * block_size + offset) * dim;
                    rotate((const Q*)k + t * k_stride + h * dim, (KV*)k_pool + at, angles, dim, rot_dim, interleaved);
                    copy((const Q*)v + t * v_stride + h * dim, (KV*)v_pool + at, dim);
                }
            }
        });
    });
}
