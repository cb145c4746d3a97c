// Attention over the paged KV cache; see paged_attention.py for the contract.
//
// Work is cut into items whose shape depends only on their own sequence, so a sequence's result
// does not depend on what else is in the batch nor on the number of threads:
//   decode item (sequence, KV head, split of SPLIT or TALL_SPLIT tokens): reads its K and V once, for all query
//     heads of the group; the splits of a sequence are merged at the end;
//   chunk item (sequence, KV head, block of query tokens): online softmax over tiles of TILE tokens, which on AMX are
//     packed before for all items of the sequence and head.
#include "paged_chunk.h"
#include "paged_chunk_tiles.h"
#include "paged_decode.h"

using namespace tf;

namespace {

constexpr int64_t MOST_PACKED_BYTES = 8 << 20;  // beyond it, items pack their own

// A tile of keys and values that several items of a sequence and head see.
struct Packing {
    int32_t sequence, head;
    int64_t tile;
};

struct Plan {
    std::vector<Item> items;  // chunks, then decodes
    std::vector<Packing> packings;
    std::vector<int64_t> decodes, first_partial;  // sequences with one query; their splits follow
    int64_t chunks = 0, partials = 0, work = 0;

    explicit Plan(const Problem& p) {
        for (int64_t s = 0; s < p.sequences; s++) {
            work += p.query_len(s) * p.kv_lens[s] * p.q_heads * p.dim;
            if (p.query_len(s) > 1) add_chunk(p, s);
        }
        chunks = items.size();
        for (int64_t s = 0; s < p.sequences; s++)
            if (p.query_len(s) == 1) add_decode(p, s);
        first_partial.push_back(partials);
    }
    // Decode items that a thread takes at once: those of a sequence, whose heads lie side by side in memory, as long as
    // there are some for every thread.
    int64_t decodes_at_once(int64_t threads) const {
        const int64_t count = items.size() - chunks, shared = count / (4 * threads);
        if (shared <= 1) return 1;
        const int64_t of_sequence = count / (int64_t)decodes.size();
        return shared < of_sequence ? shared : of_sequence;
    }
    void add_chunk(const Problem& p, int64_t s) {
        const int64_t length = p.query_len(s), group = p.group();
        // a taller block packs its keys for more rows; the result of a row is the same in any
        const int64_t rows = chunks_on_tiles(p) && length * group > 2 * TALL_ROWS ? TALL_ROWS : ROWS;
        const int64_t block = rows / group > 0 ? rows / group : 1;
        const int64_t tiles = add_packings(p, s, length > block), first = packings.size() - tiles * p.kv_heads;
        for (int64_t begin = (length - 1) / block * block; begin >= 0; begin -= block)  // longest first
            for (int32_t h = 0; h < p.kv_heads; h++)
                items.push_back({(int32_t)s, h, begin, begin + block < length ? begin + block : length, -1,
                                 tiles > 0 ? first + h * tiles : -1});
    }
    // Returns how many of each head; 0: none are shared.
    int64_t add_packings(const Problem& p, int64_t s, bool several) {
        if (!several || !chunks_on_tiles(p)) return 0;
        const int64_t begin = p.first_tile(s), tiles = (p.kv_lens[s] - begin + TILE - 1) / TILE;
        if ((int64_t)(packings.size() + tiles * p.kv_heads) * packed_bytes(p) > MOST_PACKED_BYTES) return 0;
        for (int32_t h = 0; h < p.kv_heads; h++)
            for (int64_t i = 0; i < tiles; i++) packings.push_back({(int32_t)s, h, begin + i * TILE});
        return tiles;
    }
    void add_decode(const Problem& p, int64_t s) {
        decodes.push_back(s);
        first_partial.push_back(partials);
        const int64_t length = p.kv_lens[s], first = p.first_visible(length - 1);
        const int64_t split = decodes_on_tiles(p) ? TALL_SPLIT : SPLIT;
        if (length == 0) return;
        for (int32_t h = 0; h < p.kv_heads; h++)
            for (int64_t i = first / split; i * split < length; i++) {
                int64_t begin = i * split > first ? i * split : first;
                int64_t end = (i + 1) * split < length ? (i + 1) * split : length;
                items.push_back({(int32_t)s, h, begin, end, partials++});
            }
    }
};

}  // namespace

EXPORT void tf_paged_attention(const AttentionArguments* arguments) {
    const Problem p(*arguments);
    const int64_t q_heads = p.q_heads, kv_heads = p.kv_heads;
    const Plan plan(p);
    const bool on_tiles = chunks_on_tiles(p);
    static thread_local std::vector<float> partials;
    partials.resize(plan.partials * p.group() * partial_size(p));
    float* memory = partials.data();
    static thread_local std::vector<uint8_t> tiles;
    const int64_t packed = packed_bytes(p), packings = plan.packings.size();
    if ((int64_t)tiles.size() < packings * packed + 64) tiles.resize(packings * packed + 64);
    uint8_t* shared = (uint8_t*)(((uintptr_t)tiles.data() + 63) & ~(uintptr_t)63);
    const int64_t items = plan.items.size(), merges = plan.decodes.size() * q_heads;
    const int64_t at_once = plan.decodes_at_once(omp_get_max_threads());
#pragma omp parallel if (plan.work > SERIAL_ELEMENTS)
    {
        const TinyIsZero tiny(on_tiles || decodes_on_tiles(p));
        if (packings > 0) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < packings; i++) {
                const Packing& at = plan.packings[i];
                pack_shared(p, at.sequence, at.head, at.tile, shared + i * packed);
            }
        }
        if (plan.chunks > 0) {
#pragma omp for schedule(dynamic) nowait
            for (int64_t i = 0; i < plan.chunks; i++) {
                const int64_t first = plan.items[i].packed;
                if (on_tiles) chunk_item_on_tiles(p, plan.items[i], first < 0 ? nullptr : shared + first * packed);
                else chunk_item(p, plan.items[i]);
            }
        }
        if (plan.chunks < items) {
            configure_decode_tiles(p);
#pragma omp for schedule(dynamic, at_once)
            for (int64_t i = plan.chunks; i < items; i++) decode_item(p, plan.items[i], memory);
            release_decode_tiles(p);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < merges; i++) {
            int64_t d = i / q_heads, head = i % q_heads, group = p.group();
            int64_t splits = (plan.first_partial[d + 1] - plan.first_partial[d]) / kv_heads;
            int64_t index = plan.first_partial[d] + head / group * splits;
            const float* from = memory + index * group * partial_size(p) + head % group * partial_size(p);
            merge(p, plan.decodes[d], head, from, splits);
        }
    }
}