// Rotary embedding and the write into the paged cache; see rope_kv.py for the contract.
#include "linear_layer.h"
#include "paged.h"

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

// One head of a token goes to its place in the pool: row number `at`.
template <typename Q, typename KV>
INLINE void write_key(const Pool& pool, const Q* x, int64_t at, const float* angles, int64_t rot_dim, bool interleaved) {
    rotate(x, (KV*)pool.k + at * pool.dim, angles, pool.dim, rot_dim, interleaved);
}
template <typename Q, typename KV> INLINE void write_value(const Pool& pool, const Q* x, int64_t at) {
    copy(x, (KV*)pool.v + at * pool.dim, pool.dim);
}

// The same in int8: the rotated row over its own scale.
template <typename Q> INLINE void write_key_codes(const Pool& pool, const Q* x, int64_t at, const float* angles,
                                                  int64_t rot_dim, bool interleaved) {
    static thread_local std::vector<float> wide;
    if ((int64_t)wide.size() < pool.dim) wide.resize(pool.dim);
    rotate(x, wide.data(), angles, pool.dim, rot_dim, interleaved);
    quantize_row(wide.data(), pool.dim, (int8_t*)pool.k + at * pool.dim, pool.dim, pool.k_scales + at);
}
template <typename Q> INLINE void write_value_codes(const Pool& pool, const Q* x, int64_t at) {
    quantize_row(x, pool.dim, (int8_t*)pool.v + at * pool.dim, pool.dim, pool.v_scales + at);
}

}  // namespace

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

EXPORT void tf_rope_kv(const RopeArguments* arguments) {
    const RopeArguments a = *arguments;
    const int64_t dim = a.pool.dim, kv_heads = a.pool.kv_heads;
    with_dtype(a.dtype, [&]<typename Q>(Q*) {
        with_kv_dtype(a.pool.dtype, [&]<typename KV>(KV*) {
#pragma omp parallel for if (a.tokens * (a.q_heads + kv_heads) * dim > SERIAL_ELEMENTS) schedule(static)
            for (int64_t t = 0; t < a.tokens; t++) {
                const float* angles = a.cos_sin + a.batch.positions[t] * a.rot_dim;
                const Q* from = (const Q*)a.q + t * a.q_stride;
                Q* to = (Q*)a.q_out + t * a.q_heads * dim;
                for (int64_t h = 0; h < a.q_heads; h++)
                    rotate(from + h * dim, to + h * dim, angles, dim, a.rot_dim, a.interleaved);
                const int64_t slot = a.batch.slots[t];
                if (slot < 0) continue;
                const int64_t block = slot / a.pool.block_size, offset = slot % a.pool.block_size;
                for (int64_t h = 0; h < kv_heads; h++) {
                    const int64_t at = (block * kv_heads + h) * a.pool.block_size + offset;
                    const Q *key = (const Q*)a.k + t * a.k_stride + h * dim, *value = (const Q*)a.v + t * a.v_stride + h * dim;
                    if constexpr (std::is_same_v<KV, i8>) {
                        write_key_codes(a.pool, key, at, angles, a.rot_dim, a.interleaved);
                        write_value_codes(a.pool, value, at);
                    } else {
                        write_key<Q, KV>(a.pool, key, at, angles, a.rot_dim, a.interleaved);
                        write_value<Q, KV>(a.pool, value, at);
                    }
                }
            }
        });
    });
}
