// Keys and values of 64 tokens as chunk items on AMX tiles multiply them, in bf16.
//
// The items of a sequence and head see the same ones: they are packed once for all of these, unless that takes too
// much memory. What a tile holds is the same either way.
#pragma once

#include "paged_problem.h"
#include "quads.h"

namespace tf {

// Whether chunks of this problem run on tiles.
INLINE bool chunks_on_tiles(const Problem& p) {
#if defined(TF_AMX)
    const bool kv_fits = p.kv_dtype == BF16 || p.kv_dtype == I8;
    return tiles_granted && p.dtype == BF16 && kv_fits && p.dim % 32 == 0 && p.dim <= 512 && p.scale > 0;
#else
    (void)p;
    return false;
#endif
}

#if defined(TF_AMX)

static_assert(TILE == 16 * QUAD);

struct PackedTile {
    uint8_t *keys, *values;  // [TILE][dim]; [quads of dimensions][TILE / 32][QUAD tiles]: dimensions x keys

    static INLINE int64_t key_bytes(int64_t dim) { return TILE * dim * 2; }
    static INLINE int64_t bytes(int64_t dim) { return key_bytes(dim) + round_up(dim, 64) / 64 * QUAD_BYTES * TILE / 32; }
    PackedTile() = default;
    PackedTile(int64_t dim, uint8_t* at) : keys(at), values(at + key_bytes(dim)) {}
};

// Rows of int8 KV of the tokens [begin, begin + count), x their scales, as bf16.
INLINE void widen(const Problem& p, int64_t s, int64_t head, const void* codes, const float* scales, const int64_t* rows,
                  int64_t begin, int64_t count, uint16_t* to) {
    float scale[TILE];
    p.find_scales(scales, s, head, begin, begin + count, scale);
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < p.dim; i += LANES)
            store((bf16*)to + j * p.dim + i, load((const i8*)codes + rows[j] + i) * scale[j]);
}

// Keys as they are, values transposed; zeros for tokens outside [begin, end).
inline void pack_tile(const Problem& p, int64_t s, int64_t head, int64_t tile, int64_t begin, int64_t end, PackedTile to) {
    alignas(64) static const uint16_t nothing[1024] = {};
    alignas(64) uint16_t wide[TILE * 512];
    const uint16_t *v[TILE], *values = (const uint16_t*)p.v;
    int64_t rows[TILE];
    const int64_t low = begin > tile ? begin - tile : 0, high = end - tile < TILE ? end - tile : TILE;
    uint16_t* keys = (uint16_t*)to.keys;
    p.find_rows(s, head, tile + low, tile + high, rows + low);
    memset(keys, 0, low * p.dim * 2);
    memset(keys + high * p.dim, 0, (TILE - high) * p.dim * 2);
    if (p.kv_dtype == I8) {
        widen(p, s, head, p.k, p.k_scales, rows + low, tile + low, high - low, keys + low * p.dim);
        widen(p, s, head, p.v, p.v_scales, rows + low, tile + low, high - low, wide);
        values = wide;
        for (int64_t j = low; j < high; j++) rows[j] = (j - low) * p.dim;
    } else {
        for (int64_t j = low; j < high; j++) memcpy(keys + j * p.dim, (const uint16_t*)p.k + rows[j], p.dim * 2);
    }
    for (int64_t j = 0; j < TILE; j++) v[j] = j >= low && j < high ? values + rows[j] : nothing;
    for (int64_t block = 0; block < p.dim / 16; block++)
        for (int64_t step = 0; step < TILE / 32; step++) {
            __m512i a[16];
            for (int r = 0; r < 16; r++)
                a[r] = pairs_of_rows(v[32 * step + 2 * r] + block * 16, v[32 * step + 2 * r + 1] + block * 16);
            transpose(a);
            uint8_t* at = to.values + ((block / QUAD * (TILE / 32) + step) * QUAD + block % QUAD) * BLOCK_BYTES;
            for (int r = 0; r < 16; r++) _mm512_store_si512(at + r * 64, a[r]);
        }
}

INLINE int64_t packed_bytes(const Problem& p) { return PackedTile::bytes(p.dim); }

// A tile for all queries of a sequence.
inline void pack_shared(const Problem& p, int64_t s, int64_t head, int64_t tile, uint8_t* to) {
    pack_tile(p, s, head, tile, p.first_visible(p.kv_lens[s] - p.query_len(s)), p.kv_lens[s], PackedTile(p.dim, to));
}

#else

INLINE int64_t packed_bytes(const Problem&) { return 0; }
inline void pack_shared(const Problem&, int64_t, int64_t, int64_t, uint8_t*) {}

#endif

}  // namespace tf
