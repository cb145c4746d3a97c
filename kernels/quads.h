// Bf16 products of four tiles a time, whose right side they share, made while something else is computed.
#pragma once

#include "tiles.h"

namespace tf {

#if defined(TF_AMX)

constexpr int64_t QUAD = 4;  // result tiles of one product
constexpr int64_t QUAD_BYTES = QUAD * BLOCK_BYTES;

// Row r becomes what was the r-th four bytes of each of 16 rows.
INLINE void transpose(__m512i* a) {
    __m512i b[16];
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
        b[c] = _mm512_shuffle_i32x4(low, other_low, 0x88);
        b[4 + c] = _mm512_shuffle_i32x4(high, other_high, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, other_low, 0xdd);
        b[12 + c] = _mm512_shuffle_i32x4(high, other_high, 0xdd);
    }
    for (int i = 0; i < 16; i++) a[i] = b[i];
}

// The pairs (even, odd) of 16 dimensions of two rows.
INLINE __m512i pairs_of_rows(const uint16_t* even, const uint16_t* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)even));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Four tiles that follow each other: out[i] = left[i] x right; a step of the depth at a time.
struct QuadProduct {
    const uint8_t *left, *right;
    int64_t tile_stride, row_stride, step_stride, depth;  // bytes within left; steps
    float* out;

    INLINE void step(int64_t k) const {
        if (k == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        const uint8_t* from = left + k * step_stride;
        _tile_loadd(4, right + k * BLOCK_BYTES, 64);
        _tile_loadd(5, from, row_stride);
        _tile_dpbf16ps(0, 5, 4);
        _tile_loadd(6, from + tile_stride, row_stride);
        _tile_dpbf16ps(1, 6, 4);
        _tile_loadd(7, from + 2 * tile_stride, row_stride);
        _tile_dpbf16ps(2, 7, 4);
        _tile_loadd(5, from + 3 * tile_stride, row_stride);
        _tile_dpbf16ps(3, 5, 4);
        if (k + 1 < depth) return;
        _tile_stored(0, out, 64);
        _tile_stored(1, out + 256, 64);
        _tile_stored(2, out + 512, 64);
        _tile_stored(3, out + 768, 64);
    }
};

// Products that are made one after the other, some steps whenever there is time for it.
struct Meanwhile {
    QuadProduct products[9];
    int64_t count = 0, at = 0, k = 0, steps = 0;

    INLINE void add(const QuadProduct& product) { products[count++] = product, steps += product.depth; }
    INLINE void advance(int64_t n) {
        before_tiles();
        for (; n > 0 && at < count; n--) {
            products[at].step(k);
            if (++k == products[at].depth) k = 0, at++;
        }
    }
};

#endif

}  // namespace tf
