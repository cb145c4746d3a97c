// Products on a CPU that has no instruction for bf16 or int8: inputs are widened once, weights where they are read.
//
// Up to ROWS rows share what has been widened of a weight. The sums of a row are added up in the order of the depth,
// whatever else is in the batch.
#pragma once

#include "linear_layer.h"

#if defined(__AVX2__) && defined(__FMA__)
#define TF_WIDE 1
#endif

namespace tf {

#if defined(TF_WIDE)

constexpr int64_t WIDE_ROWS = 6;               // as many sums of 16 columns as sixteen registers hold beside their inputs
constexpr int64_t WIDE_PANEL_BYTES = 1 << 18;  // of widened rows that are multiplied with all columns before the next ones

// What products of bf16 weights and of int8 weights share: inputs in fp32.
struct FloatInputs {
    typedef f32x16 Sums;
    typedef float Input;
    static INLINE void add(Sums& sums, f32x16 weights, Input x) { sums = fma(weights, splat(x), sums); }
};

// A row of a block is 16 columns x 2 of the depth.
struct Bf16Weights : FloatInputs {
    static constexpr int64_t INPUTS = 2;  // that a row of a block is multiplied with
    static INLINE f32x16 part(u32x16 row, int i) { return (f32x16)(i ? row & 0xffff0000u : row << 16); }
};

// 16 columns x 4 of the depth.
struct Int8Weights : FloatInputs {
    static constexpr int64_t INPUTS = 4;
    static INLINE f32x16 part(u32x16 row, int i) { return to_floats((i32x16)(row << (24 - 8 * i)) >> 24); }
};

// The same, and inputs in int8: two of the depth as words, of each column the first and third, then the others.
struct Int8Both {
    typedef i32x16 Sums;
    typedef uint32_t Input;
    static constexpr int64_t INPUTS = 2;
#if defined(__AVX512BW__)
    static INLINE i32x16 part(u32x16 row, int i) {
        return (i32x16)_mm512_srai_epi16(i ? (__m512i)row : _mm512_slli_epi16((__m512i)row, 8), 8);
    }
    static INLINE void add(Sums& sums, i32x16 weights, Input x) {
        sums += (i32x16)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32((int)x));
    }
#else
    static INLINE i32x8 words(__m256i row, int i) {
        return (i32x8)_mm256_srai_epi16(i ? row : _mm256_slli_epi16(row, 8), 8);
    }
    static INLINE i32x8 sum(i32x8 sums, i32x8 weights, __m256i x) {
#if defined(__AVXVNNI__)
        return (i32x8)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)weights, x);
#else
        return sums + (i32x8)_mm256_madd_epi16((__m256i)weights, x);
#endif
    }
    static INLINE i32x16 part(const Halves<u32x8>& row, int i) { return {words((__m256i)row.low, i), words((__m256i)row.high, i)}; }
    static INLINE void add(Halves<i32x8>& sums, const Halves<i32x8>& weights, Input x) {
        const __m256i two = _mm256_set1_epi32((int)x);
        sums = {sum(sums.low, weights.low, two), sum(sums.high, weights.high, two)};
    }
#endif
};

// Rows of inputs as products take them, zero beyond the layer's width.
template <typename Input> struct Widened {
    Input* values;
    int64_t stride;

    INLINE Input* row(int64_t r) const { return values + r * stride; }
};

// One buffer, owned by the calling thread, which all threads of its team read and write.
template <typename Op> Widened<typename Op::Input> widened_memory(const Layer& layer) {
    static thread_local std::vector<typename Op::Input> memory;
    const int64_t stride = layer.depth_blocks * 16 * Op::INPUTS;
    if ((int64_t)memory.size() < layer.rows * stride + LANES) memory.resize(layer.rows * stride + LANES);
    return {(typename Op::Input*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63), stride};
}

template <typename T> INLINE void widen_row(const T* x, int64_t width, float* to, int64_t stride) {
    for (int64_t i = 0; i < stride; i += LANES) store(to + i, i < width ? load_n(x + i, width - i) : f32x16{});
}

// Four bytes a, b, c, d -> the words a, c and b, d. Whole 64 bytes.
INLINE void widen_row(const int8_t* x, int64_t width, uint32_t* to, int64_t) {
    for (int64_t i = 0; i < width; i += 32) {
        const __m256i row = _mm256_loadu_si256((const __m256i*)(x + i));
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(row, 8), 8), odd = _mm256_srai_epi16(row, 8);
        const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
        _mm256_storeu_si256((__m256i*)(to + i / 2), _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256((__m256i*)(to + i / 2 + 8), _mm256_permute2x128_si256(low, high, 0x31));
    }
}

// All rows, shared by the threads of a team, who wait for each other at the end. x: row_stride elements a row.
template <typename T, typename Input>
INLINE void widen_rows(const T* x, int64_t row_stride, int64_t width, int64_t rows, const Widened<Input>& to) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) widen_row(x + row * row_stride, width, to.row(row), to.stride);
}

// ROWS rows times BLOCKS column blocks; finish(sums, row, column) takes 16 columns of a row. Asks for the block at
// `ahead` meanwhile.
template <typename Op, int ROWS, int BLOCKS, typename Finish>
INLINE void wide_product(const Layer& layer, const Widened<typename Op::Input>& x, int64_t row, int64_t block,
                         const uint8_t* ahead, Finish finish) {
    typename Op::Sums sums[ROWS][BLOCKS] = {};
    const int64_t block_stride = layer.depth_blocks * BLOCK_BYTES;
    const uint8_t* right = layer.weight + block * block_stride;
    const typename Op::Input* left = x.row(row);
    for (int64_t k = 0; k < layer.depth_blocks * 16; k++) {
        if (ROWS > 2) _mm_prefetch((const char*)ahead + k * 64, _MM_HINT_T0);
        for (int b = 0; b < BLOCKS; b++) {
            const u32x16 weights = load((const uint32_t*)(right + b * block_stride + k * 64));
#pragma GCC unroll 4
            for (int i = 0; i < Op::INPUTS; i++) {
                const auto part = Op::part(weights, i);
                for (int r = 0; r < ROWS; r++) Op::add(sums[r][b], part, left[r * x.stride + k * Op::INPUTS + i]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int b = 0; b < BLOCKS; b++) finish(sums[r][b], row + r, (block + b) * COLUMNS);
}

// Up to WIDE_ROWS rows.
template <typename Op, typename Finish>
INLINE void wide_rows(const Layer& layer, const Widened<typename Op::Input>& x, int64_t row, int64_t count, int64_t block,
                      const uint8_t* ahead, Finish finish) {
    if (count == 6) wide_product<Op, 6, 1>(layer, x, row, block, ahead, finish);
    else if (count == 5) wide_product<Op, 5, 1>(layer, x, row, block, ahead, finish);
    else if (count == 4) wide_product<Op, 4, 1>(layer, x, row, block, ahead, finish);
    else if (count == 3) wide_product<Op, 3, 1>(layer, x, row, block, ahead, finish);
    else if (count == 2) wide_product<Op, 2, 1>(layer, x, row, block, ahead, finish);
    else wide_product<Op, 1, 1>(layer, x, row, block, ahead, finish);
}

// A column block for `rows` rows from `top` on; asks for the block at `ahead` in its last product.
template <typename Op, typename Finish>
INLINE void wide_block(const Layer& layer, const Widened<typename Op::Input>& x, int64_t top, int64_t rows, int64_t block,
                       int64_t ahead, Finish finish) {
    const int64_t groups = (rows + WIDE_ROWS - 1) / WIDE_ROWS, block_bytes = layer.depth_blocks * BLOCK_BYTES;
    for (int64_t i = 0; i < groups; i++) {
        const int64_t begin = rows * i / groups, end = rows * (i + 1) / groups, asked = i == groups - 1 ? ahead : block;
        wide_rows<Op>(layer, x, top + begin, end - begin, block, layer.weight + asked * block_bytes, finish);
    }
}

// Few rows: this thread's share of the column blocks.
template <typename Op, typename Finish>
INLINE void my_wide_columns(const Layer& layer, const Widened<typename Op::Input>& x, Finish finish) {
    int64_t block, last;
    my_blocks(layer.columns, &block, &last);
    if (layer.rows == 1)  // which leaves registers for more columns
        for (; block + 4 <= last; block += 4) wide_product<Op, 1, 4>(layer, x, 0, block, nullptr, finish);
    if (layer.rows == 2)
        for (; block + 2 <= last; block += 2) wide_product<Op, 2, 2>(layer, x, 0, block, nullptr, finish);
    for (; block < last; block++) wide_block<Op>(layer, x, 0, layer.rows, block, block + 1 < last ? block + 1 : block, finish);
}

// All columns for all rows; the threads of a team take the blocks of many rows as they come.
template <typename Op, typename Finish> void wide_columns(const Layer& layer, const Widened<typename Op::Input>& x, Finish finish) {
    if (layer.rows <= TILE_ROWS) return my_wide_columns<Op>(layer, x, finish);
    const int64_t blocks = (layer.columns + COLUMNS - 1) / COLUMNS;
    const int64_t fitting = WIDE_PANEL_BYTES / (x.stride * (int64_t)sizeof(typename Op::Input)) / WIDE_ROWS * WIDE_ROWS;
    const int64_t height = fitting > WIDE_ROWS ? fitting : WIDE_ROWS;
    for (int64_t top = 0; top < layer.rows; top += height) {
        const int64_t rows = layer.rows - top < height ? layer.rows - top : height;
#pragma omp for schedule(dynamic, 2) nowait
        for (int64_t block = 0; block < blocks; block++)
            wide_block<Op>(layer, x, top, rows, block, block + 1 < blocks ? block + 1 : block, finish);
    }
}

#endif

}  // namespace tf
