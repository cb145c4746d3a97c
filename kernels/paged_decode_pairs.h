// Decode items over bf16 KV with bf16 queries, where the CPU multiplies pairs of bf16 (AVX-512 BF16).
//
// Products are exact and sums fp32, as in paged_decode.h; of the softmax's weights, which lie between
// 0 and 1, only bf16's eight digits are kept, as the tiles of a chunk do.
#pragma once

#include "paged_problem.h"

namespace tf {

#if defined(__AVX512BF16__)

constexpr int64_t PAIRED = 2 * LANES;  // values that one instruction multiplies
constexpr int64_t AHEAD = 16;           // tokens whose keys are asked for before their turn

INLINE bool decodes_in_pairs(const Problem& p) {
    return p.kv_dtype == BF16 && p.dtype == BF16 && p.dim % PAIRED == 0;
}

// Rows of one block lie together, blocks anywhere: the hardware's own prefetching ends with each of them.
INLINE void prefetch_row(const bf16* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += PAIRED) __builtin_prefetch(row + i);
}

INLINE __m512bh load_pairs(const void* from) { return (__m512bh)_mm512_loadu_si512(from); }

// scores[h][j] = q[h] . k[rows[j]], four tokens at a time; the rows of v are on their way when it ends.
template <int HEADS>
INLINE void pair_scores(const bf16* k, const bf16* v, const int64_t* rows, int64_t count, const bf16* const* q,
                        int64_t dim, float* scores) {
    for (int64_t j = 0; j < AHEAD && j < count; j++) prefetch_row(k + rows[j], dim);
    for (int64_t j = 0; j < count; j += 4) {
        const bf16* token[4];
        for (int t = 0; t < 4; t++) {
            token[t] = k + rows[j + t < count ? j + t : count - 1];
            if (j + t + AHEAD < count) prefetch_row(k + rows[j + t + AHEAD], dim);
            if (j + t < count) prefetch_row(v + rows[j + t], dim);
        }
        f32x16 total[HEADS][4] = {};
        for (int64_t i = 0; i < dim; i += PAIRED) {
            __m512bh key[4];
            for (int t = 0; t < 4; t++) key[t] = load_pairs(token[t] + i);
            for (int h = 0; h < HEADS; h++) {
                __m512bh query = load_pairs(q[h] + i);
                for (int t = 0; t < 4; t++)
                    total[h][t] = (f32x16)_mm512_dpbf16_ps((__m512)total[h][t], key[t], query);
            }
        }
        for (int h = 0; h < HEADS; h++) sum4(total[h], scores + h * SPLIT + j);
    }
}

// out[h][0 : PIECES * 32] = sum over j of weights[h][j] v[rows[j]], two tokens at a time: their rows are
// interleaved, so that a pair is the same dimension of both. A token without a partner is its own, with weight 0.
template <int HEADS, int PIECES>
INLINE void pair_values(const bf16* v, const int64_t* rows, int64_t count, const bf16* weights, float* out,
                        int64_t out_stride) {
    __m512 low[HEADS][PIECES] = {}, high[HEADS][PIECES] = {};
    for (int64_t j = 0; j < count; j += 2) {
        const bf16 *one = v + rows[j], *other = v + rows[j + 1 < count ? j + 1 : j];
        __m512bh first[PIECES], second[PIECES];
        for (int i = 0; i < PIECES; i++) {
            __m512i a = _mm512_loadu_si512(one + i * PAIRED), b = _mm512_loadu_si512(other + i * PAIRED);
            first[i] = (__m512bh)_mm512_unpacklo_epi16(a, b);
            second[i] = (__m512bh)_mm512_unpackhi_epi16(a, b);
        }
        for (int h = 0; h < HEADS; h++) {
            int32_t pair;
            memcpy(&pair, weights + h * SPLIT + j, 4);
            __m512bh weight = (__m512bh)_mm512_set1_epi32(pair);
            for (int i = 0; i < PIECES; i++) {
                low[h][i] = _mm512_dpbf16_ps(low[h][i], first[i], weight);
                high[h][i] = _mm512_dpbf16_ps(high[h][i], second[i], weight);
            }
        }
    }
    // the interleaving went by runs of eight: low has the first four of each, high the others
    const __m512i front = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i back = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < PIECES; i++) {
            float* to = out + h * out_stride + i * PAIRED;
            _mm512_storeu_ps(to, _mm512_permutex2var_ps(low[h][i], front, high[h][i]));
            _mm512_storeu_ps(to + LANES, _mm512_permutex2var_ps(low[h][i], back, high[h][i]));
        }
}

template <int HEADS>
void pair_heads(const Problem& p, const Item& item, int64_t first_head, const int64_t* rows, float* partial) {
    const int64_t count = item.end - item.begin, whole = round_up(count, LANES), stride = partial_size(p);
    float* scores = scratch(HEADS * SPLIT);
    bf16 weights[HEADS * SPLIT];
    const bf16* q[HEADS];
    for (int h = 0; h < HEADS; h++)
        q[h] = (const bf16*)p.q + p.query_starts[item.sequence] * p.q_stride_token + (first_head + h) * p.q_stride_head;
    pair_scores<HEADS>((const bf16*)p.k, (const bf16*)p.v, rows, count, q, p.dim, scores);
    for (int h = 0; h < HEADS; h++) {
        float* row = scores + h * SPLIT;
        for (int64_t j = 0; j < whole; j += LANES) store(row + j, load(row + j) * p.scale);
        if (p.softcap > 0) soften(row, whole, p.softcap);
        for (int64_t j = count; j < whole; j++) row[j] = NOTHING;
        float top = highest(row, whole);
        partial[h * stride] = top;
        partial[h * stride + 1] = exponentiate(row, whole, top);
        for (int64_t j = 0; j < whole; j += LANES) store(weights + h * SPLIT + j, load(row + j));
    }
    const bf16* v = (const bf16*)p.v;
    int64_t i = 0;
    for (; i + 2 * PAIRED <= p.dim; i += 2 * PAIRED)
        pair_values<HEADS, 2>(v + i, rows, count, weights, partial + LANES + i, stride);
    for (; i < p.dim; i += PAIRED) pair_values<HEADS, 1>(v + i, rows, count, weights, partial + LANES + i, stride);
}

#else

INLINE bool decodes_in_pairs(const Problem&) { return false; }
template <int HEADS> INLINE void pair_heads(const Problem&, const Item&, int64_t, const int64_t*, float*) {}

#endif

}  // namespace tf
