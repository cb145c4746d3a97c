// Linear layers over packed weights: int8 with per-token activations, and bf16; see linear.py.
//
// Threads share the columns, so every weight is read once from memory up to 32 rows; more rows: linear_rows.h.
// The sums of a row are added up in one order, whatever else is in the batch.
#include "linear_rows.h"
#include "linear_two_bytes.h"
#include "linear_wide.h"

using namespace tf;

namespace {

// ---- on tiles --------------------------------------------------------------------------------

#if defined(TF_AMX)

// Columns [first, last) blocks for all rows; finish(sums, row, column) takes 16 columns of a row.
template <typename Op, typename Finish>
INLINE void columns_on_tiles(const Layer& layer, const uint8_t* left, int64_t left_stride, int64_t first, int64_t last,
                             Finish finish) {
    alignas(64) typename Op::Result out[32][32];
    for (int64_t block = first; block < last; block += 2) {
        const uint8_t* right = layer.weight + block * layer.depth_blocks * BLOCK_BYTES;
        const bool two_columns = block + 1 < last;
        int configured = 0;
        for (int64_t row = 0; row < layer.rows; row += 32) {
            const int count = layer.rows - row < 32 ? layer.rows - row : 32;
            if (count != configured) configure_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 0);
            configured = count;
            const uint8_t* from = left + row * left_stride;
            if (count > 16 && two_columns) tile_product<Op, true, true>(from, left_stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            else if (count > 16) tile_product<Op, true, false>(from, left_stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            else if (two_columns) tile_product<Op, false, true>(from, left_stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            else tile_product<Op, false, false>(from, left_stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            for (int r = 0; r < count; r++)
                for (int c = 0; c < 1 + two_columns; c++)
                    finish(out[r] + c * COLUMNS, row + r, (block + c) * COLUMNS);
        }
    }
}

#endif

// ---- on AVX-512 ------------------------------------------------------------------------------

// A 64-byte row of a packed block against four bytes of a row of x, for 16 columns at once.

#if defined(__AVX512VNNI__)
struct Int8Lanes {
    typedef i32x16 Sums;
    // vpdpbusd takes unsigned bytes on the left: x + 128, taken back through the column's offset
    static INLINE Sums multiply(Sums sums, uint32_t four, const uint8_t* right) {
        return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32((int)(four ^ 0x80808080u)),
                                           _mm512_loadu_si512(right));
    }
};
#endif
#if defined(__AVX512BF16__)
struct Bf16Lanes {
    typedef f32x16 Sums;
    static INLINE Sums multiply(Sums sums, uint32_t four, const uint8_t* right) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)four),
                                        (__m512bh)_mm512_loadu_si512(right));
    }
};
#endif

// ROWS rows times BLOCKS column blocks; finish(sums, row, column) takes 16 columns of a row.
template <typename Op, int ROWS, int BLOCKS, typename Finish>
INLINE void lane_product(const Layer& layer, const uint8_t* left, int64_t left_stride, int64_t row, int64_t block,
                         Finish finish) {
    typename Op::Sums sums[ROWS][BLOCKS] = {};
    const int64_t block_stride = layer.depth_blocks * BLOCK_BYTES;
    const uint8_t* right = layer.weight + block * block_stride;
    left += row * left_stride;
    for (int64_t k = 0; k < layer.depth_blocks * 16; k++)
        for (int r = 0; r < ROWS; r++) {
            uint32_t four;
            memcpy(&four, left + r * left_stride + k * 4, 4);
            for (int b = 0; b < BLOCKS; b++)
                sums[r][b] = Op::multiply(sums[r][b], four, right + b * block_stride + k * 64);
        }
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++) finish(sums[r][b], row + r, (block + b) * COLUMNS);
}

template <typename Op, int BLOCKS, typename Finish>
INLINE void lane_rows(const Layer& layer, const uint8_t* left, int64_t left_stride, int64_t block, Finish finish) {
    int64_t row = 0;
    for (; row + 6 <= layer.rows; row += 6) lane_product<Op, 6, BLOCKS>(layer, left, left_stride, row, block, finish);
    for (; row + 2 <= layer.rows; row += 2) lane_product<Op, 2, BLOCKS>(layer, left, left_stride, row, block, finish);
    for (; row < layer.rows; row++) lane_product<Op, 1, BLOCKS>(layer, left, left_stride, row, block, finish);
}

template <typename Op, typename Finish>
INLINE void columns_on_lanes(const Layer& layer, const uint8_t* left, int64_t left_stride, int64_t first, int64_t last,
                             Finish finish) {
    int64_t block = first;
    for (; block + 4 <= last; block += 4) lane_rows<Op, 4>(layer, left, left_stride, block, finish);
    for (; block < last; block++) lane_rows<Op, 1>(layer, left, left_stride, block, finish);
}

// ---- the layer -------------------------------------------------------------------------------

enum Feature : int32_t { INT8 = 1, BF16_BLOCKS = 2 };

template <typename T> void int8_columns([[maybe_unused]] const Layer& layer, const Quantized& x, [[maybe_unused]] int64_t first,
                                        [[maybe_unused]] int64_t last) {
    [[maybe_unused]] const uint8_t* left = (const uint8_t*)x.values;
#if defined(TF_AMX)
    if (on_tiles(layer)) {
        columns_on_tiles<Int8Tiles>(layer, left, x.stride, first, last,
                                    [&](const int32_t* sums, int64_t row, int64_t column) INLINE_LAMBDA {
                                        i32x16 v;
                                        memcpy(&v, sums, 64);
                                        finish_int8<T>(layer, v, x.scales[row], row, column);
                                    });
        _tile_release();
        return;
    }
#endif
#if defined(__AVX512VNNI__)
    columns_on_lanes<Int8Lanes>(layer, left, x.stride, first, last,
                                [&](i32x16 sums, int64_t row, int64_t column) INLINE_LAMBDA {
                                    const int64_t n = layer.columns - column < LANES ? layer.columns - column : LANES;
                                    i32x16 offset = {};
                                    memcpy(&offset, layer.offset + column, n * sizeof(int32_t));
                                    finish_int8<T>(layer, sums - offset, x.scales[row], row, column);
                                });
#endif
}

INLINE void bf16_columns(const Layer& layer, [[maybe_unused]] int64_t first, [[maybe_unused]] int64_t last) {
    [[maybe_unused]] const uint8_t* left = (const uint8_t*)layer.x;
    [[maybe_unused]] const int64_t left_stride = layer.x_stride * sizeof(bf16);
#if defined(TF_AMX)
    if (on_tiles(layer)) {
        columns_on_tiles<Bf16Tiles>(layer, left, left_stride, first, last,
                                    [&](const float* sums, int64_t row, int64_t column) INLINE_LAMBDA {
                                        finish_bf16(layer, load(sums), row, column);
                                    });
        _tile_release();
        return;
    }
#endif
#if defined(__AVX512BF16__)
    columns_on_lanes<Bf16Lanes>(layer, left, left_stride, first, last,
                                [&](f32x16 sums, int64_t row, int64_t column) INLINE_LAMBDA {
                                    finish_bf16(layer, sums, row, column);
                                });
#endif
}

#if defined(TF_AMX)

// The high bytes of up to 16 rows are the tiles' first rows, the low ones their second.
template <typename T>
INLINE void two_bytes_on_tiles(const Layer& layer, const TwoBytes& x, int64_t first, int64_t last) {
    alignas(64) int32_t out[2 * TALL][32];
    int configured = 0;
    for (int64_t block = first; block < last; block += 2) {
        const uint8_t* right = layer.weight + block * layer.depth_blocks * BLOCK_BYTES;
        const bool two_columns = block + 1 < last;
        for (int64_t row = 0; row < layer.rows; row += TALL) {
            const int count = layer.rows - row < TALL ? layer.rows - row : TALL;
            if (count != configured) configure_tiles(count, count);
            configured = count;
            const uint8_t* left = (const uint8_t*)x.high(row);
            if (two_columns) tile_product<Int8Tiles, true, true>(left, x.stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            else tile_product<Int8Tiles, true, false>(left, x.stride, right, layer.depth_blocks, out[0], sizeof(out[0]));
            for (int r = 0; r < count; r++)
                for (int c = 0; c < 1 + two_columns; c++)
                    finish_two_bytes<T>(layer, load(out[r] + c * COLUMNS), load(out[TALL + r] + c * COLUMNS),
                                        x.scales[row + r], row + r, (block + c) * COLUMNS);
        }
    }
    _tile_release();
}

#endif

template <typename T> void two_bytes_columns([[maybe_unused]] const Layer& layer, [[maybe_unused]] const TwoBytes& x,
                                             [[maybe_unused]] int64_t first, [[maybe_unused]] int64_t last) {
#if defined(TF_AMX)
    if (on_tiles(layer)) return two_bytes_on_tiles<T>(layer, x, first, last);
#endif
#if defined(__AVX512VNNI__)
    for (int64_t block = first; block < last; block++)
        for (int64_t row = 0; row < layer.rows; row++) {
            i32x16 high = {};
            const auto keep = [&](i32x16 sums, int64_t, int64_t) INLINE_LAMBDA { high = sums; };
            lane_product<Int8Lanes, 1, 1>(layer, (const uint8_t*)x.high(row), 0, 0, block, keep);
            const auto finish = [&](i32x16 sums, int64_t, int64_t column) INLINE_LAMBDA {
                const int64_t n = layer.columns - column < LANES ? layer.columns - column : LANES;
                i32x16 offset = {};
                memcpy(&offset, layer.offset + column, n * sizeof(int32_t));
                finish_two_bytes<T>(layer, high - offset, sums - offset, x.scales[row], row, column);
            };
            lane_product<Int8Lanes, 1, 1>(layer, (const uint8_t*)x.low(row), 0, 0, block, finish);
        }
#endif
}

// ---- in wider numbers -------------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr bool HAS_BF16 = true;
#else
constexpr bool HAS_BF16 = false;
#endif
#if defined(__AVX512VNNI__)
constexpr bool HAS_INT8 = true;
#else
constexpr bool HAS_INT8 = false;
#endif

// Whether a layer goes through linear_wide.h, which needs TF_WIDE.
INLINE bool is_wide(const Layer& layer, bool has_instruction) { return layer.path == WIDE_ONLY || !has_instruction; }

#if defined(TF_WIDE)

void wide_bf16(const Layer& layer) {
    const auto x = widened_memory<Bf16Weights>(layer);
#pragma omp parallel if (!is_small(layer))
    {
        widen_rows((const bf16*)layer.x, layer.x_stride, layer.in, layer.rows, x);
        wide_columns<Bf16Weights>(layer, x, [&](f32x16 sums, int64_t row, int64_t column) INLINE_LAMBDA {
            finish_bf16(layer, sums, row, column);
        });
    }
}

template <typename T> void wide_int8(const Layer& layer, const Quantized& quantized) {
    const auto x = widened_memory<Int8Both>(layer);
#pragma omp parallel if (!is_small(layer))
    {
        quantize_rows<T>(layer, quantized);
        widen_rows(quantized.values, quantized.stride, layer.depth_blocks * DEPTH_BYTES, layer.rows, x);
        wide_columns<Int8Both>(layer, x, [&](i32x16 sums, int64_t row, int64_t column) INLINE_LAMBDA {
            finish_int8<T>(layer, sums, quantized.scales[row], row, column);
        });
    }
}

// Inputs need not be held in two bytes.
template <typename T> void wide_int8_weights(const Layer& layer) {
    const auto x = widened_memory<Int8Weights>(layer);
#pragma omp parallel if (!is_small(layer))
    {
        widen_rows((const T*)layer.x, layer.x_stride, layer.in, layer.rows, x);
        wide_columns<Int8Weights>(layer, x, [&](f32x16 sums, int64_t row, int64_t column) INLINE_LAMBDA {
            const Scales columns = scales_of<T>(layer, column);
            store_n((T*)layer.out + row * layer.columns + column, fma(sums, columns.scale, columns.bias), layer.columns - column);
        });
    }
}

#else

void wide_bf16(const Layer&) {}
template <typename T> void wide_int8(const Layer&, const Quantized&) {}
template <typename T> void wide_int8_weights(const Layer&) {}

#endif

}  // namespace

// What this build on this CPU can do: a sum of Features.
EXPORT int32_t tf_linear_features() {
    int32_t features = 0;
#if defined(TF_WIDE) || defined(__AVX512VNNI__)
    features |= INT8;
#endif
#if defined(TF_WIDE) || defined(__AVX512BF16__)
    features |= BF16_BLOCKS;
#endif
    return features;
}

struct QuantizeArguments {
    const void* x;  // [rows, width], contiguous
    int8_t* values;
    float* scales;
    int64_t rows, width, dtype;
};

EXPORT void tf_quantize_rows(const QuantizeArguments* arguments) {
    const QuantizeArguments a = *arguments;
    with_dtype(a.dtype, [&]<typename T>(T*) {
#pragma omp parallel for if (a.rows * a.width > SERIAL_ELEMENTS) schedule(static)
        for (int64_t row = 0; row < a.rows; row++)
            quantize_row((const T*)a.x + row * a.width, a.width, a.values + row * a.width, a.width, a.scales + row);
    });
}

// x [rows, in] with a row stride, of dtype -> out [rows, columns] contiguous, of the same dtype.
EXPORT void tf_linear_int8(const LinearArguments* arguments) {
    const Layer layer(*arguments, 1);
    const Quantized quantized = quantized_memory(layer);
    with_dtype(layer.dtype, [&]<typename T>(T*) {
        if (is_wide(layer, HAS_INT8)) return wide_int8<T>(layer, quantized);
#pragma omp parallel if (!is_small(layer))
        {
            quantize_rows<T>(layer, quantized);
            if (has_many_rows(layer)) {
                int8_rows<T>(layer, panel_of(layer, quantized), quantized.scales);
            } else {
                int64_t first, last;
                my_blocks(layer.columns, &first, &last);
                int8_columns<T>(layer, quantized, first, last);
            }
        }
    });
}

// The same product of inputs that are held in two bytes each; x_scales is null.
EXPORT void tf_linear_two_bytes(const LinearArguments* arguments) {
    const Layer layer(*arguments, 1);
    const TwoBytes x = two_bytes_memory(layer);
    with_dtype(layer.dtype, [&]<typename T>(T*) {
        if (is_wide(layer, HAS_INT8)) return wide_int8_weights<T>(layer);
#pragma omp parallel if (!is_small(layer))
        {
            split_rows<T>(layer, x);
            int64_t first, last;
            my_blocks(layer.columns, &first, &last);
            two_bytes_columns<T>(layer, x, first, last);
        }
    });
}

// bf16 all through; `in` a multiple of 32. Only where BF16_BLOCKS is a feature.
EXPORT void tf_linear_bf16(const LinearArguments* arguments) {
    const Layer layer(*arguments, 2);
    if (is_wide(layer, HAS_BF16)) return wide_bf16(layer);
#pragma omp parallel if (!is_small(layer))
    {
        if (has_many_rows(layer)) {
            bf16_rows(layer, panel_of(layer));
        } else {
            int64_t first, last;
            my_blocks(layer.columns, &first, &last);
            bf16_columns(layer, first, last);
        }
    }
}
