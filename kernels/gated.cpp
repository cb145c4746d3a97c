// A gate-up product with its gate in the same pass; see gated.py for the contract.
//
// The weight lies as for linear: a pair of blocks is 16 columns of the gate and the same 16 of up. What tiles
// do not take is computed as the two operations one after the other.
#include "gated_rows.h"

using namespace tf;

EXPORT void tf_linear_int8(const LinearArguments* arguments);
EXPORT void tf_linear_bf16(const LinearArguments* arguments);

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

// Up to 32 rows.
template <typename Gate, typename Act, typename Out>
INLINE void few_rows(const Layer& layer, const Panel& panel, const float* row_scales, Act act, Out to) {
    alignas(64) typename Gate::Op::Result out[TILE_ROWS][32];
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num(), rows = layer.rows, pairs = layer.columns / 2 / COLUMNS;
    configure_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 0);
    for (int64_t pair = pairs * me / threads; pair < pairs * (me + 1) / threads; pair++) {
        const BlockPair now = gate_and_up(layer, pair), next = gate_and_up(layer, pair + 1 < pairs ? pair + 1 : pair);
        if (rows > 16) pair_product<typename Gate::Op, true>(panel, now, next, out[0]);
        else pair_product<typename Gate::Op, false>(panel, now, next, out[0]);
        const Gate gate(layer, row_scales, act, to, pair);
        int64_t row = 0;
        for (; row + 4 <= rows; row += 4) gate.finish(Rows<4>{}, out[row], row, pair);
        for (; row < rows; row++) gate.finish(Rows<1>{}, out[row], row, pair);
    }
    _tile_release();
}

template <typename Gate, typename Act, typename Out>
INLINE void gated(const Layer& layer, const Panel& panel, const float* row_scales, Act act, Out out) {
    if (layer.rows > TILE_ROWS) gated_rows<Gate>(layer, panel, row_scales, act, out);
    else if (layer.rows) few_rows<Gate>(layer, panel, row_scales, act, out);
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
        gated<Bf16Gate<decltype(act), InRows<bf16>>>(layer, panel, nullptr, act, InRows<bf16>{(bf16*)layer.out, layer.columns / 2});
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
                gated<Int8Gate<decltype(act), InRows<T>, T>>(layer, panel, x.scales, act, InRows<T>{(T*)layer.out, layer.columns / 2});
            }
        });
    });
#endif
}
