// Attention over the paged KV cache; see paged_attention.py for the contract.
//
// Work is cut into items whose shape depends only on their own sequence, so a sequence's result
// does not depend on what else is in the batch nor on the number of threads:
//   decode item (sequence, KV head, split of SPLIT tokens): reads its K and V once, for all query
//     heads of the group; the splits of a sequence are merged at the end;
//   chunk item (sequence, KV head, block of query tokens): online softmax over tiles of TILE tokens.
#include "paged.h"

#include <vector>

using namespace tf;

namespace {

constexpr int64_t SPLIT = 128;     // tokens of one decode item
constexpr int64_t TILE = 64;       // tokens of one step of a chunk item
constexpr int64_t ROWS = 96;       // query rows (tokens x heads of the group) of a chunk item
constexpr float NOTHING = -__builtin_inff();

// Each field is 8 bytes wide, in the order in which paged_attention.py packs them.
struct AttentionArguments {
    Pool pool;
    Batch batch;
    const void* q;       // [tokens, q_heads, dim]
    void* out;           // the same, contiguous
    const float* sinks;  // [q_heads] or null
    int64_t q_stride_token, q_stride_head, q_heads, window, dtype;  // window 0: none
    double scale, softcap;                                          // softcap 0: none
};

struct Problem {
    const void *q, *k, *v;
    void* out;
    const int32_t *query_starts, *kv_lens, *block_tables;
    const float* sinks;
    int64_t q_stride_token, q_stride_head, table_stride, sequences, q_heads, kv_heads, dim, block_size, window;
    int64_t dtype, kv_dtype;
    float scale, softcap;

    explicit Problem(const AttentionArguments& a)
        : q(a.q), k(a.pool.k), v(a.pool.v), out(a.out), query_starts(a.batch.query_starts), kv_lens(a.batch.kv_lens),
          block_tables(a.batch.block_tables), sinks(a.sinks), q_stride_token(a.q_stride_token),
          q_stride_head(a.q_stride_head), table_stride(a.batch.table_stride), sequences(a.batch.sequences),
          q_heads(a.q_heads), kv_heads(a.pool.kv_heads), dim(a.pool.dim), block_size(a.pool.block_size),
          window(a.window), dtype(a.dtype), kv_dtype(a.pool.dtype), scale(a.scale), softcap(a.softcap) {}

    int64_t group() const { return q_heads / kv_heads; }
    int64_t query_len(int64_t s) const { return query_starts[s + 1] - query_starts[s]; }
    // rows[j] = element offset of the K (and V) row of token begin + j; one division a block.
    INLINE void find_rows(int64_t s, int64_t head, int64_t begin, int64_t end, int64_t* rows) const {
        const int32_t* table = block_tables + s * table_stride;
        int64_t index = begin / block_size, offset = begin % block_size;
        for (int64_t left = end - begin; left > 0; index++, offset = 0) {
            int64_t first = ((table[index] * kv_heads + head) * block_size + offset) * dim;
            int64_t count = block_size - offset < left ? block_size - offset : left;
            for (int64_t j = 0; j < count; j++) *rows++ = first + j * dim;
            left -= count;
        }
    }
    // The first token that a query at this position sees.
    INLINE int64_t first_visible(int64_t position) const {
        return window > 0 && position >= window ? position - window + 1 : 0;
    }
};

struct Item {
    int32_t sequence, head;
    int64_t begin, end;  // decode: tokens of the split; chunk: query tokens
    int64_t partial;     // decode: index of this split's partial result; -1 for a chunk
};

// A thread's scratch memory: grows, never shrinks.
INLINE float* scratch(int64_t floats) {
    static thread_local std::vector<float> memory;
    if ((int64_t)memory.size() < floats + LANES) memory.resize(floats + LANES);
    return (float*)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

// A query row in fp32, scaled.
INLINE void load_query(const Problem& p, int64_t token, int64_t head, float* to) {
    with_dtype(p.dtype, [&]<typename T>(T*) {
        const T* from = (const T*)p.q + token * p.q_stride_token + head * p.q_stride_head;
        for (int64_t i = 0; i < p.dim; i += LANES) store(to + i, load(from + i) * p.scale);
    });
}

INLINE void store_result(const Problem& p, int64_t token, int64_t head, const float* from, float factor) {
    with_dtype(p.dtype, [&]<typename T>(T*) {
        T* to = (T*)p.out + (token * p.q_heads + head) * p.dim;
        for (int64_t i = 0; i < p.dim; i += LANES) store(to + i, load(from + i) * factor);
    });
}

INLINE void soften(float* scores, int64_t count, float softcap) {
    for (int64_t i = 0; i < count; i += LANES) store(scores + i, softcap * tanh(load(scores + i) / softcap));
}

INLINE float highest(const float* scores, int64_t count) {
    f32x16 top = load(scores);
    for (int64_t i = LANES; i < count; i += LANES) top = max(top, load(scores + i));
    return max(top);
}

// scores -> e^(score - top), and their sum.
INLINE float exponentiate(float* scores, int64_t count, float top) {
    f32x16 total = {};
    for (int64_t i = 0; i < count; i += LANES) {
        f32x16 weight = exp(load(scores + i) - top);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

// ---- decode ----------------------------------------------------------------------------------

// A split's result for one head: the header (highest score, sum of weights), then dim sums.
INLINE int64_t partial_size(const Problem& p) { return p.dim + LANES; }

// scores[h][j] = q[h] . k[rows[j]], four tokens at a time.
template <int HEADS, typename KV>
INLINE void decode_scores(const KV* k, const int64_t* rows, int64_t count, const float* q, int64_t dim, float* scores) {
    for (int64_t j = 0; j < count; j += 4) {
        const KV* token[4];
        for (int t = 0; t < 4; t++) token[t] = k + rows[j + t < count ? j + t : count - 1];
        f32x16 total[HEADS][4] = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            f32x16 key[4];
            for (int t = 0; t < 4; t++) key[t] = load(token[t] + i);
            for (int h = 0; h < HEADS; h++) {
                f32x16 query = load(q + h * dim + i);
                for (int t = 0; t < 4; t++) total[h][t] += key[t] * query;
            }
        }
        for (int h = 0; h < HEADS; h++) sum4(total[h], scores + h * SPLIT + j);
    }
}

// out[h][0 : VECS * 16] = sum over j of weights[h][j] v[rows[j]].
template <int HEADS, int VECS, typename KV>
INLINE void decode_values(const KV* v, const int64_t* rows, int64_t count, const float* weights, float* out,
                          int64_t out_stride) {
    f32x16 total[HEADS][VECS] = {};
    for (int64_t j = 0; j < count; j++) {
        f32x16 value[VECS];
        for (int i = 0; i < VECS; i++) value[i] = load(v + rows[j] + i * LANES);
        for (int h = 0; h < HEADS; h++)
            for (int i = 0; i < VECS; i++) total[h][i] += value[i] * weights[h * SPLIT + j];
    }
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < VECS; i++) store(out + h * out_stride + i * LANES, total[h][i]);
}

template <int HEADS, typename KV>
void decode_heads(const Problem& p, const Item& item, int64_t first_head, const int64_t* rows, float* partial) {
    const int64_t count = item.end - item.begin, whole = round_up(count, LANES), stride = partial_size(p);
    float* q = scratch(HEADS * (p.dim + SPLIT));
    float* scores = q + HEADS * p.dim;
    for (int h = 0; h < HEADS; h++) load_query(p, p.query_starts[item.sequence], first_head + h, q + h * p.dim);
    decode_scores<HEADS>((const KV*)p.k, rows, count, q, p.dim, scores);
    for (int h = 0; h < HEADS; h++) {
        float* row = scores + h * SPLIT;
        if (p.softcap > 0) soften(row, whole, p.softcap);
        for (int64_t j = count; j < whole; j++) row[j] = NOTHING;
        float top = highest(row, whole);
        partial[h * stride] = top;
        partial[h * stride + 1] = exponentiate(row, whole, top);
    }
    const KV* v = (const KV*)p.v;
    int64_t i = 0;
    for (; i + 4 * LANES <= p.dim; i += 4 * LANES)
        decode_values<HEADS, 4>(v + i, rows, count, scores, partial + LANES + i, stride);
    for (; i < p.dim; i += LANES) decode_values<HEADS, 1>(v + i, rows, count, scores, partial + LANES + i, stride);
}

void decode_item(const Problem& p, const Item& item, float* partials) {
    int64_t rows[SPLIT];
    p.find_rows(item.sequence, item.head, item.begin, item.end, rows);
    float* partial = partials + item.partial * p.group() * partial_size(p);
    with_dtype(p.kv_dtype, [&]<typename KV>(KV*) {
        for (int64_t g = 0; g < p.group();) {
            int64_t head = item.head * p.group() + g, left = p.group() - g;
            float* to = partial + g * partial_size(p);
            if (left >= 4) decode_heads<4, KV>(p, item, head, rows, to), g += 4;
            else if (left == 3) decode_heads<3, KV>(p, item, head, rows, to), g += 3;
            else if (left == 2) decode_heads<2, KV>(p, item, head, rows, to), g += 2;
            else decode_heads<1, KV>(p, item, head, rows, to), g += 1;
        }
    });
}

// The splits of one query head, in their order, and the sink become the result.
void merge(const Problem& p, int64_t s, int64_t head, const float* partial, int64_t splits) {
    const int64_t split_stride = p.group() * partial_size(p);
    float top = p.sinks ? p.sinks[head] : NOTHING;
    for (int64_t i = 0; i < splits; i++) top = partial[i * split_stride] > top ? partial[i * split_stride] : top;
    float total = p.sinks ? __builtin_expf(p.sinks[head] - top) : 0.0f;
    float* acc = scratch(p.dim);
    for (int64_t j = 0; j < p.dim; j += LANES) store(acc + j, f32x16{});
    for (int64_t i = 0; i < splits; i++) {
        const float* from = partial + i * split_stride;
        float factor = __builtin_expf(from[0] - top);
        total += from[1] * factor;
        for (int64_t j = 0; j < p.dim; j += LANES) store(acc + j, load(acc + j) + load(from + LANES + j) * factor);
    }
    store_result(p, p.query_starts[s], head, acc, total == 0.0f ? 0.0f : 1.0f / total);
}

// ---- chunks ----------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int MICRO_ROWS = 6, MICRO_VECS = 4;
#else
constexpr int MICRO_ROWS = 6, MICRO_VECS = 1;
#endif

// c[0 : MICRO_ROWS][0 : 16 VECS] = (ADD ? c : 0) + a b, with a [.., depth] and b [depth, ..].
template <int VECS, bool ADD>
INLINE void micro(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t depth) {
    f32x16 total[MICRO_ROWS][VECS];
    for (int r = 0; r < MICRO_ROWS; r++)
        for (int i = 0; i < VECS; i++) total[r][i] = ADD ? load(c + r * ldc + i * LANES) : f32x16{};
    for (int64_t d = 0; d < depth; d++) {
        f32x16 right[VECS];
        for (int i = 0; i < VECS; i++) right[i] = load(b + d * ldb + i * LANES);
        for (int r = 0; r < MICRO_ROWS; r++)
            for (int i = 0; i < VECS; i++) total[r][i] += right[i] * a[r * lda + d];
    }
    for (int r = 0; r < MICRO_ROWS; r++)
        for (int i = 0; i < VECS; i++) store(c + r * ldc + i * LANES, total[r][i]);
}

// rows is a multiple of MICRO_ROWS, columns one of 16.
template <bool ADD>
void product(const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc, int64_t rows,
             int64_t columns, int64_t depth) {
    for (int64_t r = 0; r < rows; r += MICRO_ROWS) {
        int64_t i = 0;
        for (; i + MICRO_VECS * LANES <= columns; i += MICRO_VECS * LANES)
            micro<MICRO_VECS, ADD>(a + r * lda, lda, b + i, ldb, c + r * ldc + i, ldc, depth);
        for (; i < columns; i += LANES) micro<1, ADD>(a + r * lda, lda, b + i, ldb, c + r * ldc + i, ldc, depth);
    }
}

struct ChunkScratch {
    float *q, *scores, *acc, *keys, *values, *top, *total;
    ChunkScratch(int64_t rows, int64_t dim) {
        float* at = scratch(rows * (2 * dim + TILE + 2) + 2 * dim * TILE);
        q = at, at += rows * dim;
        acc = at, at += rows * dim;
        scores = at, at += rows * TILE;
        keys = at, at += dim * TILE;
        values = at, at += dim * TILE;
        top = at, at += rows;
        total = at;
    }
};

// K transposed to [dim][TILE], V as [TILE][dim], in fp32; zeros outside [begin, end).
template <typename KV>
void load_tile(const Problem& p, const Item& item, int64_t tile, int64_t begin, int64_t end, ChunkScratch& memory) {
    int64_t rows[TILE];
    const int64_t low = begin > tile ? begin - tile : 0, high = end - tile < TILE ? end - tile : TILE;
    p.find_rows(item.sequence, item.head, tile + low, tile + high, rows + low);
    for (int64_t j = 0; j < TILE; j++) {
        const bool there = j >= low && j < high;
        const KV *k = (const KV*)p.k + (there ? rows[j] : 0), *v = (const KV*)p.v + (there ? rows[j] : 0);
        for (int64_t i = 0; i < p.dim; i += LANES) {
            f32x16 key = there ? load(k + i) : f32x16{}, value = there ? load(v + i) : f32x16{};
            store(memory.values + j * p.dim + i, value);
            for (int l = 0; l < LANES; l++) memory.keys[(i + l) * TILE + j] = key[l];
        }
    }
}

// Scores of one row become weights; its running maximum, sum and sums of values are rescaled.
INLINE void soft_row(const Problem& p, ChunkScratch& memory, int64_t row, int64_t low, int64_t high) {
    float* scores = memory.scores + row * TILE;
    if (low >= high) {
        for (int64_t j = 0; j < TILE; j += LANES) store(scores + j, f32x16{});
        return;
    }
    if (p.softcap > 0) soften(scores, TILE, p.softcap);
    for (int64_t j = 0; j < low; j++) scores[j] = NOTHING;
    for (int64_t j = high; j < TILE; j++) scores[j] = NOTHING;
    float before = memory.top[row], top = highest(scores, TILE);
    top = before > top ? before : top;
    float fresh = exponentiate(scores, TILE, top);
    float factor = before == top ? 1.0f : __builtin_expf(before - top);
    memory.top[row] = top;
    memory.total[row] = memory.total[row] * factor + fresh;
    if (factor == 1.0f) return;
    float* acc = memory.acc + row * p.dim;
    for (int64_t i = 0; i < p.dim; i += LANES) store(acc + i, load(acc + i) * factor);
}

void chunk_item(const Problem& p, const Item& item) {
    const int64_t group = p.group(), rows = (item.end - item.begin) * group;
    const int64_t padded = round_up(rows, MICRO_ROWS), start = p.query_starts[item.sequence];
    const int64_t position = p.kv_lens[item.sequence] - p.query_len(item.sequence) + item.begin;
    const int64_t end = position + item.end - item.begin, begin = p.first_visible(position);
    ChunkScratch memory(padded, p.dim);
    memset(memory.q + rows * p.dim, 0, (padded - rows) * p.dim * sizeof(float));
    memset(memory.acc, 0, padded * p.dim * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        load_query(p, start + item.begin + row / group, item.head * group + row % group, memory.q + row * p.dim);
        memory.top[row] = NOTHING, memory.total[row] = 0.0f;
    }
    for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) {
        with_dtype(p.kv_dtype, [&]<typename KV>(KV*) { load_tile<KV>(p, item, tile, begin, end, memory); });
        product<false>(memory.q, p.dim, memory.keys, TILE, memory.scores, TILE, padded, TILE, p.dim);
        for (int64_t row = 0; row < rows; row++) {
            int64_t at = position + row / group, low = p.first_visible(at) - tile, high = at + 1 - tile;
            soft_row(p, memory, row, low > 0 ? low : 0, high < TILE ? high : TILE);
        }
        product<true>(memory.scores, TILE, memory.values, p.dim, memory.acc, p.dim, padded, p.dim, TILE);
    }
    for (int64_t row = 0; row < rows; row++) {
        int64_t head = item.head * group + row % group;
        float total = memory.total[row], factor = 1.0f;
        if (p.sinks) {  // the sink may be above all scores
            float top = memory.top[row] > p.sinks[head] ? memory.top[row] : p.sinks[head];
            factor = __builtin_expf(memory.top[row] - top);
            total = total * factor + __builtin_expf(p.sinks[head] - top);
        }
        store_result(p, start + item.begin + row / group, head, memory.acc + row * p.dim, factor / total);
    }
}

// ---- the batch -------------------------------------------------------------------------------

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
        int64_t length = p.query_len(s), block = ROWS / p.group() > 0 ? ROWS / p.group() : 1;
        for (int64_t begin = (length - 1) / block * block; begin >= 0; begin -= block)  // longest first
            for (int32_t h = 0; h < p.kv_heads; h++)
                items.push_back({(int32_t)s, h, begin, begin + block < length ? begin + block : length, -1});
    }
    void add_decode(const Problem& p, int64_t s) {
        decodes.push_back(s);
        first_partial.push_back(partials);
        int64_t length = p.kv_lens[s], first = p.first_visible(length - 1);
        if (length == 0) return;
        for (int32_t h = 0; h < p.kv_heads; h++)
            for (int64_t i = first / SPLIT; i * SPLIT < length; i++) {
                int64_t begin = i * SPLIT > first ? i * SPLIT : first;
                int64_t end = (i + 1) * SPLIT < length ? (i + 1) * SPLIT : length;
                items.push_back({(int32_t)s, h, begin, end, partials++});
            }
    }
};

}  // namespace

EXPORT void tf_paged_attention(const AttentionArguments* arguments) {
    const Problem p(*arguments);
    const int64_t q_heads = p.q_heads, kv_heads = p.kv_heads;
    const Plan plan(p);
    static thread_local std::vector<float> partials;
    partials.resize(plan.partials * p.group() * partial_size(p));
    float* memory = partials.data();
    const int64_t items = plan.items.size(), merges = plan.decodes.size() * q_heads;
#pragma omp parallel if (plan.work > SERIAL_ELEMENTS * 4)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++) {
            if (plan.items[i].partial < 0) chunk_item(p, plan.items[i]);
            else decode_item(p, plan.items[i], memory);
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
