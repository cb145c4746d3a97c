// Chunk items of paged attention: a block of query rows against tiles of KV, in fp32.
#pragma once

#include "paged_problem.h"

namespace tf {

#if defined(__AVX512F__)
constexpr int MICRO_ROWS = 6, MICRO_VECS = 4;
#else
constexpr int MICRO_ROWS = 6, MICRO_VECS = 1;
#endif

// c[0 : MICRO_ROWS][0 : 16 VECS] = (ADD ? c : 0) + a b, with a [.., depth] and b [depth, ..].
template <int VECS, bool ADD>
INLINE void micro(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
    f32x16 total[MICRO_ROWS][VECS];
    for (int r = 0; r < MICRO_ROWS; r++)
        for (int i = 0; i < VECS; i++) total[r][i] = ADD ? load(c + r * ldc + i * LANES) : f32x16{};
    for (int64_t d = 0; d < depth; d++) {
        f32x16 right[VECS];
        for (int i = 0; i < VECS; i++) right[i] = load(b + d * ldb + i * LANES);
        for (int r = 0; r < MICRO_ROWS; r++)
            for (int i = 0; i < VECS; i++) total[r][i] += right[i] * a[r * lda + d];
    }
    for (int r = 0; r < MICRO_ROWS; r++)
        for (int i = 0; i < VECS; i++) store(c + r * ldc + i * LANES, total[r][i]);
}

// rows is a multiple of MICRO_ROWS, columns one of 16.
template <bool ADD>
void product(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
             int64_t columns, int64_t depth) {
    for (int64_t r = 0; r < rows; r += MICRO_ROWS) {
        int64_t i = 0;
        for (; i + MICRO_VECS * LANES <= columns; i += MICRO_VECS * LANES)
            micro<MICRO_VECS, ADD>(a + r * lda, lda, b + i, ldb, c + r * ldc + i, ldc, depth);
        for (; i < columns; i += LANES) micro<1, ADD>(a + r * lda, lda, b + i, ldb, c + r * ldc + i, ldc, depth);
    }
}

struct ChunkScratch {
    float *q, *scores, *acc, *keys, *values, *top, *total;
    ChunkScratch(int64_t rows, int64_t dim) {
        float* at = scratch(rows * (2 * dim + TILE + 2) + 2 * dim * TILE);
        q = at, at += rows * dim;
        acc = at, at += rows * dim;
        scores = at, at += rows * TILE;
        keys = at, at += dim * TILE;
        values = at, at += dim * TILE;
        top = at, at += rows;
        total = at;
    }
};

// K transposed to [dim][TILE], V as [TILE][dim], in fp32; zeros outside [begin, end).
template <typename KV>
void load_tile(const Problem& p, const Item& item, int64_t tile, int64_t begin, int64_t end, ChunkScratch& memory) {
    int64_t rows[TILE];
    const int64_t low = begin > tile ? begin - tile : 0, high = end - tile < TILE ? end - tile : TILE;
    p.find_rows(item.sequence, item.head, tile + low, tile + high, rows + low);
    float k_scales[TILE], v_scales[TILE];
    if (p.kv_dtype == I8) {
        p.find_scales(p.k_scales, item.sequence, item.head, tile + low, tile + high, k_scales + low);
        p.find_scales(p.v_scales, item.sequence, item.head, tile + low, tile + high, v_scales + low);
    }
    for (int64_t j = 0; j < TILE; j++) {
        const bool there = j >= low && j < high;
        const KV *k = (const KV*)p.k + (there ? rows[j] : 0), *v = (const KV*)p.v + (there ? rows[j] : 0);
        for (int64_t i = 0; i < p.dim; i += LANES) {
            f32x16 key = there ? load(k + i) : f32x16{}, value = there ? load(v + i) : f32x16{};
            if (there && p.kv_dtype == I8) key *= k_scales[j], value *= v_scales[j];
            store(memory.values + j * p.dim + i, value);
            float lanes[LANES];
            store(lanes, key);
            for (int l = 0; l < LANES; l++) memory.keys[(i + l) * TILE + j] = lanes[l];
        }
    }
}

// Where a chunk item stands: its query rows are (token, head of the group), token after token.
struct Chunk {
    int64_t group, rows, first_token, position, begin, end;  // KV tokens [begin, end) are read

    Chunk(const Problem& p, const Item& item) {
        const int64_t start = p.query_starts[item.sequence], length = p.query_len(item.sequence);
        group = p.group();
        rows = (item.end - item.begin) * group;
        first_token = start + item.begin;
        position = p.kv_lens[item.sequence] - length + item.begin;
        begin = p.first_visible(position);
        end = position + item.end - item.begin;
    }
};

// Scores of one row become weights; its highest score and sum of weights go on. Returns the factor
// for what has been summed up so far.
INLINE float soft_row(const Problem& p, const Chunk& chunk, int64_t row, int64_t tile, float* scores, float* top,
                      float* total) {
    const int64_t at = chunk.position + row / chunk.group, low = p.first_visible(at) - tile, high = at + 1 - tile;
    if (low >= TILE || high <= 0) {
        for (int64_t j = 0; j < TILE; j += LANES) store(scores + j, f32x16{});
        return 1.0f;
    }
    if (p.softcap > 0) soften(scores, TILE, p.softcap);
    for (int64_t j = 0; j < low; j++) scores[j] = NOTHING;
    for (int64_t j = high; j < TILE; j++) scores[j] = NOTHING;
    const float before = *top, here = highest(scores, TILE), now = before > here ? before : here;
    const float fresh = exponentiate(scores, TILE, now);
    const float factor = before == now ? 1.0f : __builtin_expf(before - now);
    *top = now;
    *total = *total * factor + fresh;
    return factor;
}

INLINE void store_chunk(const Problem& p, const Item& item, const Chunk& chunk, const float* acc, const float* top,
                        const float* total) {
    for (int64_t row = 0; row < chunk.rows; row++) {
        const int64_t head = item.head * chunk.group + row % chunk.group;
        float sum = total[row], factor = 1.0f;
        if (p.sinks) {  // the sink may be above all scores
            const float highest = top[row] > p.sinks[head] ? top[row] : p.sinks[head];
            factor = __builtin_expf(top[row] - highest);
            sum = sum * factor + __builtin_expf(p.sinks[head] - highest);
        }
        store_result(p, chunk.first_token + row / chunk.group, head, acc + row * p.dim, factor / sum);
    }
}

inline void chunk_item(const Problem& p, const Item& item) {
    const Chunk chunk(p, item);
    const int64_t padded = round_up(chunk.rows, MICRO_ROWS), dim = p.dim;
    ChunkScratch memory(padded, dim);
    memset(memory.q + chunk.rows * dim, 0, (padded - chunk.rows) * dim * sizeof(float));
    memset(memory.acc, 0, padded * dim * sizeof(float));
    for (int64_t row = 0; row < chunk.rows; row++) {
        const int64_t head = item.head * chunk.group + row % chunk.group;
        load_query(p, chunk.first_token + row / chunk.group, head, memory.q + row * dim);
        memory.top[row] = NOTHING, memory.total[row] = 0.0f;
    }
    for (int64_t tile = chunk.begin / TILE * TILE; tile < chunk.end; tile += TILE) {
        with_kv_dtype(p.kv_dtype, [&]<typename KV>(KV*) { load_tile<KV>(p, item, tile, chunk.begin, chunk.end, memory); });
        product<false>(memory.q, dim, memory.keys, TILE, memory.scores, TILE, padded, TILE, dim);
        for (int64_t row = 0; row < chunk.rows; row++) {
            float* acc = memory.acc + row * dim;
            const float factor =
                soft_row(p, chunk, row, tile, memory.scores + row * TILE, memory.top + row, memory.total + row);
            if (factor == 1.0f) continue;
            for (int64_t i = 0; i < dim; i += LANES) store(acc + i, load(acc + i) * factor);
        }
        product<true>(memory.scores, TILE, memory.values, dim, memory.acc, dim, padded, dim, TILE);
    }
    store_chunk(p, item, chunk, memory.acc, memory.top, memory.total);
}

}  // namespace tf
