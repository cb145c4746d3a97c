// The best logit of each row and its id; see greedy in sampling.py for the contract.
#include "vec.h"

using namespace tf;

namespace {

// The index of the first value for which `wanted` holds in some lane's place; width where none.
template <typename F> INLINE int64_t first_where(const float* row, int64_t width, F wanted) {
    for (int64_t i = 0; i < width; i++)
        if (wanted(row[i])) return i;
    return width;
}

INLINE int64_t find(const float* row, int64_t width, float best) {
    int64_t i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        if (any((load(row + i) == best) | (load(row + i + LANES) == best) | (load(row + i + 2 * LANES) == best) |
                (load(row + i + 3 * LANES) == best)))
            break;
    }
    return i + first_where(row + i, width - i, [&](float v) INLINE_LAMBDA { return v == best; });
}

void best_of_row(const float* row, int64_t width, float* value, int64_t* id) {
    f32x16 tops = splat(-__builtin_inff());
    i32x16 ordered = ~i32x16{};  // lanes in which no NaN was seen
    for (int64_t i = 0; i < width; i += LANES) {
        const f32x16 v = load_or(row + i, width - i, row[i]);
        ordered &= v == v;
        tops = max(v, tops);
    }
    const float best = highest(tops);
    *id = !any(~ordered) ? find(row, width, best) : first_where(row, width, [](float v) INLINE_LAMBDA { return v != v; });
    *value = row[*id];
}

}  // namespace

// Each field is 8 bytes wide, in the order in which sampling.py packs them.
struct GreedyArguments {
    const float* logits;  // [rows, width], contiguous
    float* values;
    int64_t* ids;
    int64_t rows, width;
};

EXPORT void tf_greedy(const GreedyArguments* arguments) {
    const GreedyArguments a = *arguments;
#pragma omp parallel for schedule(static) if (a.rows > 1)
    for (int64_t row = 0; row < a.rows; row++)
        best_of_row(a.logits + row * a.width, a.width, a.values + row, a.ids + row);
}
