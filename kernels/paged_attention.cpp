// Attention over the paged KV cache; see paged_attention.py for the contract.
//
// Work is cut into items whose shape depends only on their own sequence, so a sequence's result
// does not depend on what else is in the batch nor on the number of threads:
//   decode item (sequence, KV head, split of SPLIT or TALL_SPLIT tokens): reads its K and V once, for all query
//     heads of the group; the splits of a sequence are merged at the end;
//   chunk item (sequence, KV head, block of query tokens): online softmax over tiles of TILE tokens.
#include "paged_chunk.h"
#include "paged_chunk_tiles.h"
#include "paged_decode.h"

using namespace tf;

namespace {

struct Plan {
    std::vector<Item> items;
    std::vector<int64_t> decodes, first_partial;  // sequences with one query; their splits follow
    int64_t partials = 0, work = 0;

    explicit Plan(const Problem& p) {
        for (int64_t s = 0; s < p.sequences; s++) {
            work += p.query_len(s) * p.kv_lens[s] * p.q_heads * p.dim;
            if (p.query_len(s) > 1) add_chunk(p, s);
        }
        for (int64_t s = 0; s < p.sequences; s++)
            if (p.query_len(s) == 1) add_decode(p, s);
        first_partial.push_back(partials);
    }
    void add_chunk(const Problem& p, int64_t s) {
        const int64_t length = p.query_len(s), group = p.group();
        // a taller block packs its keys for more rows; the result of a row is the same in any
        const int64_t rows = chunks_on_tiles(p) && length * group > 2 * TALL_ROWS ? TALL_ROWS : ROWS;
        const int64_t block = rows / group > 0 ? rows / group : 1;
        for (int64_t begin = (length - 1) / block * block; begin >= 0; begin -= block)  // longest first
            for (int32_t h = 0; h < p.kv_heads; h++)
                items.push_back({(int32_t)s, h, begin, begin + block < length ? begin + block : length, -1});
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
    const int64_t items = plan.items.size(), merges = plan.decodes.size() * q_heads;
#pragma omp parallel if (plan.work > SERIAL_ELEMENTS)
    {
        bool configured = false;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++) {  // chunks, which leave no tiles configured, come first
            if (plan.items[i].partial >= 0) {
                if (!configured) configure_decode_tiles(p);
                configured = true;
                decode_item(p, plan.items[i], memory);
            } else if (on_tiles) {
                chunk_item_on_tiles(p, plan.items[i]);
            } else {
                chunk_item(p, plan.items[i]);
            }
        }
        if (configured) release_decode_tiles(p);
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