// Chunk items of paged attention on AMX tiles: bf16 queries over bf16 KV, or int8 KV widened to bf16; sums and
// softmax in fp32.
//
// Scores lie transposed, a key a row and a query row a lane, so nothing is summed across lanes: 16 query rows, a
// lane set, against TILE keys at a time. While a set is weighed, the tiles multiply for the one after it (keys x
// queries) and the one before it (values x weights). The weights are rounded to bf16, as every bf16 attention does.
#pragma once

#include "paged_chunk.h"
#include "paged_chunk_pack.h"

namespace tf {

#if defined(TF_AMX)

struct TileScratch {
    int64_t sets, blocks, quads;  // lane sets; tiles of the depth of a head, and quads of its sums
    float *acc, *top, *total;     // [sets][quads][64 dimensions][16], [sets][16]; top in base 2
    float *scores[2], *fresh[2];  // [TILE][16]; [quads][64 dimensions][16]
    f32x16 factors[2];            // for acc, before what is fresh comes to it
    i32x16* positions;            // [sets], of the query rows
    uint8_t *queries, *weights[2];  // [sets][blocks], [TILE / 32]: packed as tiles.h says
    uint8_t* packed;               // room for a tile of keys and values
    TileScratch(int64_t rows, int64_t dim) : sets((rows + 15) / 16), blocks(dim / 32), quads((blocks + 1) / 2) {
        const int64_t sums = sets * quads * QUAD_BYTES;
        const int64_t of_sets = sums + sets * (3 * 64 + blocks * BLOCK_BYTES), in_turns = TILE * 64 + quads * QUAD_BYTES + TILE * 32;
        uint8_t* at = (uint8_t*)scratch((of_sets + 2 * in_turns + PackedTile::bytes(dim)) / 4);
        acc = (float*)at, at += sums;
        top = (float*)at, at += sets * 64;
        total = (float*)at, at += sets * 64;
        positions = (i32x16*)at, at += sets * 64;
        for (int i = 0; i < 2; i++) scores[i] = (float*)at, at += TILE * 64;
        for (int i = 0; i < 2; i++) fresh[i] = (float*)at, at += quads * QUAD_BYTES;
        for (int i = 0; i < 2; i++) weights[i] = at, at += TILE * 32;
        queries = at, at += sets * blocks * BLOCK_BYTES;
        packed = at;
    }
};

// 2^x for x <= 0 within 1e-4 of it, 0 below -126 (TinyIsZero); a NaN stays one.
INLINE f32x16 power_of_two(f32x16 x) {
    const f32x16 r = (f32x16)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    f32x16 p = r * 7.8024519468e-2f + 2.2606717843e-1f;
    p = p * r + 6.9583352206e-1f;
    p = p * r + 9.9992522137e-1f;
    return (f32x16)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// Scores of keys that a query row does not see become -infinity.
INLINE void hide(const Problem& p, i32x16 positions, int64_t tile, int64_t keys, float* scores) {
    const i32x16 lowest = p.window > 0 ? positions - (int32_t)p.window : i32x16{} - 1;
    for (int32_t j = 0; j < keys; j++) {
        const i32x16 key = i32x16{} + (int32_t)(tile + j);
        const f32x16 v = load(scores + j * LANES), seen = key <= positions ? v : splat(NOTHING);
        store(scores + j * LANES, key > lowest ? seen : splat(NOTHING));
    }
}

// Two vectors as bf16, number after number of each in turn.
INLINE __m512i pairs_of(f32x16 even, f32x16 odd) {
    const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                                  6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(side_by_side, (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even));
}

INLINE f32x16 top_of(const float* scores, int64_t keys) {
    f32x16 tops[4] = {splat(NOTHING), splat(NOTHING), splat(NOTHING), splat(NOTHING)};
    for (int64_t j = 0; j < keys; j += 4)
        for (int i = 0; i < 4; i++) tops[i] = max(tops[i], load(scores + (j + i) * LANES));
    return max(max(tops[0], tops[1]), max(tops[2], tops[3]));
}

// Scores of a lane set become packed weights: 2^(score x scale - top). Returns their sums.
INLINE f32x16 weigh(const float* scores, int64_t keys, float scale, f32x16 top, uint8_t* weights, Meanwhile& meanwhile) {
    const int64_t at_once = (meanwhile.steps * 16 + keys - 1) / keys;
    f32x16 sums[4] = {};
    for (int64_t begin = 0; begin < keys; begin += 16) {
        meanwhile.advance(at_once);
        for (int64_t j = begin; j < begin + 16; j += 4) {
            f32x16 v[4];
            for (int i = 0; i < 4; i++) {
                v[i] = power_of_two(load(scores + (j + i) * LANES) * scale - top);
                sums[i] += v[i];
            }
            for (int i = 0; i < 4; i += 2) _mm512_store_si512(weights + (j + i) * 32, pairs_of(v[i], v[i + 1]));
        }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// One chunk item on its way through the keys, tile after tile.
struct TileWalk {
    const Problem& p;
    const Chunk& chunk;
    TileScratch& memory;
    float scale;          // of scores, to base 2
    PackedTile packed{};  // the tile that is walked

    INLINE int64_t first_position(int64_t set) const { return memory.positions[set][0]; }
    INLINE int64_t last_position(int64_t set) const { return memory.positions[set][15]; }
    // Keys of the tile that a set needs: those before the position of its last row.
    INLINE int64_t keys_of(int64_t set, int64_t tile) const {
        const int64_t needed = last_position(set) + 1 - tile;
        return needed < TILE ? round_up(needed, 32) : TILE;
    }
    INLINE void add_scores(Meanwhile& to, int64_t set) const {
        const int64_t width = p.dim * 2;
        to.add({packed.keys, memory.queries + set * memory.blocks * BLOCK_BYTES, 16 * width, width, 64, memory.blocks,
                memory.scores[set % 2]});
    }
    INLINE void add_sums(Meanwhile& to, int64_t set, int64_t keys) const {
        for (int64_t quad = 0; quad < memory.quads; quad++)
            to.add({packed.values + quad * (TILE / 32) * QUAD_BYTES, memory.weights[set % 2], BLOCK_BYTES, 64, QUAD_BYTES,
                    keys / 32, memory.fresh[set % 2] + quad * (QUAD_BYTES / 4)});
    }
    // The set's scores of the tile become weights; what is fresh of the set before the last comes to its sums, while
    // the highest score is found.
    INLINE void weigh_set(int64_t first, int64_t set, int64_t tile, int64_t keys, Meanwhile& meanwhile) const {
        float *scores = memory.scores[set % 2], *top = memory.top + set * LANES, *total = memory.total + set * LANES;
        if (p.softcap > 0) {
            for (int64_t i = 0; i < keys * LANES; i += LANES) store(scores + i, load(scores + i) * p.scale);
            soften(scores, keys * LANES, p.softcap);
        }
        const i32x16 positions = memory.positions[set];
        if (first_position(set) < tile + keys - 1 || (p.window > 0 && tile <= last_position(set) - p.window))
            hide(p, positions, tile, keys, scores);
        const f32x16 before = load(top), now = max(before, top_of(scores, keys) * scale);
        // of a row that has seen nothing yet, -infinity - -infinity would be NaN
        const f32x16 used = now == NOTHING ? f32x16{} : now;
        const f32x16 factor = now == before ? splat(1.0f) : power_of_two(before - used);
        if (set >= first + 2) add_fresh(set - 2, tile);
        const f32x16 fresh = weigh(scores, keys, scale, used, memory.weights[set % 2], meanwhile);
        meanwhile.advance(meanwhile.steps);
        store(top, now);
        store(total, load(total) * factor + fresh);
        memory.factors[set % 2] = factor;
    }
    // What the weights of the set have brought comes to its sums; of the first tile it is the sums.
    INLINE void add_fresh(int64_t set, int64_t tile) const {
        const float* fresh = memory.fresh[set % 2];
        float* acc = memory.acc + set * memory.quads * (QUAD_BYTES / 4);
        const f32x16 factor = memory.factors[set % 2];
        if (tile <= chunk.begin) {
            memcpy(acc, fresh, memory.quads * QUAD_BYTES);
            return;
        }
        for (int64_t i = 0; i < memory.quads * (QUAD_BYTES / 4); i += LANES)
            store(acc + i, load(acc + i) * factor + load(fresh + i));
    }
    // All lane sets against a packed tile; those before `first` see nothing of it.
    INLINE void run(int64_t first, int64_t tile) const {
        before_tiles();
        Meanwhile opening;
        add_scores(opening, first);
        opening.advance(opening.steps);
        int64_t before = 0;  // keys of the set before
        for (int64_t set = first; set < memory.sets; set++) {
            Meanwhile meanwhile;
            if (set + 1 < memory.sets) add_scores(meanwhile, set + 1);
            if (set > first) add_sums(meanwhile, set - 1, before);
            before = keys_of(set, tile);
            weigh_set(first, set, tile, before, meanwhile);
        }
        Meanwhile closing;
        add_sums(closing, memory.sets - 1, before);
        if (memory.sets > first + 1) add_fresh(memory.sets - 2, tile);
        closing.advance(closing.steps);
        add_fresh(memory.sets - 1, tile);
    }
};

// Visits the query rows of an item, token after token, without a division for each; those beyond the last repeat it.
struct RowWalk {
    const Chunk& chunk;
    int64_t left, token = 0, head = 0;  // rows after this one; token of the chunk, head of the group

    explicit RowWalk(const Chunk& chunk) : chunk(chunk), left(chunk.rows - 1) {}
    INLINE void next() {
        if (left <= 0) return;
        left--;
        if (++head == chunk.group) head = 0, token++;
    }
};

// Queries packed, positions, nothing seen yet.
INLINE void start_sets(const Problem& p, const Item& item, const Chunk& chunk, TileScratch& memory) {
    RowWalk row(chunk);
    for (int64_t set = 0; set < memory.sets; set++) {
        const uint16_t* rows[16];
        alignas(64) int32_t positions[16];
        for (int64_t i = 0; i < 16; i++, row.next()) {
            const int64_t head = item.head * chunk.group + row.head;
            rows[i] = (const uint16_t*)p.q + (chunk.first_token + row.token) * p.q_stride_token + head * p.q_stride_head;
            positions[i] = (int32_t)(chunk.position + row.token);
        }
        memcpy(memory.positions + set, positions, 64);
        for (int64_t block = 0; block < memory.blocks; block++) {
            __m512i a[16];
            for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + block * 32);
            transpose(a);
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(memory.queries + (set * memory.blocks + block) * BLOCK_BYTES + i * 64, a[i]);
        }
        store(memory.top + set * LANES, splat(NOTHING));
        store(memory.total + set * LANES, f32x16{});
    }
}

// What sums of a set are multiplied with at the end.
INLINE f32x16 last_factor(const Problem& p, const Item& item, const Chunk& chunk, int64_t set, const TileScratch& memory) {
    f32x16 sum = load(memory.total + set * LANES), factor = splat(1.0f);
    if (p.sinks) {  // the sink may be above all scores
        constexpr float LN_2 = 0.693147180559945309f;
        f32x16 sinks;
        for (int64_t i = 0; i < LANES; i++) sinks[i] = p.sinks[item.head * chunk.group + (set * 16 + i) % chunk.group];
        const f32x16 top = load(memory.top + set * LANES) * LN_2, highest = max(top, sinks);
        factor = exp(top - highest);
        sum = sum * factor + exp(sinks - highest);
    }
    return factor / sum;
}

INLINE void store_sets(const Problem& p, const Item& item, const Chunk& chunk, const TileScratch& memory) {
    RowWalk row(chunk);
    for (int64_t set = 0; set < memory.sets; set++) {
        const f32x16 factor = last_factor(p, item, chunk, set, memory);
        const int64_t left = chunk.rows - set * 16, count = left < 16 ? left : 16;
        uint16_t* rows[16];
        for (int64_t i = 0; i < count; i++, row.next())
            rows[i] = (uint16_t*)p.out + ((chunk.first_token + row.token) * p.q_heads + item.head * chunk.group + row.head) * p.dim;
        for (int64_t d = 0; d < p.dim; d += 32) {
            const float* acc = memory.acc + set * memory.quads * (QUAD_BYTES / 4) + d * LANES;
            __m512i a[16];
            for (int i = 0; i < 16; i++)
                a[i] = pairs_of(load(acc + 2 * i * LANES) * factor, load(acc + (2 * i + 1) * LANES) * factor);
            transpose(a);
            for (int64_t i = 0; i < count; i++) _mm512_storeu_si512(rows[i] + d, a[i]);
        }
    }
}

// shared: the packed tiles of the item's sequence and head, from first_tile on; null: they are packed here.
inline void chunk_item_on_tiles(const Problem& p, const Item& item, uint8_t* shared) {
    const Chunk chunk(p, item);
    TileScratch memory(chunk.rows, p.dim);
    TileWalk walk{p, chunk, memory, (p.softcap > 0 ? 1.0f : p.scale) * 1.44269504088896341f};
    start_sets(p, item, chunk, memory);
    configure_tiles(16, 16);
    const int64_t first = p.first_tile(item.sequence), bytes = PackedTile::bytes(p.dim);
    for (int64_t tile = chunk.begin / TILE * TILE; tile < chunk.end; tile += TILE) {
        walk.packed = PackedTile(p.dim, shared ? shared + (tile - first) / TILE * bytes : memory.packed);
        if (!shared) pack_tile(p, item.sequence, item.head, tile, chunk.begin, chunk.end, walk.packed);
        walk.run(tile > chunk.position ? (tile - chunk.position) * chunk.group / 16 : 0, tile);
    }
    _tile_release();
    store_sets(p, item, chunk, memory);
}

#else

inline void chunk_item_on_tiles(const Problem& p, const Item& item, uint8_t*) { chunk_item(p, item); }

#endif

}  // namespace tf
