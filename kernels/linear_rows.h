// Products of many rows on tiles: 32 rows times two packed column blocks at a time.
//
// A row's sums are added up in the order of its depth whatever the number of rows, as tile_product does.
#pragma once

#include "linear_layer.h"

namespace tf {

#if defined(TF_AMX)

constexpr int64_t TILE_ROWS = 32;
constexpr int64_t PANEL_BYTES = 1 << 20;  // of rows that are multiplied with all columns before the next ones

// What is multiplied: `rows` (32 or more) of `depth_blocks` tiles each.
struct Panel {
    const uint8_t* rows_at;
    int64_t stride, rows, depth_blocks;
};

// Two packed column blocks, which need not follow each other; second is null where there is one.
struct BlockPair {
    const uint8_t *first, *second;
};

// out [32][32] = 32 rows times a pair. Meanwhile `lines` cache lines a step of the depth are asked for, of
// each block of the next pair, from their line `asked` on.
template <typename Op, bool TWO>
INLINE void rows_times_pair(const uint8_t* left, const Panel& panel, BlockPair right, BlockPair next, int64_t asked,
                            int64_t lines, typename Op::Result* out) {
    const uint8_t* lower = left + 16 * panel.stride;
    before_tiles();
    _tile_zero(0);
    _tile_zero(2);
    if (TWO) _tile_zero(1);
    if (TWO) _tile_zero(3);
    for (int64_t k = 0; k < panel.depth_blocks; k++) {
        _tile_loadd(4, left + k * DEPTH_BYTES, panel.stride);
        _tile_loadd(6, right.first + k * BLOCK_BYTES, 64);
        _tile_loadd(5, lower + k * DEPTH_BYTES, panel.stride);
        if (TWO) _tile_loadd(7, right.second + k * BLOCK_BYTES, 64);
        Op::template multiply<0, 4, 6>();
        Op::template multiply<2, 5, 6>();
        if (TWO) Op::template multiply<1, 4, 7>();
        if (TWO) Op::template multiply<3, 5, 7>();
        for (int64_t i = 0; i < lines; i++, asked++) {
            _mm_prefetch((const char*)next.first + asked * 64, _MM_HINT_T1);
            _mm_prefetch((const char*)next.second + asked * 64, _MM_HINT_T1);
        }
    }
    _tile_stored(0, out, 128);
    _tile_stored(2, out + 16 * 32, 128);
    if (TWO) _tile_stored(1, out + 16, 128);
    if (TWO) _tile_stored(3, out + 16 * 32 + 16, 128);
}

// out [][32] = the panel's up to 16, or up to 32, rows times a pair, for which the tiles are configured; asks
// for the next pair meanwhile.
template <typename Op, bool TWO_ROWS>
INLINE void pair_product(const Panel& panel, BlockPair right, BlockPair next, typename Op::Result* out) {
    before_tiles();
    _tile_zero(0);
    _tile_zero(1);
    if (TWO_ROWS) _tile_zero(2);
    if (TWO_ROWS) _tile_zero(3);
    for (int64_t k = 0; k < panel.depth_blocks; k++) {
        _tile_loadd(4, panel.rows_at + k * DEPTH_BYTES, panel.stride);
        _tile_loadd(6, right.first + k * BLOCK_BYTES, 64);
        _tile_loadd(7, right.second + k * BLOCK_BYTES, 64);
        Op::template multiply<0, 4, 6>();
        Op::template multiply<1, 4, 7>();
        if (TWO_ROWS) {
            _tile_loadd(5, panel.rows_at + 16 * panel.stride + k * DEPTH_BYTES, panel.stride);
            Op::template multiply<2, 5, 6>();
            Op::template multiply<3, 5, 7>();
        }
        for (int64_t i = 0; i < BLOCK_BYTES; i += 64) {
            _mm_prefetch((const char*)next.first + k * BLOCK_BYTES + i, _MM_HINT_T1);
            _mm_prefetch((const char*)next.second + k * BLOCK_BYTES + i, _MM_HINT_T1);
        }
    }
    _tile_stored(0, out, 128);
    _tile_stored(1, out + 16, 128);
    if (TWO_ROWS) _tile_stored(2, out + 16 * 32, 128);
    if (TWO_ROWS) _tile_stored(3, out + 16 * 32 + 16, 128);
}

// All rows times `pairs` pairs; the threads of a team take the pairs as they come. right(pair) gives the
// BlockPair; finish(sums, row, pair) takes [32][32] sums of the rows from `row` on. The last rows overlap
// with those before them where 32 does not divide their number: computed twice, to the same bits.
template <typename Op, typename Right, typename Finish>
INLINE void rows_on_tiles(const Panel& panel, int64_t pairs, Right right, Finish finish) {
    alignas(64) typename Op::Result out[TILE_ROWS * 32];
    configure_tiles(16, 16);
    const int64_t threads = omp_get_num_threads(), tall = PANEL_BYTES / panel.stride / TILE_ROWS * TILE_ROWS;
    const int64_t height = tall > TILE_ROWS ? tall : TILE_ROWS, block_lines = panel.depth_blocks * 16;
    for (int64_t top = 0; top < panel.rows; top += height) {
        const int64_t end = top + height < panel.rows ? top + height : panel.rows;
        const int64_t steps = (end - top + TILE_ROWS - 1) / TILE_ROWS, a_step = (16 + steps - 1) / steps;
#pragma omp for schedule(dynamic) nowait
        for (int64_t pair = 0; pair < pairs; pair++) {
            const BlockPair now = right(pair), next = right(pair + threads < pairs ? pair + threads : pair);
            for (int64_t step = 0; step < steps; step++) {
                const int64_t at = top + step * TILE_ROWS, row = at + TILE_ROWS < end ? at : end - TILE_ROWS;
                const int64_t asked = step * panel.depth_blocks * a_step, lines = asked < block_lines ? a_step : 0;
                const uint8_t* left = panel.rows_at + row * panel.stride;
                if (now.second)
                    rows_times_pair<Op, true>(left, panel, now, next, asked, lines, out);
                else
                    rows_times_pair<Op, false>(left, panel, now, next, asked, lines, out);
                finish(out, row, pair);
            }
        }
    }
    _tile_release();
}

INLINE i32x16 load(const int32_t* p) { i32x16 v; memcpy(&v, p, 64); return v; }

template <typename T> INLINE void store_pair(T* to, f32x16 first, f32x16 second, int64_t n) {
    store_n(to, first, n);
    if (n > LANES) store_n(to + LANES, second, n - LANES);
}
template <> INLINE void store_pair(bf16* to, f32x16 first, f32x16 second, int64_t n) {
#if defined(__AVX512BF16__)
    if (n >= 32) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
        return;
    }
#endif
    store_n(to, first, n);
    if (n > LANES) store_n(to + LANES, second, n - LANES);
}

// Pair after pair of the layer's blocks, in their order.
INLINE BlockPair neighbours(const Layer& layer, int64_t pair) {
    const int64_t block = layer.depth_blocks * BLOCK_BYTES;
    const uint8_t* first = layer.weight + 2 * pair * block;
    return {first, (2 * pair + 1) * COLUMNS < layer.columns ? first + block : nullptr};
}

INLINE int64_t pairs_of(const Layer& layer) { return (layer.columns + 2 * COLUMNS - 1) / (2 * COLUMNS); }

inline void bf16_rows(const Layer& layer) {
    const Panel panel = {(const uint8_t*)layer.x, layer.x_stride * (int64_t)sizeof(bf16), layer.rows, layer.depth_blocks};
    rows_on_tiles<Bf16Tiles>(
        panel, pairs_of(layer), [&](int64_t pair) INLINE_LAMBDA { return neighbours(layer, pair); },
        [&](const float* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            const int64_t column = pair * 32, n = layer.columns - column;
            const f32x16 bias = bias_of(layer, column), other = n > LANES ? bias_of(layer, column + LANES) : f32x16{};
            for (int64_t r = 0; r < TILE_ROWS; r++)
                store_pair((bf16*)layer.out + (row + r) * layer.columns + column, load(sums + r * 32) + bias,
                           load(sums + r * 32 + LANES) + other, n);
        });
}

template <typename T> void int8_rows(const Layer& layer, const Quantized& x) {
    const Panel panel = {(const uint8_t*)x.values, x.stride, layer.rows, layer.depth_blocks};
    rows_on_tiles<Int8Tiles>(
        panel, pairs_of(layer), [&](int64_t pair) INLINE_LAMBDA { return neighbours(layer, pair); },
        [&](const int32_t* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            const int64_t column = pair * 32, n = layer.columns - column;
            const Scales first = scales_of<T>(layer, column);
            const Scales second = n > LANES ? scales_of<T>(layer, column + LANES) : Scales{};
            for (int64_t r = 0; r < TILE_ROWS; r++)
                store_pair((T*)layer.out + (row + r) * layer.columns + column,
                           scaled(layer, first, load(sums + r * 32), x.scales[row + r]),
                           scaled(layer, second, load(sums + r * 32 + LANES), x.scales[row + r]), n);
        });
}

// More rows than one tile_product takes.
INLINE bool has_many_rows(const Layer& layer) { return layer.rows > TILE_ROWS && on_tiles(layer); }

#else

INLINE bool has_many_rows(const Layer&) { return false; }
inline void bf16_rows(const Layer&) {}
template <typename T> void int8_rows(const Layer&, const Quantized&) {}

#endif

}  // namespace tf
