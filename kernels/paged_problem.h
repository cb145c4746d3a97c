// What all parts of paged attention share: the problem, its work items, scratch memory, softmax rows.
#pragma once

#include "paged.h"

#include <vector>

namespace tf {

constexpr int64_t SPLIT = 128;     // tokens of one decode item
constexpr int64_t TALL_SPLIT = 512; // the same of int8 KV on tiles
constexpr int64_t TILE = 64;       // tokens of one step of a chunk item
constexpr int64_t ROWS = 96;       // query rows (tokens x heads of the group) of a chunk item
constexpr int64_t TALL_ROWS = 384; // the same on tiles, where a sequence has many
constexpr float NOTHING = -__builtin_inff();

// Each field is 8 bytes wide, in the order in which paged_attention.py packs them.
struct AttentionArguments {
    Pool pool;
    Batch batch;
    const void* q;       // [tokens, q_heads, dim]
    void* out;           // the same, contiguous
    const float* sinks;  // [q_heads] or null
    int64_t q_stride_token, q_stride_head, q_heads, window, dtype;  // window 0: none
    double scale, softcap;                                          // softcap 0: none
};

struct Problem {
    const void *q, *k, *v;
    void* out;
    const int32_t *query_starts, *kv_lens, *block_tables;
    const float *sinks, *k_scales, *v_scales;  // scales: of int8 KV
    int64_t q_stride_token, q_stride_head, table_stride, sequences, q_heads, kv_heads, dim, block_size, window;
    int64_t dtype, kv_dtype;
    float scale, softcap;

    explicit Problem(const AttentionArguments& a)
        : q(a.q), k(a.pool.k), v(a.pool.v), out(a.out), query_starts(a.batch.query_starts), kv_lens(a.batch.kv_lens),
          block_tables(a.batch.block_tables), sinks(a.sinks), k_scales(a.pool.k_scales), v_scales(a.pool.v_scales), q_stride_token(a.q_stride_token),
          q_stride_head(a.q_stride_head), table_stride(a.batch.table_stride), sequences(a.batch.sequences),
          q_heads(a.q_heads), kv_heads(a.pool.kv_heads), dim(a.pool.dim), block_size(a.pool.block_size),
          window(a.window), dtype(a.dtype), kv_dtype(a.pool.dtype), scale(a.scale), softcap(a.softcap) {}

    int64_t group() const { return q_heads / kv_heads; }
    int64_t query_len(int64_t s) const { return query_starts[s + 1] - query_starts[s]; }
    // rows[j] = element offset of the K (and V) row of token begin + j; one division a block.
    INLINE void find_rows(int64_t s, int64_t head, int64_t begin, int64_t end, int64_t* rows) const {
        const int32_t* table = block_tables + s * table_stride;
        int64_t index = begin / block_size, offset = begin % block_size;
        for (int64_t left = end - begin; left > 0; index++, offset = 0) {
            int64_t first = ((table[index] * kv_heads + head) * block_size + offset) * dim;
            int64_t count = block_size - offset < left ? block_size - offset : left;
            for (int64_t j = 0; j < count; j++) *rows++ = first + j * dim;
            left -= count;
        }
    }
    // to[j] = scale of the K (or V) row of token begin + j, `from` being k_scales or v_scales; the same walk.
    INLINE void find_scales(const float* from, int64_t s, int64_t head, int64_t begin, int64_t end, float* to) const {
        const int32_t* table = block_tables + s * table_stride;
        int64_t index = begin / block_size, offset = begin % block_size;
        for (int64_t left = end - begin; left > 0; index++, offset = 0) {
            int64_t count = block_size - offset < left ? block_size - offset : left;
            memcpy(to, from + (table[index] * kv_heads + head) * block_size + offset, count * sizeof(float));
            to += count;
            left -= count;
        }
    }
    // The first token that a query at this position sees.
    INLINE int64_t first_visible(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
    // The first one that any query of the sequence sees, down to a whole tile.
    INLINE int64_t first_tile(int64_t s) const { return first_visible(kv_lens[s] - query_len(s)) / TILE * TILE; }
};

struct Item {
    int32_t sequence, head;
    int64_t begin, end;  // decode: tokens of the split; chunk: query tokens
    int64_t partial;     // decode: index of this split's partial result; -1 for a chunk
    int64_t packed = -1; // chunk: index of the first packed tile of its sequence and head; -1: it packs its own
};

// A split's result for one head: the header (highest score, sum of weights), then dim sums.
INLINE int64_t partial_size(const Problem& p) { return p.dim + LANES; }

// A thread's scratch memory: grows, never shrinks.
INLINE float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < floats + LANES) memory.resize(floats + LANES);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

// A query row in fp32, scaled.
INLINE void load_query(const Problem& p, int64_t token, int64_t head, float* to) {
    with_dtype(p.dtype, [&]<typename T>(T*) {
        const T* from = (const T*)p.q + token * p.q_stride_token + head * p.q_stride_head;
        for (int64_t i = 0; i < p.dim; i += LANES) store(to + i, load(from + i) * p.scale);
    });
}

INLINE void store_result(const Problem& p, int64_t token, int64_t head, const float* from, float factor) {
    with_dtype(p.dtype, [&]<typename T>(T*) {
        T* to = (T*)p.out + (token * p.q_heads + head) * p.dim;
        for (int64_t i = 0; i < p.dim; i += LANES) store(to + i, load(from + i) * factor);
    });
}

INLINE void soften(float* scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, softcap * tanh(load(scores + i) / softcap));
}

INLINE float highest(const float* scores, int64_t count) {
    f32x16 top = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) top = max(top, load(scores + i));
    return max(top);
}

// scores -> e^(score - top), and their sum.
INLINE float exponentiate(float* scores, int64_t count, float top) {
    f32x16 total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 weight = exp(load(scores + i) - top);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

// While it lives, this thread computes 0 for what is below 2^-126, which is slow to compute with: on tiles, whose
// weights are powers of two of scores that may lie far below the highest.
struct TinyIsZero {
#if defined(__AVX512F__)
    const unsigned before = _mm_getcsr();

    explicit TinyIsZero(bool wanted) { _mm_setcsr(wanted ? before | _MM_FLUSH_ZERO_ON : before); }
    ~TinyIsZero() { _mm_setcsr(before); }
#else
    explicit TinyIsZero(bool) {}
#endif
};

}  // namespace tf
