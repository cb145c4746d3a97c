// A gate-up product with its gate in the same pass; see gated.py for the contract.
//
// The weight lies as for linear: a pair of blocks is 16 columns of the gate and the same 16 of up. What tiles
// do not take is computed as the two operations one after the other.
#include "gates.h"
#include "linear_rows.h"

using namespace tf;

EXPORT void tf_linear_int8(const LinearArguments* arguments);
EXPORT void tf_linear_bf16(const LinearArguments* arguments);

// Each field is 8 bytes wide, in the order in which gated.py packs them.
struct GatedArguments {
    LinearArguments linear;  // `out` [rows, columns / 2]
    int64_t gate;
};

namespace {

template <typename T> INLINE void gate_rows(const T* wide, T* out, int64_t rows, int64_t width, int64_t gate) {
    with_gate<T>(gate, [&](auto act) INLINE_LAMBDA {
#pragma omp parallel for if (rows * width > SERIAL_ELEMENTS / 2) schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = 0; i < width; i += LANES) {
                const T* from = wide + row * 2 * width + i;
                store_n(out + row * width + i, act(load_n(from, width - i)) * load_n(from + width, width - i), width - i);
            }
    });
}

void one_after_the_other(const GatedArguments& a, void (*linear)(const LinearArguments*)) {
    static thread_local std::vector<float> wide;
    const int64_t needed = a.linear.rows * a.linear.columns;
    if ((int64_t)wide.size() < needed) wide.resize(needed);
    LinearArguments product = a.linear;
    product.out = wide.data();
    linear(&product);
    with_dtype(a.linear.dtype, [&]<typename T>(T*) {
        gate_rows((const T*)wide.data(), (T*)a.linear.out, a.linear.rows, a.linear.columns / 2, a.gate);
    });
}

#if defined(TF_AMX)

INLINE bool fits_tiles(const Layer& layer) { return on_tiles(layer) && layer.columns % (2 * COLUMNS) == 0; }

INLINE BlockPair gate_and_up(const Layer& layer, int64_t pair) {
    const int64_t block = layer.depth_blocks * BLOCK_BYTES;
    return {layer.weight + pair * block, layer.weight + (layer.columns / 2 / COLUMNS + pair) * block};
}

// What a row of 16 sums of the gate and 16 of up becomes.
template <typename Act> struct Bf16Gate {
    typedef Bf16Tiles Op;
    const Layer& layer;
    Act act;
    f32x16 bias, other;

    Bf16Gate(const Layer& l, const Quantized&, Act a, int64_t pair)
        : layer(l), act(a), bias(bias_of(l, pair * COLUMNS)), other(bias_of(l, l.columns / 2 + pair * COLUMNS)) {}
    template <int N> INLINE void finish(Rows<N> n, const float* sums, int64_t row, int64_t pair) const {
        const auto gate = act(of_rows(n, [&](int64_t r) INLINE_LAMBDA { return load(sums + r * 32) + bias; }));
        const auto up = of_rows(n, [&](int64_t r) INLINE_LAMBDA { return load(sums + r * 32 + LANES) + other; });
        to_rows(gate * up, [&](int64_t r, f32x16 v) INLINE_LAMBDA {
            store((bf16*)layer.out + (row + r) * (layer.columns / 2) + pair * COLUMNS, v);
        });
    }
};

template <typename Act, typename T> struct Int8Gate {
    typedef Int8Tiles Op;
    const Layer& layer;
    const Quantized& x;
    Act act;
    Scales first, second;

    Int8Gate(const Layer& l, const Quantized& q, Act a, int64_t pair)
        : layer(l), x(q), act(a), first(scales_of<T>(l, pair * COLUMNS)),
          second(scales_of<T>(l, l.columns / 2 + pair * COLUMNS)) {}
    template <int N> INLINE void finish(Rows<N> n, const int32_t* sums, int64_t row, int64_t pair) const {
        const auto scaled_by = [&](const Scales& columns, const int32_t* from) INLINE_LAMBDA {
            return of_rows(n, [&](int64_t r) INLINE_LAMBDA { return scaled(layer, columns, load(from + r * 32), x.scales[row + r]); });
        };
        const auto gate = act(scaled_by(first, sums));
        to_rows(gate * scaled_by(second, sums + LANES), [&](int64_t r, f32x16 v) INLINE_LAMBDA {
            store((T*)layer.out + (row + r) * (layer.columns / 2) + pair * COLUMNS, v);
        });
    }
};

// Up to 32 rows.
template <typename Gate, typename Act>
INLINE void few_rows(const Layer& layer, const Panel& panel, const Quantized& x, int64_t pairs, Act act) {
    alignas(64) typename Gate::Op::Result out[TILE_ROWS][32];
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), rows = layer.rows;
    configure_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0);
    for (int64_t pair = pairs * me / threads; pair < pairs * (me + 1) / threads; pair++) {
        const BlockPair now = gate_and_up(layer, pair), next = gate_and_up(layer, pair + 1 < pairs ? pair + 1 : pair);
        if (rows > 16) pair_product<typename Gate::Op, true>(panel, now, next, out[0]);
        else pair_product<typename Gate::Op, false>(panel, now, next, out[0]);
        const Gate gate(layer, x, act, pair);
        for (int64_t row = 0; row < rows; row++) gate.finish(Rows<1>{}, out[row], row, pair);
    }
    _tile_release();
}

template <typename Gate, typename Act>
INLINE void gated(const Layer& layer, const Panel& panel, const Quantized& x, Act act) {
    const int64_t pairs = layer.columns / 2 / COLUMNS;
    if (layer.rows == 0) return;
    if (layer.rows <= TILE_ROWS) return few_rows<Gate>(layer, panel, x, pairs, act);
    // two pairs make a whole cache line of a bf16 row, which two threads would otherwise take from each other
    rows_on_tiles<typename Gate::Op, 2>(
        panel, pairs, [&](int64_t pair) INLINE_LAMBDA { return gate_and_up(layer, pair); },
        [&]<int N>(Rows<N> n, const typename Gate::Op::Result* sums, int64_t row, int64_t pair) INLINE_LAMBDA {
            Gate(layer, x, act, pair).finish(n, sums, row, pair);
        });
}

#else

INLINE bool fits_tiles(const Layer&) { return false; }

#endif

}  // namespace

// x [rows, in] -> out [rows, columns / 2] contiguous: act(gate) * up of the product that tf_linear_bf16 makes.
EXPORT void tf_gated_bf16(const GatedArguments* arguments) {
    const GatedArguments& a = *arguments;
    const Layer layer(a.linear, 2);
    if (!fits_tiles(layer)) return one_after_the_other(a, tf_linear_bf16);
#if defined(TF_AMX)
    const Panel panel = panel_of(layer);
    with_gate<bf16>(a.gate, [&](auto act) {
#pragma omp parallel if (layer.rows * layer.in * layer.columns > SERIAL_PRODUCTS)
        gated<Bf16Gate<decltype(act)>>(layer, panel, Quantized{}, act);
    });
#endif
}

EXPORT void tf_gated_int8(const GatedArguments* arguments) {
    const GatedArguments& a = *arguments;
    const Layer layer(a.linear, 1);
    if (!fits_tiles(layer)) return one_after_the_other(a, tf_linear_int8);
#if defined(TF_AMX)
    const Quantized x = quantized_memory(layer);
    const Panel panel = panel_of(layer, x);
    with_dtype(layer.dtype, [&]<typename T>(T*) {
        with_gate<T>(a.gate, [&](auto act) {
#pragma omp parallel if (layer.rows * layer.in * layer.columns > SERIAL_PRODUCTS)
            {
                quantize_rows<T>(layer, x);
                gated<Int8Gate<decltype(act), T>>(layer, panel, x, act);
            }
        });
    });
#endif
}
