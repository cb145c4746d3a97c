// Products of many rows on tiles: 32 rows times two packed column blocks at a time.
//
// A row's sums are added up in the order of its depth whatever the number of rows, as tile_product does.
#pragma once

#include "four.h"
#include "linear_layer.h"

namespace tf {

#if defined(TF_AMX)

constexpr int64_t PANEL_BYTES = 1 << 20;  // of rows that are multiplied with all columns before the next ones
constexpr int64_t KEPT_DEPTH = 12;        // tiles of each block of a pair that stay in the first cache

// What is multiplied: `rows` of `depth_blocks` tiles each. Rows that lie in tiles are filled up to a multiple of 32;
// others are 32 or more, except for pair_product.
struct Panel {
    const uint8_t* rows_at;
    int64_t stride, rows, depth_blocks;  // bytes a row: of 16 in tiles, a sixteenth
    bool in_tiles;

    INLINE int64_t row_step() const { return in_tiles ? DEPTH_BYTES : stride; }  // within a tile
    INLINE int64_t depth_step() const { return in_tiles ? BLOCK_BYTES : DEPTH_BYTES; }
};

// Two packed column blocks, which need not follow each other; second is null where there is one.
struct BlockPair {
    const uint8_t *first, *second;
};

// 32 rows times a pair, in the tiles 0-3. What lay there goes to `before` [32][32] first, each tile before it begins
// again: the next product then need not wait for all four. The first KEPT_DEPTH tiles of the pair's blocks stay in the
// first cache for the next rows; all else is streamed past it. meanwhile(k) is called at each step of the depth.
template <typename Op, bool TWO, typename Meanwhile>
INLINE void rows_times_pair(const uint8_t* left, const Panel& panel, BlockPair right, typename Op::Result* before, Meanwhile meanwhile) {
    const uint8_t* lower = left + 16 * panel.stride;
    const int64_t row_step = panel.row_step(), depth_step = panel.depth_step();
    const auto load_step = [&](int64_t k) INLINE_LAMBDA {
        _tile_stream_loadd(4, left + k * depth_step, row_step);
        _tile_stream_loadd(5, lower + k * depth_step, row_step);
        if (k < KEPT_DEPTH) {
            _tile_loadd(6, right.first + k * BLOCK_BYTES, 64);
            if (TWO) _tile_loadd(7, right.second + k * BLOCK_BYTES, 64);
        } else {
            _tile_stream_loadd(6, right.first + k * BLOCK_BYTES, 64);
            if (TWO) _tile_stream_loadd(7, right.second + k * BLOCK_BYTES, 64);
        }
    };
    before_tiles();
    load_step(0);
    _tile_stored(0, before, 128);
    _tile_zero(0);
    Op::template multiply<0, 4, 6>();
    _tile_stored(2, before + 16 * 32, 128);
    _tile_zero(2);
    Op::template multiply<2, 5, 6>();
    _tile_stored(1, before + 16, 128);
    _tile_zero(1);
    if (TWO) Op::template multiply<1, 4, 7>();
    _tile_stored(3, before + 16 * 32 + 16, 128);
    _tile_zero(3);
    if (TWO) Op::template multiply<3, 5, 7>();
    meanwhile(0);
    for (int64_t k = 1; k < panel.depth_blocks; k++) {
        load_step(k);
        Op::template multiply<0, 4, 6>();
        Op::template multiply<2, 5, 6>();
        if (TWO) Op::template multiply<1, 4, 7>();
        if (TWO) Op::template multiply<3, 5, 7>();
        meanwhile(k);
    }
}

template <typename Result> INLINE void store_sums(Result* to) {
    _tile_stored(0, to, 128);
    _tile_stored(1, to + 16, 128);
    _tile_stored(2, to + 16 * 32, 128);
    _tile_stored(3, to + 16 * 32 + 16, 128);
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

// As many rows whose sums are finished together.
template <int N> struct Rows {};
template <typename F> INLINE f32x16 of_rows(Rows<1>, F f) { return f(0); }
template <typename F> INLINE Four of_rows(Rows<4>, F f) { return {{f(0), f(1), f(2), f(3)}}; }

// All rows times `pairs` pairs; the threads of a team take AT_ONCE pairs as they come. right(pair) gives the
// BlockPair; finish(Rows<N>, sums, row, pair) takes the 32 sums of N rows each, while the tiles multiply for the next
// ones. Where 32 does not divide the number of rows, those that do not lie in tiles overlap at the end: computed
// twice, to the same bits.
template <typename Op, int64_t AT_ONCE, typename Right, typename Finish>
INLINE void rows_on_tiles(const Panel& panel, int64_t pairs, Right right, Finish finish) {
    alignas(64) typename Op::Result sums[TILE_ROWS * 32];  // of the rows before, while the tiles hold those of the next
    configure_tiles(16, 16);
    const int64_t threads = omp_get_num_threads(), depth = panel.depth_blocks, block_lines = depth * 16;
    const int64_t tall = PANEL_BYTES / (depth * DEPTH_BYTES) / TILE_ROWS * TILE_ROWS, height = tall > TILE_ROWS ? tall : TILE_ROWS;
    int64_t left_row = 0, left_pair = -1;  // whose sums are to be finished
    const auto finish_four = [&](const typename Op::Result* from, int64_t r) INLINE_LAMBDA {
        const int64_t row = left_row + r;
        if (row + 4 <= panel.rows) finish(Rows<4>{}, from + r * 32, row, left_pair);
        else for (int64_t i = 0; row + i < panel.rows; i++) finish(Rows<1>{}, from + (r + i) * 32, row + i, left_pair);
    };
    for (int64_t top = 0; top < panel.rows; top += height) {
        const int64_t end = top + height < panel.rows ? top + height : panel.rows;
        const int64_t steps = (end - top + TILE_ROWS - 1) / TILE_ROWS, a_step = (16 + steps - 1) / steps;
#pragma omp for schedule(dynamic, AT_ONCE) nowait
        for (int64_t pair = 0; pair < pairs; pair++) {
            const int64_t after = pair + 1 + ((pair + 1) % AT_ONCE ? 0 : (threads - 1) * AT_ONCE);
            const BlockPair here = right(pair), next = right(after < pairs ? after : pair);
            for (int64_t step = 0; step < steps; step++) {
                const int64_t at = top + step * TILE_ROWS, row = panel.in_tiles || at + TILE_ROWS < end ? at : end - TILE_ROWS;
                const int64_t asked = step * depth * a_step, lines = asked < block_lines ? a_step : 0;
                int64_t finished = left_pair >= 0 ? 0 : TILE_ROWS, due = 0;  // an eighth of the rows each time due passes the depth
                const auto meanwhile = [&](int64_t k) INLINE_LAMBDA {
                    for (due += TILE_ROWS / 4; due >= depth; due -= depth, finished += 4)
                        if (finished < TILE_ROWS) finish_four(sums, finished);
                    for (int64_t line = asked + k * lines; line < asked + (k + 1) * lines; line++) {
                        _mm_prefetch((const char*)next.first + line * 64, _MM_HINT_T1);
                        _mm_prefetch((const char*)next.second + line * 64, _MM_HINT_T1);
                    }
                };
                const uint8_t* left = panel.rows_at + row * panel.stride;
                if (here.second) rows_times_pair<Op, true>(left, panel, here, sums, meanwhile);
                else rows_times_pair<Op, false>(left, panel, here, sums, meanwhile);
                left_row = row, left_pair = pair;
            }
        }
    }
    if (left_pair >= 0) {
        store_sums(sums);
        for (int64_t r = 0; r < TILE_ROWS; r += 4) finish_four(sums, r);
    }
    _tile_release();
}

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

INLINE Panel panel_of(const Layer& layer) {
    return {(const uint8_t*)layer.x, layer.x_stride * (int64_t)sizeof(bf16), layer.rows, layer.depth_blocks, false};
}
INLINE Panel panel_of(const Layer& layer, const Quantized& x) {
    return {(const uint8_t*)x.values, x.stride, layer.rows, layer.depth_blocks, x.in_tiles};
}

inline void bf16_rows(const Layer& layer, const Panel& panel) {
    rows_on_tiles<Bf16Tiles, 1>(
        panel, pairs_of(layer), [&](int64_t pair) INLINE_LAMBDA { return neighbours(layer, pair); },
        [&]<int N>(Rows<N>, const float* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            const int64_t column = pair * 32, n = layer.columns - column;
            const f32x16 bias = bias_of(layer, column), other = n > LANES ? bias_of(layer, column + LANES) : f32x16{};
            for (int64_t r = 0; r < N; r++)
                store_pair((bf16*)layer.out + (row + r) * layer.columns + column, load(sums + r * 32) + bias,
                           load(sums + r * 32 + LANES) + other, n);
        });
}

template <typename T> void int8_rows(const Layer& layer, const Panel& panel, const float* row_scales) {
    rows_on_tiles<Int8Tiles, 1>(
        panel, pairs_of(layer), [&](int64_t pair) INLINE_LAMBDA { return neighbours(layer, pair); },
        [&]<int N>(Rows<N>, const int32_t* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            const int64_t column = pair * 32, n = layer.columns - column;
            const Scales first = n >= 32 ? whole_scales_of<T>(layer, column) : scales_of<T>(layer, column);
            const Scales second = n >= 32   ? whole_scales_of<T>(layer, column + LANES)
                                  : n > LANES ? scales_of<T>(layer, column + LANES)
                                              : Scales{};
            T* to = (T*)layer.out + row * layer.columns + column;
            for (int64_t r = 0; r < N; r++, to += layer.columns)
                store_pair(to, scaled(first, load(sums + r * 32), row_scales[row + r]),
                           scaled(second, load(sums + r * 32 + LANES), row_scales[row + r]), n);
        });
}

#else

struct Panel {
};
INLINE Panel panel_of(const Layer&) { return {}; }
INLINE Panel panel_of(const Layer&, const Quantized&) { return {}; }
inline void bf16_rows(const Layer&, const Panel&) {}
template <typename T> void int8_rows(const Layer&, const Panel&, const float*) {}

#endif

}  // namespace tf
