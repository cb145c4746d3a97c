// The gate of a gate-up product on tiles, where its sums are: what gated.cpp and gated_mlp.cpp share.
//
// A pair of blocks is 16 columns of the gate and the same 16 of up. Nothing of the product is stored.
#pragma once

#include "gates.h"
#include "linear_rows.h"

namespace tf {

// Each field is 8 bytes wide, in the order in which gated.py packs them.
struct GatedArguments {
    LinearArguments linear;  // `out` [rows, columns / 2]
    int64_t gate;
};

#if defined(TF_AMX)

INLINE bool fits_tiles(const Layer& layer) { return on_tiles(layer) && layer.columns % (2 * COLUMNS) == 0; }

INLINE BlockPair gate_and_up(const Layer& layer, int64_t pair) {
    const int64_t block = layer.depth_blocks * BLOCK_BYTES;
    return {layer.weight + pair * block, layer.weight + (layer.columns / 2 / COLUMNS + pair) * block};
}

// Where the results of a pair go: row after row.
template <typename T> struct InRows {
    T* out;
    int64_t width;
    INLINE void put(int64_t row, int64_t pair, f32x16 v) const { store(out + row * width + pair * COLUMNS, v); }
    INLINE void put(int64_t row, int64_t pair, const Four& v) const {
        for (int64_t r = 0; r < 4; r++) put(row + r, pair, v.v[r]);
    }
};

// What a row of 16 sums of the gate and 16 of up becomes.
template <typename Act, typename Out> struct Bf16Gate {
    typedef Bf16Tiles Op;
    Act act;
    Out out;
    f32x16 bias, other;

    Bf16Gate(const Layer& l, const float*, Act a, Out o, int64_t pair)
        : act(a), out(o), bias(bias_of(l, pair * COLUMNS)), other(bias_of(l, l.columns / 2 + pair * COLUMNS)) {}
    template <int N> INLINE void finish(Rows<N> n, const float* sums, int64_t row, int64_t pair) const {
        const auto gate = act(of_rows(n, [&](int64_t r) INLINE_LAMBDA { return load(sums + r * 32) + bias; }));
        const auto up = of_rows(n, [&](int64_t r) INLINE_LAMBDA { return load(sums + r * 32 + LANES) + other; });
        out.put(row, pair, gate * up);
    }
};

template <typename Act, typename Out, typename T> struct Int8Gate {
    typedef Int8Tiles Op;
    const float* row_scales;
    Act act;
    Out out;
    Scales first, second;

    Int8Gate(const Layer& l, const float* scales, Act a, Out o, int64_t pair)
        : row_scales(scales), act(a), out(o), first(whole_scales_of<T>(l, pair * COLUMNS)),
          second(whole_scales_of<T>(l, l.columns / 2 + pair * COLUMNS)) {}
    template <int N> INLINE void finish(Rows<N> n, const int32_t* sums, int64_t row, int64_t pair) const {
        const auto scaled_by = [&](const Scales& columns, const int32_t* from) INLINE_LAMBDA {
            return of_rows(n, [&](int64_t r) INLINE_LAMBDA { return scaled(columns, load(from + r * 32), row_scales[row + r]); });
        };
        const auto gate = act(scaled_by(first, sums));
        out.put(row, pair, gate * scaled_by(second, sums + LANES));
    }
};

// More than 32 rows, shared by the threads of a team, who do not wait for each other at the end.
template <typename Gate, typename Act, typename Out>
INLINE void gated_rows(const Layer& layer, const Panel& panel, const float* row_scales, Act act, Out out) {
    // two pairs make a whole cache line of a bf16 row, which two threads would otherwise take from each other
    rows_on_tiles<typename Gate::Op, 2>(
        panel, layer.columns / 2 / COLUMNS, [&](int64_t pair) INLINE_LAMBDA { return gate_and_up(layer, pair); },
        [&]<int N>(Rows<N> n, const typename Gate::Op::Result* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            Gate(layer, row_scales, act, out, pair).finish(n, sums, row, pair);
        });
}

#endif

}  // namespace tf
