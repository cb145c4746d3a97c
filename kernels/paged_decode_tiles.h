// Decode items over int8 KV on AMX tiles: the integers of paged_decode_bytes.h, sixteen tokens at a time.
//
// A query head is two columns of a tile (its high and its low bytes), a head's softmax weights are two rows of
// another. Keys are read as they lie in the cache; values are interleaved by fours of tokens on their way.
#pragma once

#include "paged_decode_bytes.h"
#include "tiles.h"

namespace tf {

#if defined(TF_AMX) && defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int64_t SIXTEEN = 16;           // tokens whose keys are one tile
constexpr int64_t MOST_TILE_HEADS = 4;    // of one item: the high bytes are columns 0 - 3, the low ones 4 - 7
constexpr int64_t HEAD_COLUMNS = 2 * MOST_TILE_HEADS;
constexpr int64_t PASS = 128;             // tokens that are weighed together: keys and values of two passes fit the first cache
constexpr int64_t PASS_GROUPS = PASS / SIXTEEN;
constexpr int64_t SIXTEENS_AHEAD = 2;     // whose keys are asked for before their turn
constexpr float LOG2_E = 1.44269504088896341f;

INLINE bool decodes_on_tiles(const Problem& p) {
    return tiles_granted && decodes_in_bytes(p) && p.dim % PIECE == 0 && p.block_size % SIXTEEN == 0;
}

// Tile 0: sums of 16 tokens; 1: queries; 2: keys, or values; 3: weights; 4 - 7: sums of 16 dimensions each.
INLINE void configure_decode_tiles(const Problem& p) {
    if (!decodes_on_tiles(p)) return;
    TileConfig config;
    const int rows[8] = {16, 16, 16, HEAD_COLUMNS, HEAD_COLUMNS, HEAD_COLUMNS, HEAD_COLUMNS, HEAD_COLUMNS};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.row_bytes[i] = i < 2 ? HEAD_COLUMNS * 4 : 64;
    }
    load_config(config);
}

INLINE void release_decode_tiles(const Problem& p) {
    if (decodes_on_tiles(p)) _tile_release();
}

// The tokens of a decode item in sixteens, of which the first and the last may be seen in part.
struct Sixteens {
    int64_t begin, count, hidden, groups;  // begin: a multiple of 16; count: from there on, the first `hidden` unseen
    int64_t rows[TALL_SPLIT / SIXTEEN];    // number of the row of each sixteen's first token in the pool

    Sixteens(const Problem& p, const Item& item)
        : begin(item.begin / SIXTEEN * SIXTEEN), count(item.end - begin), hidden(item.begin - begin),
          groups((count + SIXTEEN - 1) / SIXTEEN) {
        const int32_t* table = p.block_tables + item.sequence * p.table_stride + begin / p.block_size;
        int64_t offset = begin % p.block_size;
        for (int64_t g = 0; g < groups; g++) {
            rows[g] = (*table * p.kv_heads + item.head) * p.block_size + offset;
            __builtin_prefetch(p.k_scales + rows[g]);
            __builtin_prefetch(p.v_scales + rows[g]);
            offset += SIXTEEN;
            if (offset == p.block_size) offset = 0, table++;
        }
    }
};

INLINE void prefetch_sixteen(const int8_t* rows, int64_t dim) {
    for (int64_t i = 0; i < SIXTEEN * dim; i += 64) __builtin_prefetch(rows + i);
}

// sums [token][HEAD_COLUMNS] of keys x queries, of the first PASS_GROUPS of the sixteens that are left. Their values are
// on their way when it ends: all that a pass needs of memory is asked for in one go, which is when memory gives most.
INLINE void tile_scores(const Problem& p, const int64_t* rows, int64_t left, const uint8_t* queries, int32_t* sums) {
    constexpr int64_t PIECE_TILE = SIXTEEN * HEAD_COLUMNS * 4;
    const int8_t *k = (const int8_t*)p.k, *v = (const int8_t*)p.v;
    const int64_t dim = p.dim;
    before_tiles();
    _tile_loadd(1, queries, HEAD_COLUMNS * 4);
    for (int64_t g = 0; g < left && g < PASS_GROUPS; g++) {
        if (g + SIXTEENS_AHEAD < left) prefetch_sixteen(k + rows[g + SIXTEENS_AHEAD] * dim, dim);
        prefetch_sixteen(v + rows[g] * dim, dim);
        _tile_zero(0);
        for (int64_t i = 0; i < dim / PIECE; i++) {
            if (dim > PIECE) _tile_loadd(1, queries + i * PIECE_TILE, HEAD_COLUMNS * 4);
            _tile_loadd(2, k + rows[g] * dim + i * PIECE, dim);
            _tile_dpbssd(0, 2, 1);
        }
        _tile_stored(0, sums + g * SIXTEEN * HEAD_COLUMNS, HEAD_COLUMNS * 4);
    }
    before_tiles();
}

// 16 tokens of sums -> 256 x high + low of each head, a token a lane.
INLINE void sums_of_heads(const int32_t* sums, i32x16* heads) {
    __m512i four[4];  // four tokens' heads each
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_load_si512(sums + 32 * i), b = _mm512_load_si512(sums + 32 * i + 16);
        const __m512i high = _mm512_shuffle_i32x4(a, b, 0x88), low = _mm512_shuffle_i32x4(a, b, 0xdd);
        four[i] = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    }
    const __m512i first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    for (int i = 0; i < 2; i++) {
        const __m512i two = _mm512_add_epi32(first, _mm512_set1_epi32(2 * i));
        const __m512i a = _mm512_permutex2var_epi32(four[0], two, four[1]), b = _mm512_permutex2var_epi32(four[2], two, four[3]);
        heads[2 * i] = (i32x16)_mm512_shuffle_i64x2(a, b, 0x44);
        heads[2 * i + 1] = (i32x16)_mm512_shuffle_i64x2(a, b, 0xee);
    }
}

// A head on its way through the passes of an item: weights are 2^(score - top).
struct HeadState {
    float top = NOTHING, total = 0.0f;

    // Scores of a pass, to base 2 and -infinity where nothing is seen, become weights x the scales of their values, in
    // two bytes each. Returns what the bytes are multiplied with; *factor: what the sums before it are.
    INLINE float weigh(float* row, int64_t whole, const float* v_scales, uint8_t* high, uint8_t* low, float* factor) {
        f32x16 tops = load(row);
        for (int64_t j = LANES; j < whole; j += LANES) tops = max(tops, load(row + j));
        const float highest_here = max(tops), now = highest_here > top ? highest_here : top;
        *factor = now == top ? 1.0f : power_of_two_above(splat(top - now))[0];
        top = now;
        f32x16 sums = {}, most = {}, check = {};
        for (int64_t j = 0; j < whole; j += LANES) {
            const f32x16 weight = power_of_two_above(load(row + j) - now), product = weight * load(v_scales + j);
            sums += weight;
            most = max(most, product);
            check += product * 0.0f;
            store(row + j, product);
        }
        total = total * *factor + sum(sums);
        const float largest = max(most), inverse = largest > 0.0f ? 65535.0f / largest : 0.0f;
        const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        for (int64_t j = 0; j < whole; j += 4 * LANES) {
            const auto words = [&](int64_t i) INLINE_LAMBDA {
                return _mm512_packus_epi32((__m512i)round_to_int(load(row + j + i) * inverse),
                                           (__m512i)round_to_int(load(row + j + i + LANES) * inverse));
            };
            const __m512i a = words(0), b = words(2 * LANES), below = _mm512_set1_epi16(255);
            const __m512i highs = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
            const __m512i lows = _mm512_packus_epi16(_mm512_and_si512(a, below), _mm512_and_si512(b, below));
            _mm512_store_si512(high + j, _mm512_permutexvar_epi32(in_order, highs));
            _mm512_store_si512(low + j, _mm512_permutexvar_epi32(in_order, lows));
        }
        return largest / 65535.0f + sum(check);
    }
};

// Four tokens' rows interleaved: tile i of four takes the row `at` of 64 bytes, the dimensions 4 i, 16 + 4 i ...
INLINE void interleave_four(const int8_t* rows, int64_t dim, uint8_t* to) {
    __m512i row[4];
    for (int t = 0; t < 4; t++) row[t] = _mm512_loadu_si512(rows + t * dim);
    const __m512i a = _mm512_unpacklo_epi8(row[0], row[1]), b = _mm512_unpackhi_epi8(row[0], row[1]);
    const __m512i c = _mm512_unpacklo_epi8(row[2], row[3]), d = _mm512_unpackhi_epi8(row[2], row[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(a, c));
    _mm512_store_si512(to + BLOCK_BYTES, _mm512_unpackhi_epi16(a, c));
    _mm512_store_si512(to + 2 * BLOCK_BYTES, _mm512_unpacklo_epi16(b, d));
    _mm512_store_si512(to + 3 * BLOCK_BYTES, _mm512_unpackhi_epi16(b, d));
}

// sums [four tiles][HEAD_COLUMNS][16] = weights x 64 dimensions of the values of a pass.
INLINE void tile_values(const int8_t* v, const int64_t* rows, int64_t groups, int64_t dim, const uint8_t* weights,
                        int32_t* sums) {
    alignas(64) uint8_t packed[PASS / 64][4 * BLOCK_BYTES];
    const auto pack = [&](int64_t step) INLINE_LAMBDA {
        for (int64_t g = 4 * step; g < 4 * step + 4 && g < groups; g++) {
            for (int64_t t = 0; t < SIXTEEN; t += 4)
                interleave_four(v + (rows[g] + t) * dim, dim, packed[step] + (g % 4 * SIXTEEN + t) * 16);
        }
        before_tiles();
    };
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    const int64_t steps = (groups + 3) / 4;
    pack(0);
    for (int64_t step = 0; step < steps; step++) {
        if (step + 1 < steps) pack(step + 1);
        const uint8_t* right = packed[step];
        _tile_loadd(3, weights + step * 64, PASS);
        _tile_loadd(2, right, 64);
        _tile_dpbusd(4, 3, 2);
        _tile_loadd(2, right + BLOCK_BYTES, 64);
        _tile_dpbusd(5, 3, 2);
        _tile_loadd(2, right + 2 * BLOCK_BYTES, 64);
        _tile_dpbusd(6, 3, 2);
        _tile_loadd(2, right + 3 * BLOCK_BYTES, 64);
        _tile_dpbusd(7, 3, 2);
    }
    _tile_stored(4, sums, 64);
    _tile_stored(5, sums + HEAD_COLUMNS * 16, 64);
    _tile_stored(6, sums + 2 * HEAD_COLUMNS * 16, 64);
    _tile_stored(7, sums + 3 * HEAD_COLUMNS * 16, 64);
    before_tiles();
}

// acc [four tiles][16], a head's sums over 64 dimensions, x factor + those of a pass x scale.
INLINE void add_sums(float* acc, float factor, const int32_t* sums, int64_t head, float scale) {
    const auto wide = [](const int32_t* from) INLINE_LAMBDA {
        return __builtin_convertvector((i32x16)_mm512_load_si512(from), f32x16);
    };
    for (int i = 0; i < 4; i++) {
        const int32_t* tile = sums + i * HEAD_COLUMNS * 16;
        const f32x16 fresh = wide(tile + head * 16) * 256.0f + wide(tile + (MOST_TILE_HEADS + head) * 16);
        store(acc + i * LANES, load(acc + i * LANES) * factor + fresh * scale);
    }
}

// Quarter l of tile i of acc holds the dimensions 16 l + 4 i and three more.
INLINE void store_dimensions(const float* acc, float* out) {
    __m512 a[4];
    for (int i = 0; i < 4; i++) a[i] = (__m512)load(acc + i * LANES);
    const __m512 low = _mm512_shuffle_f32x4(a[0], a[1], 0x44), high = _mm512_shuffle_f32x4(a[0], a[1], 0xee);
    const __m512 other_low = _mm512_shuffle_f32x4(a[2], a[3], 0x44), other_high = _mm512_shuffle_f32x4(a[2], a[3], 0xee);
    const __m512 in_order[4] = {_mm512_shuffle_f32x4(low, other_low, 0x88), _mm512_shuffle_f32x4(low, other_low, 0xdd),
                                _mm512_shuffle_f32x4(high, other_high, 0x88), _mm512_shuffle_f32x4(high, other_high, 0xdd)};
    for (int l = 0; l < 4; l++) store(out + 16 * l, (f32x16)in_order[l]);
}

// Queries as tiles; factors: what a head's sums are multiplied with.
template <int HEADS>
INLINE void pack_queries(const Problem& p, const Item& item, int64_t first_head, uint8_t* queries, float* factors) {
    alignas(64) float wide[MOST_BYTES];
    ByteQuery q[MOST_TILE_HEADS];
    for (int h = 0; h < HEADS; h++) {
        load_query(p, p.query_starts[item.sequence], first_head + h, wide);
        q[h].set(wide, p.dim);
        factors[h] = q[h].scale / 256.0f;
    }
    for (int64_t i = 0; i < p.dim; i += PIECE) {
        __m512i a[4], b[4];  // a row of a tile: four bytes of each head, the high ones first
        const auto four = [&](const auto row, __m512i* to) INLINE_LAMBDA {
            __m512i r[4];
            for (int h = 0; h < 4; h++) r[h] = h < HEADS ? _mm512_load_si512(row(h) + i) : _mm512_setzero_si512();
            const __m512i c = _mm512_unpacklo_epi32(r[0], r[1]), d = _mm512_unpackhi_epi32(r[0], r[1]);
            const __m512i e = _mm512_unpacklo_epi32(r[2], r[3]), f = _mm512_unpackhi_epi32(r[2], r[3]);
            to[0] = _mm512_unpacklo_epi64(c, e), to[1] = _mm512_unpackhi_epi64(c, e);
            to[2] = _mm512_unpacklo_epi64(d, f), to[3] = _mm512_unpackhi_epi64(d, f);
        };
        four([&](int h) INLINE_LAMBDA { return q[h].high; }, a);
        four([&](int h) INLINE_LAMBDA { return q[h].low; }, b);
        for (int c = 0; c < 4; c++) {  // quarter l belongs to row 4 l + c
            alignas(64) __m128i high[4], low[4];
            _mm512_store_si512(high, a[c]);
            _mm512_store_si512(low, b[c]);
            for (int l = 0; l < 4; l++) {
                __m128i* to = (__m128i*)(queries + (i / 4 + 4 * l + c) * HEAD_COLUMNS * 4);
                _mm_store_si128(to, high[l]);
                _mm_store_si128(to + 1, low[l]);
            }
        }
    }
}

// Scales of the tokens of a pass, 0 for those that are not seen or fill it up.
INLINE void pass_scales(const float* from, const int64_t* rows, int64_t groups, int64_t whole, float* to) {
    for (int64_t g = 0; g < groups; g++) store(to + g * SIXTEEN, load(from + rows[g]));
    for (int64_t j = groups * SIXTEEN; j < whole; j += LANES) store(to + j, f32x16{});
}

// An item for HEADS of its group, pass after pass; the tiles are configured.
template <int HEADS>
void tile_heads(const Problem& p, const Item& item, int64_t first_head, const Sixteens& tokens, float* partial) {
    alignas(64) int32_t sums[PASS * HEAD_COLUMNS];
    alignas(64) uint8_t queries[MOST_BYTES * HEAD_COLUMNS], weights[HEAD_COLUMNS][PASS];
    alignas(64) float scores[HEADS][PASS], acc[HEADS][MOST_BYTES], k_scales[PASS], v_scales[PASS];
    float factors[HEADS];
    HeadState heads[HEADS];
    const int64_t stride = partial_size(p);
    for (int64_t g = 0; g < SIXTEENS_AHEAD && g < tokens.groups; g++)
        prefetch_sixteen((const int8_t*)p.k + tokens.rows[g] * p.dim, p.dim);
    pack_queries<HEADS>(p, item, first_head, queries, factors);
    for (int h = 0; h < HEADS; h++) memset(acc[h], 0, p.dim * sizeof(float));
    const float base = p.softcap > 0 ? 1.0f : LOG2_E;
    for (int64_t first = 0; first < tokens.groups; first += PASS_GROUPS) {
        const int64_t left = tokens.groups - first, groups = left < PASS_GROUPS ? left : PASS_GROUPS;
        const int64_t whole = round_up(groups, 4) * SIXTEEN, *rows = tokens.rows + first;
        tile_scores(p, rows, left, queries, sums);
        pass_scales(p.k_scales, rows, groups, whole, k_scales);
        pass_scales(p.v_scales, rows, groups, whole, v_scales);
        for (int64_t g = 0; g < groups; g++) {
            i32x16 exact[MOST_TILE_HEADS];
            sums_of_heads(sums + g * SIXTEEN * HEAD_COLUMNS, exact);
            const f32x16 scale = load(k_scales + g * SIXTEEN) * base;
            for (int h = 0; h < HEADS; h++)
                store(scores[h] + g * SIXTEEN, __builtin_convertvector(exact[h], f32x16) * (scale * factors[h]));
        }
        const int64_t low = first == 0 ? tokens.hidden : 0, end = tokens.count - first * SIXTEEN, high = end < PASS ? end : PASS;
        for (int64_t j = 0; j < low; j++) v_scales[j] = 0.0f;
        for (int64_t j = high; j < whole; j++) v_scales[j] = 0.0f;
        float brought[HEADS], kept[HEADS];
        for (int h = 0; h < HEADS; h++) {
            float* row = scores[h];
            if (p.softcap > 0) {
                soften(row, groups * SIXTEEN, p.softcap);
                for (int64_t j = 0; j < groups * SIXTEEN; j += LANES) store(row + j, load(row + j) * LOG2_E);
            }
            for (int64_t j = 0; j < low; j++) row[j] = NOTHING;
            for (int64_t j = high; j < whole; j++) row[j] = NOTHING;
            brought[h] = heads[h].weigh(row, whole, v_scales, weights[h], weights[MOST_TILE_HEADS + h], kept + h);
        }
        for (int64_t i = 0; i < p.dim; i += PIECE) {
            tile_values((const int8_t*)p.v + i, rows, groups, p.dim, weights[0], sums);
            for (int h = 0; h < HEADS; h++) add_sums(acc[h] + i, kept[h], sums, h, brought[h]);
        }
    }
    for (int h = 0; h < HEADS; h++) {
        partial[h * stride] = heads[h].top / LOG2_E;
        partial[h * stride + 1] = heads[h].total;
        for (int64_t i = 0; i < p.dim; i += PIECE) store_dimensions(acc[h] + i, partial + h * stride + LANES + i);
    }
}

#else

INLINE bool decodes_on_tiles(const Problem&) { return false; }
INLINE void configure_decode_tiles(const Problem&) {}
INLINE void release_decode_tiles(const Problem&) {}
struct Sixteens {
    Sixteens(const Problem&, const Item&) {}
};
template <int HEADS>
INLINE void tile_heads(const Problem&, const Item&, int64_t, const Sixteens&, float*) {}

#endif

}  // namespace tf
