// Chunk items of paged attention on AMX tiles: bf16 queries over bf16 KV, sums and softmax in fp32.
//
// The weights are rounded to bf16 for the product with V, as every bf16 attention does.
#pragma once

#include "paged_chunk.h"
#include "tiles.h"

namespace tf {

// Whether chunks of this problem run on tiles.
INLINE bool chunks_on_tiles(const Problem& p) {
#if defined(TF_AMX)
    return tiles_granted && p.dtype == BF16 && p.kv_dtype == BF16 && p.dim % 32 == 0;
#else
    (void)p;
    return false;
#endif
}

#if defined(TF_AMX)

struct TileScratch {
    float *scores, *acc, *sums, *top, *total;
    uint16_t *q, *weights;    // [rows][dim], [rows][TILE]
    uint8_t *keys, *values;  // packed as tiles.h says: columns are tokens, and dimensions
    TileScratch(int64_t rows, int64_t dim) {
        const int64_t halves = (rows * (dim + TILE) + 2 * TILE * dim) / 2;
        float* at = scratch(rows * (2 * dim + TILE) + halves + 2 * rows);
        acc = at, at += rows * dim;
        sums = at, at += rows * dim;
        scores = at, at += rows * TILE;
        q = (uint16_t*)at, at += rows * dim / 2;
        weights = (uint16_t*)at, at += rows * TILE / 2;
        keys = (uint8_t*)at, at += TILE * dim / 2;
        values = (uint8_t*)at, at += TILE * dim / 2;
        top = at, at += rows;
        total = at;
    }
};

// One block: row r of `to` holds the r-th four bytes of each of 16 rows.
INLINE void transpose_block(const uint32_t* const* rows, int64_t offset, uint32_t* to) {
    for (int r = 0; r < 16; r++)
        for (int column = 0; column < 16; column++) to[r * 16 + column] = rows[column][offset + r];
}

// Row r of a block of V: the pairs (token 2r, token 2r + 1) of 16 dimensions.
INLINE void pair_rows(const uint16_t* even, const uint16_t* odd, uint8_t* to) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
    _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

INLINE void pack_tile(const Problem& p, const Item& item, int64_t tile, int64_t begin, int64_t end, TileScratch& memory) {
    alignas(64) static const uint16_t nothing[1024] = {};  // a row of zeros for tokens outside
    const uint16_t *k[TILE], *v[TILE];
    int64_t rows[TILE];
    const int64_t low = begin > tile ? begin - tile : 0, high = end - tile < TILE ? end - tile : TILE;
    p.find_rows(item.sequence, item.head, tile + low, tile + high, rows + low);
    for (int64_t j = 0; j < TILE; j++) {
        const bool there = j >= low && j < high;
        k[j] = there ? (const uint16_t*)p.k + rows[j] : nothing;
        v[j] = there ? (const uint16_t*)p.v + rows[j] : nothing;
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

// out [rows, columns] = left [rows, depth] x packed right; rows and columns multiples of 32.
INLINE void tiled(const uint16_t* left, int64_t depth, const uint8_t* right, int64_t rows, int64_t columns, float* out) {
    for (int64_t r = 0; r < rows; r += 32)
        for (int64_t c = 0; c < columns; c += 32)
            tile_product<Bf16Tiles, true, true>((const uint8_t*)(left + r * depth), depth * 2,
                                                right + c / 16 * (depth / 32) * BLOCK_BYTES, depth / 32,
                                                out + r * columns + c, columns * 4);
}

inline void chunk_item_on_tiles(const Problem& p, const Item& item) {
    const Chunk chunk(p, item);
    const int64_t padded = round_up(chunk.rows, 32), dim = p.dim;
    TileScratch memory(padded, dim);
    memset(memory.q + chunk.rows * dim, 0, (padded - chunk.rows) * dim * 2);
    memset(memory.weights + chunk.rows * TILE, 0, (padded - chunk.rows) * TILE * 2);
    memset(memory.acc, 0, padded * dim * sizeof(float));
    for (int64_t row = 0; row < chunk.rows; row++) {
        const int64_t token = chunk.first_token + row / chunk.group, head = item.head * chunk.group + row % chunk.group;
        memcpy(memory.q + row * dim, (const uint16_t*)p.q + token * p.q_stride_token + head * p.q_stride_head, dim * 2);
        memory.top[row] = NOTHING, memory.total[row] = 0.0f;
    }
    configure_tiles(16, 16);
    for (int64_t tile = chunk.begin / TILE * TILE; tile < chunk.end; tile += TILE) {
        pack_tile(p, item, tile, chunk.begin, chunk.end, memory);
        tiled(memory.q, dim, memory.keys, padded, TILE, memory.scores);
        for (int64_t row = 0; row < chunk.rows; row++) {
            float *scores = memory.scores + row * TILE, *acc = memory.acc + row * dim;
            for (int64_t j = 0; j < TILE; j += LANES) store(scores + j, load(scores + j) * p.scale);
            const float factor = soft_row(p, chunk, row, tile, scores, memory.top + row, memory.total + row);
            for (int64_t j = 0; j < TILE; j += LANES) store((bf16*)memory.weights + row * TILE + j, load(scores + j));
            if (factor == 1.0f) continue;
            for (int64_t i = 0; i < dim; i += LANES) store(acc + i, load(acc + i) * factor);
        }
        tiled(memory.weights, TILE, memory.values, padded, dim, memory.sums);
        for (int64_t i = 0; i < chunk.rows * dim; i += LANES)
            store(memory.acc + i, load(memory.acc + i) + load(memory.sums + i));
    }
    _tile_release();
    store_chunk(p, item, chunk, memory.acc, memory.top, memory.total);
}

#else

inline void chunk_item_on_tiles(const Problem& p, const Item& item) { chunk_item(p, item); }

#endif

}  // namespace tf
