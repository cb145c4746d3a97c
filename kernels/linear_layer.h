// One packed linear layer as its C++ forms share it: arguments, activations rounded to int8, one row's
// results; see linear.py.
#pragma once

#include "tiles.h"

#include <vector>

namespace tf {

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
    const float* x_scales;  // of int8 x, zero from `in` to a multiple of 64; null where x is of dtype
};

struct Layer {
    const void* x;
    const float* x_scales;
    const uint8_t* weight;        // packed: [columns / 16][depth blocks][16][64 bytes]
    const float* scale;           // int8, per column
    const int32_t* offset;        // int8, per column: 128 x the sum of its weights
    const void* bias;             // of x's dtype, or null
    void* out;
    int64_t x_stride, rows, in, columns, depth_blocks, dtype, path;

    Layer(const LinearArguments& a, int64_t element_bytes)
        : x(a.x), x_scales(a.x_scales), weight(a.weight), scale(a.scale), offset(a.offset), bias(a.bias), out(a.out), x_stride(a.x_stride),
          rows(a.rows), in(a.in), columns(a.columns),
          depth_blocks((a.in * element_bytes + DEPTH_BYTES - 1) / DEPTH_BYTES), dtype(a.dtype), path(a.path) {}
};

// ---- activations to int8 ---------------------------------------------------------------------

enum Path : int64_t { FASTEST = 0, LANES_ONLY = 1, WIDE_ONLY = 2 };

INLINE bool on_tiles(const Layer& layer) {
#if defined(TF_AMX)
    return tiles_granted && layer.path == FASTEST;
#else
    (void)layer;
    return false;
#endif
}

// More rows than one tile_product takes.
constexpr int64_t TILE_ROWS = 32;
INLINE bool has_many_rows(const Layer& layer) { return layer.rows > TILE_ROWS && on_tiles(layer); }

// A row's values lie together; or, where tiles take many rows, 64 of them with those of 15 other rows: whole tiles.
struct Quantized {
    int8_t* values;  // [rows][depth_blocks * 64] or [rows / 16][depth_blocks][16][64], zero beyond the layer's width
    float* scales;   // [rows]
    int64_t stride;  // bytes a row
    bool in_tiles;

    INLINE int8_t* row(int64_t r) const { return in_tiles ? values + r / 16 * 16 * stride + r % 16 * DEPTH_BYTES : values + r * stride; }
    INLINE int64_t step() const { return in_tiles ? BLOCK_BYTES : DEPTH_BYTES; }  // from 64 values of a row to the next
};

// Where x lies in int8 or will: one buffer, owned by the calling thread, which all threads of its team read and write.
inline Quantized quantized_memory(const Layer& layer) {
    if (layer.x_scales) return {(int8_t*)layer.x, (float*)layer.x_scales, layer.x_stride, false};
    static thread_local std::vector<int8_t> memory;
    const int64_t stride = layer.depth_blocks * DEPTH_BYTES, rows = round_up(layer.rows, TILE_ROWS), needed = rows * (stride + 4) + 128;
    if ((int64_t)memory.size() < needed) memory.resize(needed);
    int8_t* values = (int8_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    return {values, (float*)(values + rows * stride), stride, has_many_rows(layer)};
}

INLINE f32x16 magnitude(f32x16 v) { return (f32x16)((i32x16)v & 0x7fffffff); }

// The low bytes.
INLINE void store_bytes(int8_t* to, i32x16 v, int64_t n) {
#if defined(__AVX512F__)
    const __m128i narrow = _mm512_cvtepi32_epi8((__m512i)v);
#elif defined(__AVX2__)
    const i32x16 bytes = v & 0xff;
    const __m256i words = narrowed((__m256i)bytes.low, (__m256i)bytes.high);
    const __m128i narrow = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
    int32_t all[LANES];
    memcpy(all, &v, 64);
    int8_t narrow[LANES];
    for (int i = 0; i < LANES; i++) narrow[i] = (int8_t)all[i];
#endif
    if (n >= 16) memcpy(to, &narrow, 16);
    else memcpy(to, &narrow, n);
}

// Symmetric: q = round(x / scale), scale = max |x| / 127. A NaN or infinity makes the scale NaN. step: from 64 values
// to the next.
template <typename T>
void quantize_row(const T* x, int64_t width, int8_t* to, int64_t stride, float* scale, int64_t step = DEPTH_BYTES) {
    constexpr int64_t AT_ONCE = 4;  // chains that do not wait for each other
    f32x16 tops[AT_ONCE] = {}, checks[AT_ONCE] = {};
    int64_t whole = 0;
    for (; whole + AT_ONCE * LANES <= width; whole += AT_ONCE * LANES)
        for (int64_t i = 0; i < AT_ONCE; i++) {
            const f32x16 v = load(x + whole + i * LANES);
            tops[i] = max(tops[i], magnitude(v));
            checks[i] += v * 0.0f;
        }
    for (; whole < width; whole += LANES) {
        const f32x16 v = load_n(x + whole, width - whole);
        tops[0] = max(tops[0], magnitude(v));
        checks[0] += v * 0.0f;
    }
    const f32x16 top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    const f32x16 check = (checks[0] + checks[1]) + (checks[2] + checks[3]);
    const float highest = max(top), inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
    *scale = highest / 127.0f + sum(check);
    for (int64_t i = 0; i < stride; i += LANES) {
        f32x16 v = i < width ? load_n(x + i, width - i) : f32x16{};
        store_bytes(to + i / 64 * step + i % 64, round_to_int(v * inverse), stride - i);
    }
}

#if defined(__AVX512BW__)

// The highest of 32 magnitudes of bf16, which compare as integers do.
INLINE float highest_of(__m512i tops) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(tops), _mm512_extracti64x4_epi64(tops, 1));
    const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const uint32_t least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi16(-1))), 0);
    const uint32_t bits = (least ^ 0xffff) << 16;
    float highest;
    memcpy(&highest, &bits, 4);
    return highest;
}

INLINE __m512i magnitudes_of(const void* from) {
    return _mm512_and_si512(_mm512_loadu_si512(from), _mm512_set1_epi16(0x7fff));
}

// What numbers are multiplied with before they are rounded; their scale.
INLINE float to_int8(float highest, float* scale) {
    const float check = highest * 0.0f;
    *scale = highest / 127.0f + check;
    return highest > 0.0f && check == 0.0f ? 127.0f / highest : 0.0f;
}

// 32 numbers and 32 more, rounded.
INLINE __m512i rounded_64(const bf16* first, const bf16* second, float inverse) {
    // numbers at even places lie in the low halves of lanes, those at odd places in the high ones
    const auto words = [&](const bf16* from) INLINE_LAMBDA {
        const __m512i two = _mm512_loadu_si512(from);
        const i32x16 even = round_to_int((f32x16)_mm512_slli_epi32(two, 16) * inverse);
        const i32x16 odd = round_to_int((f32x16)_mm512_and_si512(two, _mm512_set1_epi32((int)0xffff0000)) * inverse);
        return (__m512i)((even & 0xff) | ((odd & 0xff) << 8));
    };
    const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    return _mm512_permutexvar_epi64(in_order, _mm512_packus_epi32(words(first), words(second)));
}

// The same of bf16, 64 numbers at a time.
template <>
inline void quantize_row(const bf16* x, int64_t width, int8_t* to, int64_t stride, float* scale, int64_t step) {
    const int64_t whole = width / 64 * 64;
    __m512i tops[2] = {};
    for (int64_t i = 0; i < whole; i += 64)
        for (int j = 0; j < 2; j++) tops[j] = _mm512_max_epu16(tops[j], magnitudes_of(x + i + 32 * j));
    for (int64_t i = whole; i < width; i += 32) {
        const __mmask32 there = width - i < 32 ? ((uint32_t)1 << (width - i)) - 1 : ~(uint32_t)0;
        tops[0] = _mm512_max_epu16(tops[0], _mm512_and_si512(_mm512_maskz_loadu_epi16(there, x + i), _mm512_set1_epi16(0x7fff)));
    }
    const float inverse = to_int8(highest_of(_mm512_max_epu16(tops[0], tops[1])), scale);
    for (int64_t i = 0; i < whole; i += 64)
        _mm512_storeu_si512(to + i / 64 * step, rounded_64(x + i, x + i + 32, inverse));
    for (int64_t i = whole; i < stride; i += LANES) {
        const f32x16 v = i < width ? load_n(x + i, width - i) : f32x16{};
        store_bytes(to + i / 64 * step + i % 64, round_to_int(v * inverse), stride - i);
    }
}

#endif

// All rows of the layer, shared by the threads of a team, who wait for each other at the end.
template <typename T> INLINE void quantize_rows(const Layer& layer, const Quantized& to) {
    if (layer.x_scales) return;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < layer.rows; row++)
        quantize_row((const T*)layer.x + row * layer.x_stride, layer.in, to.row(row), to.stride, to.scales + row, to.step());
}

// ---- results ---------------------------------------------------------------------------------

// What 16 columns of an int8 product need beside their sums.
struct Scales {
    f32x16 scale, bias;
};

template <typename T> INLINE Scales scales_of(const Layer& layer, int64_t column) {
    const int64_t n = layer.columns - column;
    return {load_n(layer.scale + column, n), layer.bias ? load_n((const T*)layer.bias + column, n) : f32x16{}};
}

// The same of columns that are all there.
template <typename T> INLINE Scales whole_scales_of(const Layer& layer, int64_t column) {
    return {load(layer.scale + column), layer.bias ? load((const T*)layer.bias + column) : f32x16{}};
}

// One rounding of sums x both scales + bias: written as one instruction, so that every caller rounds alike.
INLINE f32x16 scaled(const Scales& columns, i32x16 sums, float row_scale) {
    const f32x16 wide = to_floats(sums), factor = columns.scale * row_scale;
    return fma(wide, factor, columns.bias);
}

INLINE f32x16 bias_of(const Layer& layer, int64_t column) {
    return layer.bias ? load_n((const bf16*)layer.bias + column, layer.columns - column) : f32x16{};
}

// One row of up to 16 columns of sums -> out, with scales and bias.
template <typename T> INLINE void finish_int8(const Layer& layer, i32x16 sums, float row_scale, int64_t row, int64_t column) {
    store_n((T*)layer.out + row * layer.columns + column, scaled(scales_of<T>(layer, column), sums, row_scale),
            layer.columns - column);
}

INLINE void finish_bf16(const Layer& layer, f32x16 sums, int64_t row, int64_t column) {
    store_n((bf16*)layer.out + row * layer.columns + column, sums + bias_of(layer, column), layer.columns - column);
}

// Below this many multiplications one thread does it alone.
constexpr int64_t SERIAL_PRODUCTS = 1 << 18;

INLINE bool is_small(const Layer& layer) { return layer.rows * layer.in * layer.columns <= SERIAL_PRODUCTS; }

// This thread's share of the column blocks, in pairs.
INLINE void my_blocks(int64_t columns, int64_t* first, int64_t* last) {
    const int64_t blocks = (columns + COLUMNS - 1) / COLUMNS, pairs = (blocks + 1) / 2;
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = pairs * me / threads * 2;
    *last = pairs * (me + 1) / threads * 2;
    if (*last > blocks) *last = blocks;
}

}  // namespace tf
