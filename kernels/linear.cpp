// Linear layers over packed weights: int8 with per-token activations, and bf16; see linear.py.
//
// Threads share the columns, so every weight is read once from memory, whatever the number of rows.
#include "tiles.h"

#include <vector>

using namespace tf;

namespace {

// Each field is 8 bytes wide, in the order in which linear.py packs them.
struct LinearArguments {
    const uint8_t* weight;
    const float* scale;
    const int32_t* offset;
    const void* bias;
    int64_t in, columns;
    const void* x;
    void* out;
    int64_t x_stride, rows, dtype, path;
};

struct Layer {
    const void* x;
    const uint8_t* weight;        // packed: [columns / 16][depth blocks][16][64 bytes]
    const float* scale;           // int8, per column
    const int32_t* offset;        // int8, per column: 128 x the sum of its weights
    const void* bias;             // of x's dtype, or null
    void* out;
    int64_t x_stride, rows, in, columns, depth_blocks, dtype, path;

    Layer(const LinearArguments& a, int64_t element_bytes)
        : x(a.x), weight(a.weight), scale(a.scale), offset(a.offset), bias(a.bias), out(a.out), x_stride(a.x_stride),
          rows(a.rows), in(a.in), columns(a.columns),
          depth_blocks((a.in * element_bytes + DEPTH_BYTES - 1) / DEPTH_BYTES), dtype(a.dtype), path(a.path) {}
};

// ---- activations to int8 ---------------------------------------------------------------------

struct Quantized {
    int8_t* values;  // [rows][depth_blocks * 64], zero beyond the layer's width
    float* scales;   // [rows]
    int64_t stride;
};

// One buffer, owned by the calling thread, which all threads of its team read and write.
Quantized quantized_memory(const Layer& layer) {
    static thread_local std::vector<int8_t> memory;
    const int64_t stride = layer.depth_blocks * DEPTH_BYTES, needed = layer.rows * (stride + 4) + 128;
    if ((int64_t)memory.size() < needed) memory.resize(needed);
    int8_t* values = (int8_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    return {values, (float*)(values + layer.rows * stride), stride};
}

INLINE f32x16 magnitude(f32x16 v) { return v < 0.0f ? -v : v; }

// Symmetric: q = round(x / scale), scale = max |x| / 127. A NaN or infinity makes the scale NaN.
template <typename T> void quantize_row(const T* x, int64_t width, int8_t* to, int64_t stride, float* scale) {
    f32x16 top = {}, check = {};
    for (int64_t i = 0; i < width; i += LANES) {
        f32x16 v = load_n(x + i, width - i);
        top = max(top, magnitude(v));
        check += v * 0.0f;
    }
    const float highest = max(top), inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    *scale = highest / 127.0f + sum(check);
    for (int64_t i = 0; i < stride; i += LANES) {
        f32x16 v = i < width ? load_n(x + i, width - i) : f32x16{};
        i32x16 rounded = round_to_int(v * inverse);
        typedef int8_t i8x16 __attribute__((vector_size(16)));
        i8x16 narrow = __builtin_convertvector(rounded, i8x16);
        memcpy(to + i, &narrow, 16);
    }
}

// ---- results ---------------------------------------------------------------------------------

// One row of up to 16 columns of sums -> out, with scales and bias.
template <typename T> INLINE void finish_int8(const Layer& layer, i32x16 sums, float row_scale, int64_t row, int64_t column) {
    const int64_t n = layer.columns - column;
    f32x16 result = __builtin_convertvector(sums, f32x16) * (load_n(layer.scale + column, n) * row_scale);
    if (layer.bias) result += load_n((const T*)layer.bias + column, n);
    store_n((T*)layer.out + row * layer.columns + column, result, n);
}

INLINE void finish_bf16(const Layer& layer, f32x16 sums, int64_t row, int64_t column) {
    const int64_t n = layer.columns - column;
    if (layer.bias) sums += load_n((const bf16*)layer.bias + column, n);
    store_n((bf16*)layer.out + row * layer.columns + column, sums, n);
}

// ---- on tiles --------------------------------------------------------------------------------

#if defined(TF_AMX)

const bool tiles_granted = request_tiles();

// Columns [first, last) blocks for all rows; finish(sums, row, column) takes 16 columns of a row.
template <typename Op, typename Finish>
INLINE void columns_on_tiles(const Layer& layer, const uint8_t* left, int64_t left_stride, int64_t first, int64_t last,
                             Finish finish) {
    alignas(64) typename Op::Result out[4 * 256];
    for (int64_t block = first; block < last; block += 2) {
        const uint8_t* right = layer.weight + block * layer.depth_blocks * BLOCK_BYTES;
        const bool two_columns = block + 1 < last;
        int configured = 0;
        for (int64_t row = 0; row < layer.rows; row += 32) {
            const int count = layer.rows - row < 32 ? layer.rows - row : 32;
            if (count != configured) configure_tiles(count < 16 ? count : 16, count > 16 ? count - 16 : 0);
            configured = count;
            const uint8_t* from = left + row * left_stride;
            if (count > 16 && two_columns) tile_product<Op, true, true>(from, left_stride, right, layer.depth_blocks, out);
            else if (count > 16) tile_product<Op, true, false>(from, left_stride, right, layer.depth_blocks, out);
            else if (two_columns) tile_product<Op, false, true>(from, left_stride, right, layer.depth_blocks, out);
            else tile_product<Op, false, false>(from, left_stride, right, layer.depth_blocks, out);
            for (int r = 0; r < count; r++)
                for (int c = 0; c < 1 + two_columns; c++)
                    finish(out + ((r / 16 * 2 + c) * 16 + r % 16) * 16, row + r, (block + c) * COLUMNS);
        }
    }
}

#endif

// ---- on AVX-512 VNNI -------------------------------------------------------------------------

#if defined(__AVX512VNNI__)

// ROWS rows x up to four column blocks. vpdpbusd takes unsigned bytes on the left: x + 128, taken
// back through the column's offset.
template <int ROWS, int BLOCKS>
INLINE void vnni_product(const Layer& layer, const Quantized& x, int64_t row, int64_t block, i32x16 (&sums)[ROWS][BLOCKS]) {
    __m512i total[ROWS][BLOCKS];
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++) total[r][b] = _mm512_setzero_si512();
    const int64_t block_stride = layer.depth_blocks * BLOCK_BYTES;
    const uint8_t* right = layer.weight + block * block_stride;
    const int8_t* left = x.values + row * x.stride;
    for (int64_t k = 0; k < layer.depth_blocks * 16; k++) {
        __m512i weights[BLOCKS];
        for (int b = 0; b < BLOCKS; b++) weights[b] = _mm512_loadu_si512(right + b * block_stride + k * 64);
        for (int r = 0; r < ROWS; r++) {
            uint32_t four;
            memcpy(&four, left + r * x.stride + k * 4, 4);
            __m512i activations = _mm512_set1_epi32((int)(four ^ 0x80808080u));
            for (int b = 0; b < BLOCKS; b++) total[r][b] = _mm512_dpbusd_epi32(total[r][b], activations, weights[b]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++) sums[r][b] = (i32x16)total[r][b];
}

template <int ROWS, int BLOCKS, typename T>
INLINE void vnni_block(const Layer& layer, const Quantized& x, int64_t row, int64_t block) {
    i32x16 sums[ROWS][BLOCKS];
    vnni_product<ROWS, BLOCKS>(layer, x, row, block, sums);
    for (int b = 0; b < BLOCKS; b++) {
        const int64_t column = (block + b) * COLUMNS;
        i32x16 offset = {};
        memcpy(&offset, layer.offset + column, (layer.columns - column < LANES ? layer.columns - column : LANES) * 4);
        for (int r = 0; r < ROWS; r++) finish_int8<T>(layer, sums[r][b] - offset, x.scales[row + r], row + r, column);
    }
}

template <int BLOCKS, typename T> void vnni_rows(const Layer& layer, const Quantized& x, int64_t block) {
    int64_t row = 0;
    for (; row + 6 <= layer.rows; row += 6) vnni_block<6, BLOCKS, T>(layer, x, row, block);
    for (; row + 2 <= layer.rows; row += 2) vnni_block<2, BLOCKS, T>(layer, x, row, block);
    for (; row < layer.rows; row++) vnni_block<1, BLOCKS, T>(layer, x, row, block);
}

template <typename T> void columns_on_vnni(const Layer& layer, const Quantized& x, int64_t first, int64_t last) {
    int64_t block = first;
    for (; block + 4 <= last; block += 4) vnni_rows<4, T>(layer, x, block);
    for (; block < last; block++) vnni_rows<1, T>(layer, x, block);
}

#endif

// ---- the layer -------------------------------------------------------------------------------

enum Feature : int32_t { INT8 = 1, BF16_TILES = 2 };
enum Path : int64_t { FASTEST = 0, VNNI_ONLY = 1 };

template <typename T> void int8_columns(const Layer& layer, const Quantized& x, int64_t first, int64_t last) {
#if defined(TF_AMX)
    if (tiles_granted && layer.path == FASTEST) {
        columns_on_tiles<Int8Tiles>(layer, (const uint8_t*)x.values, x.stride, first, last,
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
    columns_on_vnni<T>(layer, x, first, last);
#endif
}

// This thread's share of the column blocks, in pairs.
INLINE void my_blocks(int64_t columns, int64_t* first, int64_t* last) {
    const int64_t blocks = (columns + COLUMNS - 1) / COLUMNS, pairs = (blocks + 1) / 2;
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = pairs * me / threads * 2;
    *last = pairs * (me + 1) / threads * 2;
    if (*last > blocks) *last = blocks;
}

// Below this many multiplications one thread does it alone.
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;

}  // namespace

// What this build on this CPU can do: a sum of Features.
EXPORT int32_t tf_linear_features() {
    int32_t features = 0;
#if defined(__AVX512VNNI__)
    features |= INT8;
#endif
#if defined(TF_AMX)
    if (tiles_granted) features |= INT8 | BF16_TILES;
#endif
    return features;
}

// x [rows, in] with a row stride, of dtype -> out [rows, columns] contiguous, of the same dtype.
EXPORT void tf_linear_int8(const LinearArguments* arguments) {
    const Layer layer(*arguments, 1);
    const Quantized quantized = quantized_memory(layer);
    with_dtype(layer.dtype, [&]<typename T>(T*) {
#pragma omp parallel if (layer.rows * layer.in * layer.columns > SERIAL_PRODUCTS)
        {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < layer.rows; row++)
                quantize_row((const T*)layer.x + row * layer.x_stride, layer.in, quantized.values + row * quantized.stride,
                             quantized.stride, quantized.scales + row);
            int64_t first, last;
            my_blocks(layer.columns, &first, &last);
            int8_columns<T>(layer, quantized, first, last);
        }
    });
}

// bf16 all through; `in` a multiple of 32. Only where BF16_TILES is a feature.
EXPORT void tf_linear_bf16(const LinearArguments* arguments) {
    const Layer layer(*arguments, 2);
#pragma omp parallel if (layer.rows * layer.in * layer.columns > SERIAL_PRODUCTS)
    {
        int64_t first, last;
        my_blocks(layer.columns, &first, &last);
#if defined(TF_AMX)
        columns_on_tiles<Bf16Tiles>(layer, (const uint8_t*)layer.x, layer.x_stride * 2, first, last,
                                    [&](const float* sums, int64_t row, int64_t column) INLINE_LAMBDA {
                                        finish_bf16(layer, load(sums), row, column);
                                    });
        _tile_release();
#endif
    }
}
