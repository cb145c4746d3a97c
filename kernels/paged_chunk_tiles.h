// Chunk items of paged attention on AMX tiles: bf16 queries over bf16 KV, or int8 KV widened to bf16; sums and
// softmax in fp32.
//
// The weights are rounded to bf16 for the product with V, as every bf16 attention does.
#pragma once

#include "paged_chunk.h"
#include "tiles.h"

namespace tf {

// Whether chunks of this problem run on tiles.
INLINE bool chunks_on_tiles(const Problem& p) {
#if defined(TF_AMX)
    return tiles_granted && p.dtype == BF16 && (p.kv_dtype == BF16 || p.kv_dtype == I8) && p.dim % 32 == 0;
#else
    (void)p;
    return false;
#endif
}

#if defined(TF_AMX)

constexpr int64_t STRIP = 32;  // query rows of one product
constexpr int64_t BAND = 96;   // rows that are scored, then weighed, then summed: what a product stores has
                               // left the store buffer, from which tiles load slowly, before the next one reads it

struct TileScratch {
    float *scores, *acc, *top, *total;  // [BAND][TILE], [rows][dim]; top in base 2
    uint16_t *q, *weights;              // [rows][dim], [BAND][TILE]
    uint8_t *keys, *values;             // packed as tiles.h says: columns are tokens, and dimensions
    uint16_t *wide_keys, *wide_values;  // [TILE][dim], of int8 KV
    TileScratch(int64_t rows, int64_t dim) {
        const int64_t halves = (rows * dim + BAND * TILE + 4 * TILE * dim) / 2;
        float* at = scratch(rows * dim + BAND * TILE + halves + 2 * rows);
        acc = at, at += rows * dim;
        scores = at, at += BAND * TILE;
        q = (uint16_t*)at, at += rows * dim / 2;
        weights = (uint16_t*)at, at += BAND * TILE / 2;
        keys = (uint8_t*)at, at += TILE * dim / 2;
        values = (uint8_t*)at, at += TILE * dim / 2;
        wide_keys = (uint16_t*)at, at += TILE * dim / 2;
        wide_values = (uint16_t*)at, at += TILE * dim / 2;
        top = at, at += rows;
        total = at;
    }
};

// One block: row r of `to` holds the r-th four bytes of each of 16 rows.
INLINE void transpose_block(const uint32_t* const* rows, int64_t offset, uint32_t* to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + offset);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    // now a[4 g + c] holds, in its quarter q, four bytes number 4 q + c of rows 4 g .. 4 g + 3
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88), high = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i other_low = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        const __m512i other_high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        _mm512_storeu_si512(to + c * 16, _mm512_shuffle_i32x4(low, other_low, 0x88));
        _mm512_storeu_si512(to + (4 + c) * 16, _mm512_shuffle_i32x4(high, other_high, 0x88));
        _mm512_storeu_si512(to + (8 + c) * 16, _mm512_shuffle_i32x4(low, other_low, 0xdd));
        _mm512_storeu_si512(to + (12 + c) * 16, _mm512_shuffle_i32x4(high, other_high, 0xdd));
    }
}

// Row r of a block of V: the pairs (token 2r, token 2r + 1) of 16 dimensions.
INLINE void pair_rows(const uint16_t* even, const uint16_t* odd, uint8_t* to) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Rows of int8 KV of the tokens [begin, begin + count), x their scales, as bf16.
INLINE void widen(const Problem& p, const Item& item, const void* codes, const float* scales, const int64_t* rows,
                  int64_t begin, int64_t count, uint16_t* to) {
    float scale[TILE];
    p.find_scales(scales, item.sequence, item.head, begin, begin + count, scale);
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < p.dim; i += LANES)
            store((bf16*)to + j * p.dim + i, load((const i8*)codes + rows[j] + i) * scale[j]);
}

INLINE void pack_tile(const Problem& p, const Item& item, int64_t tile, int64_t begin, int64_t end, TileScratch& memory) {
    alignas(64) static const uint16_t nothing[1024] = {};  // a row of zeros for tokens outside
    const uint16_t *k[TILE], *v[TILE];
    int64_t rows[TILE];
    const int64_t low = begin > tile ? begin - tile : 0, high = end - tile < TILE ? end - tile : TILE;
    p.find_rows(item.sequence, item.head, tile + low, tile + high, rows + low);
    const uint16_t *keys = (const uint16_t*)p.k, *values = (const uint16_t*)p.v;
    if (p.kv_dtype == I8) {
        widen(p, item, p.k, p.k_scales, rows + low, tile + low, high - low, memory.wide_keys);
        widen(p, item, p.v, p.v_scales, rows + low, tile + low, high - low, memory.wide_values);
        keys = memory.wide_keys, values = memory.wide_values;
        for (int64_t j = low; j < high; j++) rows[j] = (j - low) * p.dim;
    }
    for (int64_t j = 0; j < TILE; j++) {
        const bool there = j >= low && j < high;
        k[j] = there ? keys + rows[j] : nothing;
        v[j] = there ? values + rows[j] : nothing;
    }
    const int64_t depth = p.dim / 32;
    for (int64_t block = 0; block < TILE / 16; block++)
        for (int64_t d = 0; d < depth; d++)
            transpose_block((const uint32_t* const*)k + block * 16, d * 16,
                            (uint32_t*)(memory.keys + (block * depth + d) * BLOCK_BYTES));
    for (int64_t block = 0; block < p.dim / 16; block++)
        for (int64_t j = 0; j < TILE; j += 2)
            pair_rows(v[j] + block * 16, v[j + 1] + block * 16, memory.values + block * TILE * 32 + j * 32);
}

// out [STRIP, columns] = (ADD ? out : 0) + left [STRIP, depth] x packed right; columns a multiple of 32.
template <bool ADD>
INLINE void strip_product(const uint16_t* left, int64_t depth, const uint8_t* right, int64_t columns, float* out) {
    const int64_t blocks = depth / 32, stride = columns * 4;
    before_tiles();
    for (int64_t c = 0; c < columns; c += 32) {
        const uint8_t *first = right + c / 16 * blocks * BLOCK_BYTES, *second = first + blocks * BLOCK_BYTES;
        float *upper = out + c, *lower = upper + 16 * columns;
        if (ADD) {
            _tile_loadd(0, upper, stride);
            _tile_loadd(1, upper + 16, stride);
            _tile_loadd(2, lower, stride);
            _tile_loadd(3, lower + 16, stride);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t k = 0; k < blocks; k++) {
            _tile_loadd(4, left + k * 32, depth * 2);
            _tile_loadd(6, first + k * BLOCK_BYTES, 64);
            _tile_loadd(5, left + 16 * depth + k * 32, depth * 2);
            _tile_loadd(7, second + k * BLOCK_BYTES, 64);
            Bf16Tiles::multiply<0, 4, 6>();
            Bf16Tiles::multiply<2, 5, 6>();
            Bf16Tiles::multiply<1, 4, 7>();
            Bf16Tiles::multiply<3, 5, 7>();
        }
        _tile_stored(0, upper, stride);
        _tile_stored(1, upper + 16, stride);
        _tile_stored(2, lower, stride);
        _tile_stored(3, lower + 16, stride);
    }
}

// 2^x for x <= 0 within 2e-6 of it; 0 below -126 (what lies there is slow to compute with); a NaN stays one.
INLINE f32x16 power_of_two(f32x16 x) {
    const __m512 lowest = _mm512_set1_ps(-126.0f), bounded = _mm512_max_ps(lowest, (__m512)x);  // NaN: the second one
    const __m512 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const f32x16 r = (f32x16)_mm512_sub_ps(bounded, whole);
    f32x16 p = r * 1.339887440e-3f + 9.618437357e-3f;
    p = p * r + 5.550332548e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    const __mmask16 there = _mm512_cmp_ps_mask((__m512)x, lowest, _CMP_NLT_UQ);
    return (f32x16)_mm512_maskz_scalef_ps(there, (__m512)p, whole);
}

// Scores of one row, not scaled yet, become weights in bf16. Returns the factor for what has been summed up.
INLINE float weigh_row(const Problem& p, int64_t low, int64_t high, float scale, float* scores, uint16_t* weights,
                       float* top, float* total) {
    constexpr int VECTORS = TILE / LANES;
    constexpr float LOG2_E = 1.44269504088896341f;
    if (low >= TILE || high <= 0) {
        memset(weights, 0, TILE * 2);
        return 1.0f;
    }
    if (p.softcap > 0) {
        for (int64_t j = 0; j < TILE; j += LANES) store(scores + j, load(scores + j) * p.scale);
        soften(scores, TILE, p.softcap);
        scale = LOG2_E;
    }
    f32x16 v[VECTORS];
    for (int i = 0; i < VECTORS; i++) v[i] = load(scores + i * LANES) * scale;
    if (low > 0 || high < TILE) {
        const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int i = 0; i < VECTORS; i++) {
            const i32x16 at = lane + i * (int32_t)LANES;
            v[i] = at < (int32_t)low ? splat(NOTHING) : v[i];
            v[i] = at >= (int32_t)high ? splat(NOTHING) : v[i];
        }
    }
    const float before = *top, here = max(max(max(v[0], v[1]), max(v[2], v[3])));
    const float now = before > here ? before : here;
    f32x16 fresh = {};
    for (int i = 0; i < VECTORS; i++) {
        v[i] = power_of_two(v[i] - now);
        fresh += v[i];
    }
    for (int i = 0; i < VECTORS; i += 2)
        _mm512_storeu_si512(weights + i * LANES, (__m512i)_mm512_cvtne2ps_pbh((__m512)v[i + 1], (__m512)v[i]));
    // before the first score there are no sums yet
    const float factor = before == now || before == NOTHING ? 1.0f : power_of_two(splat(before - now))[0];
    *top = now;
    *total = *total * factor + sum(fresh);
    return factor;
}

// Query rows [band, end) of an item, at most BAND, against one packed tile.
INLINE void band_on_tiles(const Problem& p, const Chunk& chunk, int64_t band, int64_t end, int64_t tile,
                          TileScratch& memory) {
    const int64_t dim = p.dim, padded = round_up(end, STRIP);
    const float scale = p.scale * 1.44269504088896341f;
    for (int64_t row = band; row < padded; row += STRIP)
        strip_product<false>(memory.q + row * dim, dim, memory.keys, TILE, memory.scores + (row - band) * TILE);
    int64_t at = chunk.position + band / chunk.group, head = band % chunk.group;
    for (int64_t row = band; row < end; row++, head++) {
        if (head == chunk.group) at++, head = 0;
        const int64_t here = (row - band) * TILE;
        const float factor = weigh_row(p, p.first_visible(at) - tile, at + 1 - tile, scale, memory.scores + here,
                                       memory.weights + here, memory.top + row, memory.total + row);
        if (factor == 1.0f) continue;
        float* sums = memory.acc + row * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(sums + i, load(sums + i) * factor);
    }
    memset(memory.weights + (end - band) * TILE, 0, (padded - end) * TILE * 2);
    for (int64_t row = band; row < padded; row += STRIP)
        strip_product<true>(memory.weights + (row - band) * TILE, TILE, memory.values, dim, memory.acc + row * dim);
}

inline void chunk_item_on_tiles(const Problem& p, const Item& item) {
    const Chunk chunk(p, item);
    const int64_t dim = p.dim, padded = round_up(chunk.rows, STRIP);
    TileScratch memory(padded, dim);
    memset(memory.q + chunk.rows * dim, 0, (padded - chunk.rows) * dim * 2);
    memset(memory.acc, 0, padded * dim * sizeof(float));
    for (int64_t row = 0; row < chunk.rows; row++) {
        const int64_t token = chunk.first_token + row / chunk.group, head = item.head * chunk.group + row % chunk.group;
        memcpy(memory.q + row * dim, (const uint16_t*)p.q + token * p.q_stride_token + head * p.q_stride_head, dim * 2);
        memory.top[row] = NOTHING, memory.total[row] = 0.0f;
    }
    configure_tiles(16, 16);
    for (int64_t tile = chunk.begin / TILE * TILE; tile < chunk.end; tile += TILE) {
        pack_tile(p, item, tile, chunk.begin, chunk.end, memory);
        // rows of tokens before the tile see nothing of it
        const int64_t hidden = tile > chunk.position ? (tile - chunk.position) * chunk.group / STRIP * STRIP : 0;
        for (int64_t band = hidden; band < chunk.rows; band += BAND)
            band_on_tiles(p, chunk, band, band + BAND < chunk.rows ? band + BAND : chunk.rows, tile, memory);
    }
    _tile_release();
    for (int64_t row = 0; row < chunk.rows; row++) memory.top[row] *= 0.693147180559945309f;
    store_chunk(p, item, chunk, memory.acc, memory.top, memory.total);
}

#else

inline void chunk_item_on_tiles(const Problem& p, const Item& item) { chunk_item(p, item); }

#endif

}  // namespace tf
