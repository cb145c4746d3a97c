// A whole MLP, down(gate(x)), in one pass over the rows; see gated_mlp.py for the contract.
//
// What the gate gives is laid down as the tiles that `down` multiplies, and, for int8, rounded where it lies. Few rows,
// and what tiles do not take, are computed as the two operations one after the other, to the same bits.
#include "gated_rows.h"

using namespace tf;

EXPORT void tf_linear_int8(const LinearArguments* arguments);
EXPORT void tf_linear_bf16(const LinearArguments* arguments);
EXPORT void tf_gated_int8(const GatedArguments* arguments);
EXPORT void tf_gated_bf16(const GatedArguments* arguments);

// Each field is 8 bytes wide, in the order in which gated_mlp.py packs them.
struct GatedMlpArguments {
    LinearArguments gate_up, down;  // without an `out` and an `x`: what lies between them is ours
    int64_t gate;
};

namespace {

void one_after_the_other(const GatedMlpArguments& a, void (*gated)(const GatedArguments*), void (*linear)(const LinearArguments*)) {
    static thread_local std::vector<float> between;
    const int64_t needed = a.gate_up.rows * a.down.in;
    if ((int64_t)between.size() < needed) between.resize(needed);
    GatedArguments first = {a.gate_up, a.gate};
    LinearArguments second = a.down;
    first.linear.out = between.data(), second.x = between.data();
    second.rows = a.gate_up.rows, second.x_stride = a.down.in, second.x_scales = nullptr;
    gated(&first);
    linear(&second);
}

#if defined(TF_AMX)

constexpr int64_t MOST_ROWS = 768;  // that go through the MLP at once: what lies between is read again while it is near

// Where the gate's results go: tiles of 16 rows of 32 numbers, those of the same rows one after the other.
struct InTiles {
    uint8_t* tiles;
    int64_t row_bytes;
    INLINE bf16* at(uint64_t row, uint64_t pair) const {
        return (bf16*)(tiles + row / 16 * 16 * row_bytes + pair / 2 * BLOCK_BYTES + row % 16 * DEPTH_BYTES) + pair % 2 * COLUMNS;
    }
    INLINE void put(int64_t row, int64_t pair, f32x16 v) const { store(at(row, pair), v); }
    INLINE void put(int64_t row, int64_t pair, const Four& v) const {
        const bool in_one = (row & 15) <= 12;  // all in one tile
        bf16* first = at(row, pair);
        for (int64_t r = 0; r < 4; r++) store(in_one ? first + r * 32 : at(row + r, pair), v.v[r]);
    }
};

// 16 rows of `width` numbers in tiles -> int8 tiles in the first half of their place.
INLINE void round_group(uint8_t* tiles, int64_t width, float* scales) {
    __m512i tops[16] = {};
    const auto at = [&](int64_t tile, int64_t row) INLINE_LAMBDA { return tiles + tile * BLOCK_BYTES + row * DEPTH_BYTES; };
    for (int64_t tile = 0; tile < width / 32; tile++)
        for (int64_t row = 0; row < 16; row++) tops[row] = _mm512_max_epu16(tops[row], magnitudes_of(at(tile, row)));
    float inverse[16];
    for (int64_t row = 0; row < 16; row++) inverse[row] = to_int8(highest_of(tops[row]), scales + row);
    for (int64_t tile = 0; tile < width / 64; tile++)
        for (int64_t row = 0; row < 16; row++)
            _mm512_storeu_si512(at(tile, row), rounded_64((bf16*)at(2 * tile, row), (bf16*)at(2 * tile + 1, row), inverse[row]));
}

// What lies between the two products: one buffer, owned by the calling thread, which all threads of its team use.
struct Between {
    uint8_t* tiles;
    float* scales;
    int64_t row_bytes;
};

inline Between between_memory(int64_t all_rows, int64_t width) {
    const int64_t rows = all_rows < MOST_ROWS ? all_rows : MOST_ROWS + TILE_ROWS;
    static thread_local std::vector<uint8_t> memory;
    const int64_t row_bytes = width * (int64_t)sizeof(bf16), filled_up = round_up(rows, TILE_ROWS);
    if ((int64_t)memory.size() < filled_up * (row_bytes + 4) + 64) memory.resize(filled_up * (row_bytes + 4) + 64);
    uint8_t* tiles = (uint8_t*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
    return {tiles, (float*)(tiles + filled_up * row_bytes), row_bytes};
}

// `count` rows of a layer from `top` on.
INLINE Layer some_rows(Layer layer, int64_t top, int64_t count) {
    layer.out = (bf16*)layer.out + top * layer.columns;
    layer.rows = count;
    return layer;
}

// Calls piece(top, count) for equal pieces of many rows, in a team whose threads wait for each other after each.
template <typename Piece> INLINE void in_pieces(int64_t rows, Piece piece) {
    const int64_t pieces = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const auto begin = [&](int64_t i) INLINE_LAMBDA { return i < pieces ? rows * i / pieces / TILE_ROWS * TILE_ROWS : rows; };
    for (int64_t i = 0; i < pieces; i++) {
        piece(begin(i), begin(i + 1) - begin(i));
#pragma omp barrier
    }
}

INLINE bool fits_tiles(const Layer& gate_up, const Layer& down) {
    return has_many_rows(gate_up) && gate_up.dtype == BF16 && down.in % 64 == 0 && gate_up.columns == 2 * down.in;
}

template <typename Act>
INLINE void int8_mlp(const Layer& gate_up, const Layer& down, const Quantized& x, const Between& between, Act act) {
    quantize_rows<bf16>(gate_up, x);
    in_pieces(gate_up.rows, [&](int64_t top, int64_t count) INLINE_LAMBDA {
        const Panel left = {(const uint8_t*)x.row(top), x.stride, count, gate_up.depth_blocks, x.in_tiles};
        gated_rows<Int8Gate<Act, InTiles, bf16>>(gate_up, left, x.scales + top, act, InTiles{between.tiles, between.row_bytes});
#pragma omp barrier
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < count; row += 16)
            round_group(between.tiles + row * between.row_bytes, down.in, between.scales + row);
        const Panel right = {between.tiles, between.row_bytes, count, down.depth_blocks, true};
        int8_rows<bf16>(some_rows(down, top, count), right, between.scales);
    });
}

template <typename Act> INLINE void bf16_mlp(const Layer& gate_up, const Layer& down, const Between& between, Act act) {
    in_pieces(gate_up.rows, [&](int64_t top, int64_t count) INLINE_LAMBDA {
        const int64_t stride = gate_up.x_stride * (int64_t)sizeof(bf16);
        const Panel left = {(const uint8_t*)gate_up.x + top * stride, stride, count, gate_up.depth_blocks, false};
        gated_rows<Bf16Gate<Act, InTiles>>(gate_up, left, nullptr, act, InTiles{between.tiles, between.row_bytes});
#pragma omp barrier
        bf16_rows(some_rows(down, top, count), {between.tiles, between.row_bytes, count, down.depth_blocks, true});
    });
}

#else

INLINE bool fits_tiles(const Layer&, const Layer&) { return false; }

#endif

}  // namespace

// x [rows, in] of gate_up -> out [rows, columns] of down, contiguous: what tf_gated_int8 and then tf_linear_int8 give.
EXPORT void tf_gated_mlp_int8(const GatedMlpArguments* arguments) {
    const GatedMlpArguments& a = *arguments;
    const Layer gate_up(a.gate_up, 1), down(a.down, 1);
    if (!fits_tiles(gate_up, down)) return one_after_the_other(a, tf_gated_int8, tf_linear_int8);
#if defined(TF_AMX)
    const Quantized x = quantized_memory(gate_up);
    const Between between = between_memory(gate_up.rows, down.in);
    with_gate<bf16>(a.gate, [&](auto act) {
#pragma omp parallel
        int8_mlp(gate_up, down, x, between, act);
    });
#endif
}

EXPORT void tf_gated_mlp_bf16(const GatedMlpArguments* arguments) {
    const GatedMlpArguments& a = *arguments;
    const Layer gate_up(a.gate_up, 2), down(a.down, 2);
    if (!fits_tiles(gate_up, down)) return one_after_the_other(a, tf_gated_bf16, tf_linear_bf16);
#if defined(TF_AMX)
    const Between between = between_memory(gate_up.rows, down.in);
    with_gate<bf16>(a.gate, [&](auto act) {
#pragma omp parallel
        bf16_mlp(gate_up, down, between, act);
    });
#endif
}
