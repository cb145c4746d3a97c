// Decode items over int8 KV, where the CPU multiplies fours of bytes (AVX-512 VNNI).
//
// All sums are exact integers. A query's values and the softmax's weights are held in two bytes each, to within
// 2^-16 of the largest of their row: what is lost beside the cache's own rounding is less than bf16 loses.
#pragma once

#include "paged_problem.h"

namespace tf {

// The scales of the tokens of a decode item; 0 for those that fill up the last vector.
struct RowScales {
    alignas(64) float k[SPLIT], v[SPLIT];

    INLINE void find(const Problem& p, const Item& item) {
        const int64_t count = item.end - item.begin, bytes = (round_up(count, LANES) - count) * sizeof(float);
        p.find_scales(p.k_scales, item.sequence, item.head, item.begin, item.end, k);
        p.find_scales(p.v_scales, item.sequence, item.head, item.begin, item.end, v);
        memset(k + count, 0, bytes);
        memset(v + count, 0, bytes);
    }
};

INLINE void multiply(float* row, const float* factors, int64_t count) {
    for (int64_t j = 0; j < count; j += LANES) store(row + j, load(row + j) * load(factors + j));
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int64_t PIECE = 64;         // bytes of one register
constexpr int64_t MOST_BYTES = 256;   // of a row: its sums stay within 32 bits
constexpr int64_t BYTES_AHEAD = 32;   // tokens whose keys are asked for before their turn

INLINE bool decodes_in_bytes(const Problem& p) { return p.kv_dtype == I8 && p.dim <= MOST_BYTES; }

INLINE __mmask64 part_of_piece(int64_t left) { return left >= PIECE ? ~0ull : (1ull << left) - 1; }

INLINE void prefetch_bytes(const int8_t* row, int64_t dim) {
    for (int64_t i = 0; i < dim; i += PIECE) __builtin_prefetch(row + i);
}

// A query row as scale x (high + low / 256), and what the keys' offset of 128 adds to 256 x its products.
struct ByteQuery {
    alignas(64) int8_t high[MOST_BYTES], low[MOST_BYTES];
    float scale;
    uint32_t excess;

    INLINE void set(const float* q, int64_t dim) {
        memset(high + dim, 0, sizeof(high) - dim);
        memset(low + dim, 0, sizeof(low) - dim);
        f32x16 top = {}, check = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            const f32x16 v = load(q + i);
            top = max(top, v < 0.0f ? -v : v);
            check += v * 0.0f;
        }
        const float highest = max(top), inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
        scale = highest / 127.0f + sum(check);  // a NaN or infinity makes it NaN
        i32x16 total = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            const f32x16 v = load(q + i) * inverse;
            const i32x16 whole = round_to_int(v), left = round_to_int((v - __builtin_convertvector(whole, f32x16)) * 256.0f);
            const i32x16 rest = left > 127 ? i32x16{} + 127 : left;
            _mm_storeu_si128((__m128i*)(high + i), _mm512_cvtepi32_epi8((__m512i)whole));
            _mm_storeu_si128((__m128i*)(low + i), _mm512_cvtepi32_epi8((__m512i)rest));
            total += whole * 256 + rest;
        }
        excess = 128u * (uint32_t)_mm512_reduce_add_epi32((__m512i)total);
    }
};

// sum4 of integers.
INLINE __m128i sum4_int(const __m512i* v) {
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// sums[h][j] = 256 x the product of query h with the codes of k[rows[j]], four tokens at a time; the rows of v
// are on their way when it ends.
template <int HEADS, int PIECES>
INLINE void byte_scores(const int8_t* k, const int8_t* v, const int64_t* rows, int64_t count, const ByteQuery* q,
                        int64_t dim, int32_t* sums) {
    __mmask64 part[PIECES];
    for (int i = 0; i < PIECES; i++) part[i] = dim > i * PIECE ? part_of_piece(dim - i * PIECE) : 0;
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    for (int64_t j = 0; j < BYTES_AHEAD && j < count; j++) prefetch_bytes(k + rows[j], dim);
    for (int64_t j = 0; j < count; j += 4) {
        __m512i key[4][PIECES];
        for (int t = 0; t < 4; t++) {
            const int8_t* token = k + rows[j + t < count ? j + t : count - 1];
            if (j + t + BYTES_AHEAD < count) prefetch_bytes(k + rows[j + t + BYTES_AHEAD], dim);
            if (j + t < count) prefetch_bytes(v + rows[j + t], dim);
            // the left side of the instruction has no sign: code + 128
            for (int i = 0; i < PIECES; i++)
                key[t][i] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(part[i], token + i * PIECE), sign);
        }
        for (int h = 0; h < HEADS; h++) {
            __m512i total[4];
            for (int t = 0; t < 4; t++) {
                __m512i high = _mm512_setzero_si512(), low = high;
                for (int i = 0; i < PIECES; i++) {
                    high = _mm512_dpbusd_epi32(high, key[t][i], _mm512_load_si512(q[h].high + i * PIECE));
                    low = _mm512_dpbusd_epi32(low, key[t][i], _mm512_load_si512(q[h].low + i * PIECE));
                }
                total[t] = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
            }
            const __m128i excess = _mm_set1_epi32((int)q[h].excess);
            _mm_storeu_si128((__m128i*)(sums + h * SPLIT + j), _mm_sub_epi32(sum4_int(total), excess));
        }
    }
}

// Weights become scale x (256 high + low). Returns the scale.
INLINE float in_two_bytes(const float* weights, int64_t whole, uint8_t* high, uint8_t* low) {
    f32x16 top = {}, check = {};
    for (int64_t j = 0; j < whole; j += LANES) {
        const f32x16 v = load(weights + j);
        top = max(top, v);
        check += v * 0.0f;
    }
    const float highest = max(top), inverse = highest > 0.0f ? 65535.0f / highest : 0.0f;
    for (int64_t j = 0; j < whole; j += LANES) {
        const i32x16 both = round_to_int(load(weights + j) * inverse);
        _mm_store_si128((__m128i*)(high + j), _mm512_cvtepi32_epi8(_mm512_srli_epi32((__m512i)both, 8)));
        _mm_store_si128((__m128i*)(low + j), _mm512_cvtepi32_epi8((__m512i)both));
    }
    return highest / 65535.0f + sum(check);
}

// Those of a split.
struct ByteWeights {
    alignas(64) uint8_t high[SPLIT], low[SPLIT];
    float scale;
};

// out[h][0 : 64] = sum over j of weights[h][j] v[rows[j]], four tokens at a time: their rows are interleaved, so
// that four bytes are the same dimension of all. Tokens without partners take any, with weight 0.
template <int HEADS>
INLINE void byte_values(const int8_t* v, const int64_t* rows, int64_t count, const ByteWeights* weights,
                        __mmask64 part, float* out, int64_t out_stride) {
    __m512i high[HEADS][4], low[HEADS][4];
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < 4; i++) high[h][i] = low[h][i] = _mm512_setzero_si512();
    for (int64_t j = 0; j < count; j += 4) {
        __m512i row[4], four[4];
        for (int t = 0; t < 4; t++) row[t] = _mm512_maskz_loadu_epi8(part, v + rows[j + t < count ? j + t : j]);
        const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
        const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
        four[0] = _mm512_unpacklo_epi16(a, c), four[1] = _mm512_unpackhi_epi16(a, c);
        four[2] = _mm512_unpacklo_epi16(b, d), four[3] = _mm512_unpackhi_epi16(b, d);
        for (int h = 0; h < HEADS; h++) {
            int32_t upper, lower;
            memcpy(&upper, weights[h].high + j, 4);
            memcpy(&lower, weights[h].low + j, 4);
            const __m512i more = _mm512_set1_epi32(upper), less = _mm512_set1_epi32(lower);
            for (int i = 0; i < 4; i++) {
                high[h][i] = _mm512_dpbusd_epi32(high[h][i], more, four[i]);
                low[h][i] = _mm512_dpbusd_epi32(low[h][i], less, four[i]);
            }
        }
    }
    // quarter l of four[i] holds the dimensions 16 l + 4 i and the next three
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < 4; i++) {
            const __m512i sums = _mm512_add_epi32(_mm512_slli_epi32(high[h][i], 8), low[h][i]);
            float lanes[LANES];
            store(lanes, __builtin_convertvector((i32x16)sums, f32x16) * weights[h].scale);
            for (int64_t l = 0; l < 4 && part >> (16 * l) & 1; l++)
                memcpy(out + h * out_stride + 16 * l + 4 * i, lanes + 4 * l, 16);
        }
}

template <int HEADS>
void byte_heads(const Problem& p, const Item& item, int64_t first_head, const int64_t* rows, const RowScales& scales,
                float* partial) {
    const int64_t count = item.end - item.begin, whole = round_up(count, LANES), stride = partial_size(p);
    float* scores = scratch(HEADS * SPLIT + p.dim);
    int32_t sums[HEADS * SPLIT];
    ByteQuery q[HEADS];
    for (int h = 0; h < HEADS; h++) {
        load_query(p, p.query_starts[item.sequence], first_head + h, scores);
        q[h].set(scores, p.dim);
    }
    const int8_t *k = (const int8_t*)p.k, *v = (const int8_t*)p.v;
    if (p.dim <= PIECE) byte_scores<HEADS, 1>(k, v, rows, count, q, p.dim, sums);
    else if (p.dim <= 2 * PIECE) byte_scores<HEADS, 2>(k, v, rows, count, q, p.dim, sums);
    else byte_scores<HEADS, 4>(k, v, rows, count, q, p.dim, sums);
    ByteWeights weights[HEADS];
    for (int h = 0; h < HEADS; h++) {
        float* row = scores + h * SPLIT;
        const float factor = q[h].scale / 256.0f;
        for (int64_t j = 0; j < whole; j += LANES) {
            i32x16 exact;
            memcpy(&exact, sums + h * SPLIT + j, 64);
            store(row + j, __builtin_convertvector(exact, f32x16) * (load(scales.k + j) * factor));
        }
        if (p.softcap > 0) soften(row, whole, p.softcap);
        for (int64_t j = count; j < whole; j++) row[j] = NOTHING;
        const float top = highest(row, whole);
        partial[h * stride] = top;
        partial[h * stride + 1] = exponentiate(row, whole, top);
        multiply(row, scales.v, whole);
        weights[h].scale = in_two_bytes(row, whole, weights[h].high, weights[h].low);
    }
    for (int64_t i = 0; i < p.dim; i += PIECE) {
        const __mmask64 part = part_of_piece(p.dim - i);
        float* out = partial + LANES + i;
        if constexpr (HEADS == 4) {  // the sums of four do not fit the registers
            byte_values<2>(v + i, rows, count, weights, part, out, stride);
            byte_values<2>(v + i, rows, count, weights + 2, part, out + 2 * stride, stride);
        } else {
            byte_values<HEADS>(v + i, rows, count, weights, part, out, stride);
        }
    }
}

#else

INLINE bool decodes_in_bytes(const Problem&) { return false; }
template <int HEADS>
INLINE void byte_heads(const Problem&, const Item&, int64_t, const int64_t*, const RowScales&, float*) {}

#endif

}  // namespace tf
