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
constexpr int64_t SIXTEENS_AHEAD = 2;     // whose keys are asked for before their turn

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
    int64_t rows[TALL_SPLIT / SIXTEEN];    // where the keys of each sixteen begin

    Sixteens(const Problem& p, const Item& item)
        : begin(item.begin / SIXTEEN * SIXTEEN), count(item.end - begin), hidden(item.begin - begin),
          groups((count + SIXTEEN - 1) / SIXTEEN) {
        const int32_t* table = p.block_tables + item.sequence * p.table_stride;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t token = begin + g * SIXTEEN, block = token / p.block_size, offset = token % p.block_size;
            const int64_t at = (table[block] * p.kv_heads + item.head) * p.block_size + offset;
            rows[g] = at * p.dim;
            __builtin_prefetch(p.k_scales + at);
            __builtin_prefetch(p.v_scales + at);
        }
    }
    // Those of the tokens; 0 where nothing is seen.
    INLINE void find_scales(const Problem& p, const Item& item, RowScales& scales) const {
        scales.find(p, {item.sequence, item.head, begin, item.end, item.partial});
        memset(scales.k, 0, hidden * sizeof(float));
        memset(scales.v, 0, hidden * sizeof(float));
    }
};

INLINE void prefetch_sixteen(const int8_t* rows, int64_t dim) {
    for (int64_t i = 0; i < SIXTEEN * dim; i += 64) __builtin_prefetch(rows + i);
}

// sums [token][HEAD_COLUMNS] of keys x queries; the rows of v are on their way when it ends.
INLINE void tile_scores(const int8_t* k, const int8_t* v, const Sixteens& tokens, const uint8_t* queries, int64_t dim,
                        int32_t* sums) {
    constexpr int64_t PIECE_TILE = SIXTEEN * HEAD_COLUMNS * 4;
    before_tiles();
    _tile_loadd(1, queries, HEAD_COLUMNS * 4);
    for (int64_t g = 0; g < SIXTEENS_AHEAD && g < tokens.groups; g++) prefetch_sixteen(k + tokens.rows[g], dim);
    for (int64_t g = 0; g < tokens.groups; g++) {
        if (g + SIXTEENS_AHEAD < tokens.groups) prefetch_sixteen(k + tokens.rows[g + SIXTEENS_AHEAD], dim);
        prefetch_sixteen(v + tokens.rows[g], dim);
        _tile_zero(0);
        for (int64_t i = 0; i < dim / PIECE; i++) {
            if (dim > PIECE) _tile_loadd(1, queries + i * PIECE_TILE, HEAD_COLUMNS * 4);
            _tile_loadd(2, k + tokens.rows[g] + i * PIECE, dim);
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

// Scores of a head become weights x the scales of their values, and the header of its partial result.
INLINE void weigh_tokens(const Problem& p, const Sixteens& tokens, const RowScales& scales, float* row, float* header) {
    constexpr float LOG2_E = 1.44269504088896341f;
    const int64_t whole = tokens.groups * SIXTEEN;
    if (p.softcap > 0) soften(row, whole, p.softcap);
    for (int64_t j = 0; j < tokens.hidden; j++) row[j] = NOTHING;
    for (int64_t j = tokens.count; j < whole; j++) row[j] = NOTHING;
    const float top = highest(row, whole);
    f32x16 total = {};
    for (int64_t j = 0; j < whole; j += LANES) {
        const f32x16 weight = power_of_two_above((load(row + j) - top) * LOG2_E);
        total += weight;
        store(row + j, weight * load(scales.v + j));
    }
    header[0] = top;
    header[1] = sum(total);
}

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

// sums [four tiles][HEAD_COLUMNS][16] = weights x 64 dimensions of the values.
INLINE void tile_values(const int8_t* v, const Sixteens& tokens, int64_t dim, const uint8_t* weights, int32_t* sums) {
    alignas(64) uint8_t packed[2][4 * BLOCK_BYTES];
    const int64_t steps = (tokens.groups + 3) / 4;
    const auto pack = [&](int64_t step) INLINE_LAMBDA {
        for (int64_t g = 4 * step; g < 4 * step + 4 && g < tokens.groups; g++)
            for (int64_t t = 0; t < SIXTEEN; t += 4)
                interleave_four(v + tokens.rows[g] + t * dim, dim, packed[step % 2] + (g % 4 * SIXTEEN + t) * 16);
        before_tiles();
    };
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    pack(0);
    for (int64_t step = 0; step < steps; step++) {
        if (step + 1 < steps) pack(step + 1);
        const uint8_t* right = packed[step % 2];
        _tile_loadd(3, weights + step * 64, TALL_SPLIT);
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

// The sums of a head over 64 dimensions, x scale; quarter l of tile i holds the dimensions 16 l + 4 i and three more.
INLINE void store_dimensions(const int32_t* sums, int64_t head, float scale, float* out) {
    const auto wide = [](const int32_t* from) INLINE_LAMBDA {
        return __builtin_convertvector((i32x16)_mm512_load_si512(from), f32x16);
    };
    __m512 a[4];
    for (int i = 0; i < 4; i++) {
        const int32_t* tile = sums + i * HEAD_COLUMNS * 16;
        a[i] = (__m512)(wide(tile + head * 16) * 256.0f + wide(tile + (MOST_TILE_HEADS + head) * 16));
    }
    const __m512 low = _mm512_shuffle_f32x4(a[0], a[1], 0x44), high = _mm512_shuffle_f32x4(a[0], a[1], 0xee);
    const __m512 other_low = _mm512_shuffle_f32x4(a[2], a[3], 0x44), other_high = _mm512_shuffle_f32x4(a[2], a[3], 0xee);
    const __m512 in_order[4] = {_mm512_shuffle_f32x4(low, other_low, 0x88), _mm512_shuffle_f32x4(low, other_low, 0xdd),
                                _mm512_shuffle_f32x4(high, other_high, 0x88), _mm512_shuffle_f32x4(high, other_high, 0xdd)};
    for (int l = 0; l < 4; l++) store(out + 16 * l, (f32x16)in_order[l] * scale);
}

// An item for HEADS of its group; the tiles are configured.
template <int HEADS>
void tile_heads(const Problem& p, const Item& item, int64_t first_head, const Sixteens& tokens, float* partial) {
    alignas(64) int32_t sums[TALL_SPLIT * HEAD_COLUMNS];
    alignas(64) uint8_t queries[MOST_BYTES * HEAD_COLUMNS], weights[HEAD_COLUMNS][TALL_SPLIT];
    alignas(64) float scores[HEADS][TALL_SPLIT];
    float factors[HEADS];
    const int64_t stride = partial_size(p), padded = round_up(tokens.groups, 4) * SIXTEEN;
    for (int h = 0; h < HEADS; h++) {
        ByteQuery q;
        load_query(p, p.query_starts[item.sequence], first_head + h, scores[0]);
        q.set(scores[0], p.dim);
        factors[h] = q.scale / 256.0f;
        const __m512i down = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                                _mm512_set1_epi32(HEAD_COLUMNS));
        for (int64_t i = 0; i < p.dim; i += PIECE) {
            int32_t* to = (int32_t*)queries + i / 4 * HEAD_COLUMNS + h;
            _mm512_i32scatter_epi32(to, down, _mm512_load_si512(q.high + i), 4);
            _mm512_i32scatter_epi32(to + MOST_TILE_HEADS, down, _mm512_load_si512(q.low + i), 4);
        }
    }
    const int8_t *k = (const int8_t*)p.k, *v = (const int8_t*)p.v;
    tile_scores(k, v, tokens, queries, p.dim, sums);
    RowScales scales;
    tokens.find_scales(p, item, scales);
    for (int64_t j = 0; j < tokens.groups * SIXTEEN; j += SIXTEEN) {
        i32x16 exact[MOST_TILE_HEADS];
        sums_of_heads(sums + j * HEAD_COLUMNS, exact);
        const f32x16 scale = load(scales.k + j);
        for (int h = 0; h < HEADS; h++)
            store(scores[h] + j, __builtin_convertvector(exact[h], f32x16) * (scale * factors[h]));
    }
    for (int h = 0; h < HEADS; h++) weigh_tokens(p, tokens, scales, scores[h], partial + h * stride);
    for (int h = 0; h < HEADS; h++) {
        for (int64_t j = tokens.groups * SIXTEEN; j < padded; j += LANES) store(scores[h] + j, f32x16{});
        factors[h] = in_two_bytes(scores[h], padded, weights[h], weights[MOST_TILE_HEADS + h]);
    }
    for (int64_t i = 0; i < p.dim; i += PIECE) {
        tile_values(v + i, tokens, p.dim, weights[0], sums);
        for (int h = 0; h < HEADS; h++) store_dimensions(sums, h, factors[h], partial + h * stride + LANES + i);
    }
}

#else

INLINE bool decodes_on_tiles(const Problem&) { return false; }
INLINE void configure_decode_tiles(const Problem&) {}
INLINE void release_decode_tiles(const Problem&) {}
struct Sixteens {
    Sixteens(const Problem&, const Item&) {}
};
template <int HEADS> INLINE void tile_heads(const Problem&, const Item&, int64_t, const Sixteens&, float*) {}

#endif

}  // namespace tf
