// Decode items of paged attention: one query token, a split of its KV, all query heads of a group.
#pragma once

#include "paged_decode_bytes.h"
#include "paged_decode_pairs.h"
#include "paged_decode_tiles.h"
#include "paged_problem.h"

namespace tf {

#if defined(__AVX512F__)

// Vectors of values that HEADS heads add up at once.
template <int HEADS> constexpr int VALUES_AT_ONCE = 4;

// scores[h][j] = q[h] . k[rows[j]], four tokens at a time.
template <int HEADS, typename KV>
INLINE void decode_scores(const KV* k, const int64_t* rows, int64_t count, const float* q, int64_t dim, float* scores, float*) {
    for (int64_t j = 0; j < count; j += 4) {
        const KV* token[4];
        for (int t = 0; t < 4; t++) token[t] = k + rows[j + t < count ? j + t : count - 1];
        f32x16 total[HEADS][4] = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            f32x16 key[4];
            for (int t = 0; t < 4; t++) key[t] = load(token[t] + i);
            for (int h = 0; h < HEADS; h++) {
                f32x16 query = load(q + h * dim + i);
                for (int t = 0; t < 4; t++) total[h][t] += key[t] * query;
            }
        }
        for (int h = 0; h < HEADS; h++) sum4(total[h], scores + h * SPLIT + j);
    }
}

#else  // with half as many registers, each of half the size

template <int HEADS> constexpr int VALUES_AT_ONCE = HEADS == 1 ? 4 : HEADS < 4 ? 2 : 1;

// The same; keys are widened once for all heads, into `wide` [4][dim].
template <int HEADS, typename KV>
INLINE void decode_scores(const KV* k, const int64_t* rows, int64_t count, const float* q, int64_t dim, float* scores, float* wide) {
    for (int64_t j = 0; j < count; j += 4) {
        for (int t = 0; t < 4; t++) {
            const KV* token = k + rows[j + t < count ? j + t : count - 1];
            for (int64_t i = 0; i < dim; i += LANES) store(wide + t * dim + i, load(token + i));
        }
        for (int h = 0; h < HEADS; h++) {
            f32x16 total[4] = {};
            for (int64_t i = 0; i < dim; i += LANES) {
                const f32x16 query = load(q + h * dim + i);
                for (int t = 0; t < 4; t++) total[t] = fma(load(wide + t * dim + i), query, total[t]);
            }
            sum4(total, scores + h * SPLIT + j);
        }
    }
}

#endif

// out[h][0 : VECS * 16] = sum over j of weights[h][j] v[rows[j]].
template <int HEADS, int VECS, typename KV>
INLINE void decode_values(const KV* v, const int64_t* rows, int64_t count, const float* weights, float* out,
                          int64_t out_stride) {
    f32x16 total[HEADS][VECS] = {};
    for (int64_t j = 0; j < count; j++) {
        for (int i = 0; i < VECS; i++) {
            const f32x16 value = load(v + rows[j] + i * LANES);
            for (int h = 0; h < HEADS; h++) total[h][i] += value * weights[h * SPLIT + j];
        }
    }
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < VECS; i++) store(out + h * out_stride + i * LANES, total[h][i]);
}

// scales: of int8 KV, else null.
template <int HEADS, typename KV>
void decode_heads(const Problem& p, const Item& item, int64_t first_head, const int64_t* rows,
                  const RowScales* scales, float* partial) {
    const int64_t count = item.end - item.begin, whole = round_up(count, LANES), stride = partial_size(p);
    float* q = scratch(HEADS * (p.dim + SPLIT) + 4 * p.dim);
    float *scores = q + HEADS * p.dim, *wide = scores + HEADS * SPLIT;
    for (int h = 0; h < HEADS; h++) load_query(p, p.query_starts[item.sequence], first_head + h, q + h * p.dim);
    decode_scores<HEADS>((const KV*)p.k, rows, count, q, p.dim, scores, wide);
    for (int h = 0; h < HEADS; h++) {
        float* row = scores + h * SPLIT;
        if (scales) multiply(row, scales->k, whole);
        if (p.softcap > 0) soften(row, whole, p.softcap);
        for (int64_t j = count; j < whole; j++) row[j] = NOTHING;
        float top = highest(row, whole);
        partial[h * stride] = top;
        partial[h * stride + 1] = exponentiate(row, whole, top);
        if (scales) multiply(row, scales->v, whole);
    }
    const KV* v = (const KV*)p.v;
    int64_t i = 0;
    constexpr int VECS = VALUES_AT_ONCE<HEADS>;
    for (; i + VECS * LANES <= p.dim; i += VECS * LANES)
        decode_values<HEADS, VECS>(v + i, rows, count, scores, partial + LANES + i, stride);
    for (; i < p.dim; i += LANES) decode_values<HEADS, 1>(v + i, rows, count, scores, partial + LANES + i, stride);
}

// Calls some(HEADS, head, to) for the heads of an item's group, up to four at a time.
template <typename F> INLINE void by_heads(const Problem& p, const Item& item, float* partial, F some) {
    for (int64_t g = 0; g < p.group();) {
        int64_t head = item.head * p.group() + g, left = p.group() - g;
        float* to = partial + g * partial_size(p);
        if (left >= 4) some.template operator()<4>(head, to), g += 4;
        else if (left == 3) some.template operator()<3>(head, to), g += 3;
        else if (left == 2) some.template operator()<2>(head, to), g += 2;
        else some.template operator()<1>(head, to), g += 1;
    }
}

// Where decodes_on_tiles the tiles are configured for it.
inline void decode_item(const Problem& p, const Item& item, float* partials) {
    float* partial = partials + item.partial * p.group() * partial_size(p);
    if (decodes_on_tiles(p)) {
        const Sixteens tokens(p, item);
        by_heads(p, item, partial, [&]<int HEADS>(int64_t head, float* to) {
            tile_heads<HEADS>(p, item, head, tokens, to);
        });
        return;
    }
    int64_t rows[SPLIT];
    p.find_rows(item.sequence, item.head, item.begin, item.end, rows);
    if (decodes_in_pairs(p)) {
        by_heads(p, item, partial, [&]<int HEADS>(int64_t head, float* to) {
            pair_heads<HEADS>(p, item, head, rows, to);
        });
        return;
    }
    const bool scaled = p.kv_dtype == I8;
    RowScales scales;
    if (scaled) scales.find(p, item);
    if (decodes_in_bytes(p)) {
        by_heads(p, item, partial, [&]<int HEADS>(int64_t head, float* to) {
            byte_heads<HEADS>(p, item, head, rows, scales, to);
        });
        return;
    }
    with_kv_dtype(p.kv_dtype, [&]<typename KV>(KV*) {
        by_heads(p, item, partial, [&]<int HEADS>(int64_t head, float* to) {
            decode_heads<HEADS, KV>(p, item, head, rows, scaled ? &scales : nullptr, to);
        });
    });
}

// The splits of one query head, in their order, and the sink become the result.
inline void merge(const Problem& p, int64_t s, int64_t head, const float* partial, int64_t splits) {
    const int64_t split_stride = p.group() * partial_size(p);
    float top = p.sinks ? p.sinks[head] : NOTHING;
    for (int64_t i = 0; i < splits; i++) top = partial[i * split_stride] > top ? partial[i * split_stride] : top;
    float total = p.sinks ? __builtin_expf(p.sinks[head] - top) : 0.0f;
    float* acc = scratch(p.dim);
    for (int64_t j = 0; j < p.dim; j += LANES) store(acc + j, f32x16{});
    for (int64_t i = 0; i < splits; i++) {
        const float* from = partial + i * split_stride;
        float factor = __builtin_expf(from[0] - top);
        total += from[1] * factor;
        for (int64_t j = 0; j < p.dim; j += LANES) store(acc + j, load(acc + j) + load(from + LANES + j) * factor);
    }
    store_result(p, p.query_starts[s], head, acc, total == 0.0f ? 0.0f : 1.0f / total);
}

}  // namespace tf
