// Products of byte matrices on AMX tiles: bf16 x bf16 -> fp32 and int8 x int8 -> int32.
//
// A tile row is 64 bytes. The right side lies packed in blocks of 16 columns and 64 bytes of depth,
// 1 KiB each: row r holds, for each column, the four bytes 4r .. 4r + 3 of the depth.
#pragma once

#include "vec.h"

#include <sys/syscall.h>
#include <unistd.h>

#if defined(__AMX_TILE__) && defined(__AMX_INT8__) && defined(__AMX_BF16__)
#define TF_AMX 1
#endif

namespace tf {

constexpr int64_t DEPTH_BYTES = 64;   // of one tile
constexpr int64_t COLUMNS = 16;       // of one packed block
constexpr int64_t BLOCK_BYTES = 1024;

#if defined(TF_AMX)

// The kernel hands the tile registers out on request, once a process.
static inline bool request_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

static const bool tiles_granted = request_tiles();

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

INLINE void load_config(const TileConfig& config) {
    // the intrinsic tells GCC of 8 bytes only: without this the others may never be written
    asm volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

// Tiles 0-3: results of two row groups x two column blocks; 4, 5: left; 6, 7: right.
INLINE void configure_tiles(int first_rows, int second_rows) {
    TileConfig config;
    const int rows[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, 16, 16};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.row_bytes[i] = rows[i] ? 64 : 0;
    }
    load_config(config);
}

// What has been stored lies in memory before tiles are loaded from it; the intrinsics do not say so.
INLINE void before_tiles() { asm volatile("" : : : "memory"); }

struct Int8Tiles {
    typedef int32_t Result;
    template <int C, int A, int B> static INLINE void multiply();
};
struct Bf16Tiles {
    typedef float Result;
    template <int C, int A, int B> static INLINE void multiply();
};
// the intrinsics are macros over literal tile numbers
#define TF_MULTIPLY(c, a, b)                                                        \
    template <> INLINE void Int8Tiles::multiply<c, a, b>() { _tile_dpbssd(c, a, b); } \
    template <> INLINE void Bf16Tiles::multiply<c, a, b>() { _tile_dpbf16ps(c, a, b); }
TF_MULTIPLY(0, 4, 6)
TF_MULTIPLY(1, 4, 7)
TF_MULTIPLY(2, 5, 6)
TF_MULTIPLY(3, 5, 7)
#undef TF_MULTIPLY

// out [16 or 32 rows][16 or 32 columns], out_stride in bytes: rows of `left` times one packed column
// block, or two that follow each other.
template <typename Op, bool TWO_ROWS, bool TWO_COLUMNS>
INLINE void tile_product(const uint8_t* left, int64_t left_stride, const uint8_t* right, int64_t depth_blocks,
                         typename Op::Result* out, int64_t out_stride) {
    const uint8_t* second_right = right + depth_blocks * BLOCK_BYTES;
    before_tiles();
    _tile_zero(0);
    if (TWO_COLUMNS) _tile_zero(1);
    if (TWO_ROWS) _tile_zero(2);
    if (TWO_ROWS && TWO_COLUMNS) _tile_zero(3);
    for (int64_t k = 0; k < depth_blocks; k++) {
        _tile_loadd(4, left + k * DEPTH_BYTES, left_stride);
        _tile_loadd(6, right + k * BLOCK_BYTES, 64);
        Op::template multiply<0, 4, 6>();
        if (TWO_ROWS) {
            _tile_loadd(5, left + 16 * left_stride + k * DEPTH_BYTES, left_stride);
            Op::template multiply<2, 5, 6>();
        }
        if (TWO_COLUMNS) {
            _tile_loadd(7, second_right + k * BLOCK_BYTES, 64);
            Op::template multiply<1, 4, 7>();
            if (TWO_ROWS) Op::template multiply<3, 5, 7>();
        }
    }
    uint8_t *first = (uint8_t*)out, *second = first + 16 * out_stride;
    _tile_stored(0, first, out_stride);
    if (TWO_COLUMNS) _tile_stored(1, first + 64, out_stride);
    if (TWO_ROWS) _tile_stored(2, second, out_stride);
    if (TWO_ROWS && TWO_COLUMNS) _tile_stored(3, second + 64, out_stride);
}

#endif  // TF_AMX

}  // namespace tf
