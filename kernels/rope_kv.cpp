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

#if defined(__AVX512BW__)

// quantize_row of 16 VECS numbers.
template <int VECS, typename T> INLINE void quantize_vectors(const T* x, int8_t* to, float* scale) {
    f32x16 v[VECS];
    __m512i tops = _mm512_setzero_si512();  // of magnitudes, which compare as integers do, a NaN above all
    for (int i = 0; i < VECS; i++) {
        v[i] = load(x + i * LANES);
        tops = _mm512_max_epi32(tops, (__m512i)magnitude(v[i]));
    }
    const int32_t bits = _mm512_reduce_max_epi32(tops);
    float highest;
    memcpy(&highest, &bits, 4);
    const float check = highest * 0.0f, inverse = highest > 0.0f && check == 0.0f ? 127.0f / highest : 0.0f;
    *scale = highest / 127.0f + check;
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int i = 0; i < VECS; i += 4) {
        const auto words = [&](int j) INLINE_LAMBDA {
            return _mm512_packs_epi32((__m512i)round_to_int(v[j] * inverse), (__m512i)round_to_int(v[j + 1] * inverse));
        };
        const __m512i bytes = _mm512_packs_epi16(words(i), words(i + 2));
        _mm512_storeu_si512(to + i * LANES, _mm512_permutexvar_epi32(in_order, bytes));
    }
}

#endif

// A row of the cache in int8: over its own scale.
template <typename T> INLINE void write_codes(const T* x, int64_t dim, int8_t* to, float* scale) {
#if defined(__AVX512BW__)
    if (dim == 64) return quantize_vectors<4>(x, to, scale);
    if (dim == 128) return quantize_vectors<8>(x, to, scale);
#endif
    quantize_row(x, dim, to, dim, scale);
}
template <typename Q> INLINE void write_key_codes(const Pool& pool, const Q* x, int64_t at, const float* angles,
                                                  int64_t rot_dim, bool interleaved, float* wide) {
    rotate(x, wide, angles, pool.dim, rot_dim, interleaved);
    write_codes(wide, pool.dim, (int8_t*)pool.k + at * pool.dim, pool.k_scales + at);
}
template <typename Q> INLINE void write_value_codes(const Pool& pool, const Q* x, int64_t at) {
    write_codes(x, pool.dim, (int8_t*)pool.v + at * pool.dim, pool.v_scales + at);
}

constexpr int64_t TOKENS_AHEAD = 4;  // whose places in the pool are asked for before their turn

// The rows of a slot in the pool are on their way, to be written.
template <typename KV> INLINE void ask_for(const Pool& pool, int64_t slot) {
    if (slot < 0) return;
    const int64_t first = slot / pool.block_size * pool.kv_heads * pool.block_size + slot % pool.block_size;
    for (int64_t h = 0; h < pool.kv_heads; h++) {
        const int64_t at = first + h * pool.block_size;
        for (int64_t i = 0; i < pool.dim; i += 64 / (int64_t)sizeof(KV)) {
            __builtin_prefetch((KV*)pool.k + at * pool.dim + i, 1);
            __builtin_prefetch((KV*)pool.v + at * pool.dim + i, 1);
        }
        if (pool.k_scales) __builtin_prefetch(pool.k_scales + at, 1), __builtin_prefetch(pool.v_scales + at, 1);
    }
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
#pragma omp parallel if (a.tokens * (a.q_heads + kv_heads) * dim > SERIAL_ELEMENTS)
            {
                std::vector<float> wide(std::is_same_v<KV, i8> ? dim : 0);  // a key that is rotated
#pragma omp for schedule(static)
                for (int64_t t = 0; t < a.tokens; t++) {
                    if (t + TOKENS_AHEAD < a.tokens) ask_for<KV>(a.pool, a.batch.slots[t + TOKENS_AHEAD]);
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
                            write_key_codes(a.pool, key, at, angles, a.rot_dim, a.interleaved, wide.data());
                            write_value_codes(a.pool, value, at);
                        } else {
                            write_key<Q, KV>(a.pool, key, at, angles, a.rot_dim, a.interleaved);
                            write_value<Q, KV>(a.pool, value, at);
                        }
                    }
                }
            }
        });
    });
}
