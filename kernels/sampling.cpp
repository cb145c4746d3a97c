// One token per row: temperature, top-k, top-p, min-p and the Gumbel draw; see sampling.py for the contract.
//
// No row is sorted. With a small top-k, the k largest lie in the k vectors with the largest heads, and only those
// are looked into. Otherwise a histogram over the logits tells in which bucket a cut lies; only that is sorted.
#include "vec.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

using namespace tf;

namespace {

constexpr int BUCKETS = 2048;
// Noise lies between -2.9 and 16.7: what is further below the best logit than this can never win,
// and its mass is below the precision of any sum it would enter.
constexpr float REACH = 40.0f;
constexpr float NEVER = -__builtin_inff();

typedef std::pair<float, int32_t> Item;  // scaled logit, id

INLINE u32x16 mix32(u32x16 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

// Natural logarithm of positive normal numbers (Cephes' logf).
INLINE f32x16 log(f32x16 v) {
    i32x16 bits = (i32x16)v;
    f32x16 e = to_floats((bits >> 23) - 127);
    f32x16 m = (f32x16)((bits & 0x7FFFFF) | 0x3F800000);
    f32x16 large = splat(1.41421356237f);
    e = select(m > large, e + 1.0f, e);
    f32x16 x = select(m > large, m * 0.5f, m) - 1.0f;
    f32x16 z = x * x;
    f32x16 y = x * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * x + 1.1676998740e-1f;
    y = y * x - 1.2420140846e-1f;
    y = y * x + 1.4249322787e-1f;
    y = y * x - 1.6668057665e-1f;
    y = y * x + 2.0000714765e-1f;
    y = y * x - 2.4999993993e-1f;
    y = y * x + 3.3333331174e-1f;
    y = y * x * z + e * -2.12194440e-4f - z * 0.5f;
    return x + y + e * 0.693359375f;
}

INLINE f32x16 gumbel(u32x16 tokens, uint32_t k0, uint32_t k1) {
    u32x16 bits = mix32(mix32(tokens ^ k0) ^ k1);
    f32x16 u = (to_floats((i32x16)(bits >> 9)) + 0.5f) * (1.0f / 8388608.0f);
    return -log(-log(u));
}

// Largest first, of equal ones the lowest id first.
inline void order(std::vector<Item>& items) {
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
        return a.first != b.first ? a.first > b.first : a.second < b.second;
    });
}

// The largest of value + noise; of equal ones the lowest id.
struct Best {
    f32x16 top = splat(NEVER);
    i32x16 at = {};
    INLINE void see(f32x16 values, i32x16 ids, uint32_t k0, uint32_t k1) {
        f32x16 noisy = values + gumbel((u32x16)ids, k0, k1);
        at = select(noisy > top, ids, at);
        top = select(noisy > top, noisy, top);
    }
    int64_t winner() const {
        int best = 0;
        for (int i = 1; i < LANES; i++)
            if (top[i] > top[best] || (top[i] == top[best] && at[i] < at[best])) best = i;
        return at[best];
    }
};

struct Row {
    const float* scaled;  // filled up with -inf to whole vectors
    int64_t vocab;
    float top;  // its largest value
    std::vector<Item>& items;
    std::vector<double> mass;
    std::vector<int32_t> counts;

    // Bucket of each value; BUCKETS, which is not looked at, for what is out of reach.
    INLINE i32x16 buckets(f32x16 values) const {
        f32x16 place = (top - values) * (BUCKETS / REACH);
        const f32x16 end = splat((float)BUCKETS);
        return to_ints(select(place < end, place, end));
    }

    void fill() {
        mass.assign(BUCKETS + 1, 0.0);
        counts.assign(BUCKETS + 1, 0);
        int32_t which[LANES];
        float weight[LANES];
        for (int64_t i = 0; i < vocab; i += LANES) {
            f32x16 v = load(scaled + i);
            i32x16 b = buckets(v);
            memcpy(which, &b, 64);
            store(weight, exp(v - top));
            for (int j = 0; j < LANES; j++) {
                mass[which[j]] += weight[j];
                counts[which[j]]++;
            }
        }
    }

    // The items of one bucket, largest first, of equal ones the lowest id first.
    void open(int which) {
        items.clear();
        for (int64_t i = 0; i < vocab; i += LANES) {
            i32x16 hit = buckets(load(scaled + i)) == which;
            if (!any(hit)) continue;
            for (int64_t j = 0; j < LANES; j++)
                if (hit[j]) items.push_back({scaled[i + j], (int32_t)(i + j)});
        }
        order(items);
    }

    // The k-th largest value, and the mass of all values not below it.
    std::pair<float, double> kth(int64_t k) {
        int64_t before = 0;
        double sum = 0.0;
        for (int b = 0; b < BUCKETS; b++) {
            if (before + counts[b] >= k) {
                open(b);
                float value = items[k - before - 1].first;
                for (const Item& item : items)
                    if (item.first >= value) sum += __builtin_expf(item.first - top);
                return {value, sum};
            }
            before += counts[b];
            sum += mass[b];
        }
        return {NEVER, sum};
    }

    // The last item before which less than `target` of the mass lies.
    Item cut(double target) {
        double before = 0.0;
        for (int b = 0; b < BUCKETS; b++) {
            if (before + mass[b] >= target && counts[b]) {
                open(b);
                Item last = items[0];
                for (const Item& item : items) {
                    if (before >= target) break;
                    last = item;
                    before += __builtin_expf(item.first - top);
                }
                return last;
            }
            before += mass[b];
        }
        return {NEVER, 0};
    }
};

}  // namespace

// Each field is 8 bytes wide, in the order in which sampling.py packs them.
struct SampleArguments {
    const float *logits, *temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const uint32_t* keys;
    int64_t* out;
    int64_t rows, vocab;
};

namespace {

// What one thread needs for its rows.
struct Scratch {
    std::vector<float> scaled, heads, sorted_heads;
    std::vector<Item> items;
    explicit Scratch(int64_t vocab) : scaled(round_up(vocab, LANES)), heads(scaled.size() / LANES) {}
};

int64_t draw_of(const std::vector<Item>& items, size_t count, uint32_t k0, uint32_t k1) {
    Best best;
    for (size_t i = 0; i < count; i += LANES) {
        float values[LANES];
        int32_t ids[LANES];
        for (size_t j = 0; j < LANES; j++) {
            const bool there = i + j < count;
            values[j] = there ? items[i + j].first : NEVER;
            ids[j] = items[there ? i + j : i].second;
        }
        best.see(load(values), load(ids), k0, k1);
    }
    return best.winner();
}

// A row whose top-k is small against the number of vectors.
int64_t draw_of_few(const SampleArguments& a, int64_t row, Scratch& s) {
    const int64_t k = a.top_k[row];
    s.sorted_heads = s.heads;
    std::nth_element(s.sorted_heads.begin(), s.sorted_heads.begin() + (k - 1), s.sorted_heads.end(), std::greater<>());
    // what a grammar or a list forbids is no candidate: whole vocabularies would be sorted for a few tokens
    const float at_least = std::max(s.sorted_heads[k - 1], -__FLT_MAX__);
    s.items.clear();
    for (size_t b = 0; b < s.heads.size(); b++) {
        if (!(s.heads[b] >= at_least)) continue;
        for (int64_t i = b * LANES; i < (int64_t)(b + 1) * LANES && i < a.vocab; i++)
            if (s.scaled[i] >= at_least) s.items.push_back({s.scaled[i], (int32_t)i});
    }
    order(s.items);
    if (s.items.empty()) return 0;  // NaN: poisoned anyway; or all is forbidden
    const float top = s.items[0].first, kth = s.items[std::min<size_t>(k, s.items.size()) - 1].first;
    double total = 0.0, before = 0.0;
    for (const Item& item : s.items)
        if (item.first >= kth) total += __builtin_expf(item.first - top);
    const double target = a.top_p[row] < 1.0f ? a.top_p[row] * total : __builtin_inf();
    const float lowest = std::max(kth, a.min_p[row] > 0.0f ? top + __builtin_logf(a.min_p[row]) : NEVER);
    size_t count = 0;
    for (; count < s.items.size() && s.items[count].first >= lowest && (before < target || !count); count++)
        before += __builtin_expf(s.items[count].first - top);
    return draw_of(s.items, std::max<size_t>(count, 1), a.keys[2 * row], a.keys[2 * row + 1]);
}

int64_t draw_row(const SampleArguments& a, int64_t row, Scratch& s) {
    const float* logits = a.logits + row * a.vocab;
    const float temperature = a.temperature[row], top_p = a.top_p[row], min_p = a.min_p[row];
    const uint32_t k0 = a.keys[2 * row], k1 = a.keys[2 * row + 1];
    float* scaled = s.scaled.data();
    f32x16 tops = splat(NEVER);
    for (int64_t i = 0; i < a.vocab; i += LANES) {
        const f32x16 v = load_or(logits + i, a.vocab - i, NEVER) / temperature;
        store(scaled + i, v);
        tops = max(v, tops);
    }
    const float top = highest(tops);
    const int64_t top_k = a.top_k[row];
    if (top_k * 8 <= (int64_t)s.heads.size()) {
        for (size_t b = 0; b < s.heads.size(); b++) s.heads[b] = highest(load(scaled + b * LANES));
        return draw_of_few(a, row, s);
    }
    Item last = {NEVER, 0};  // of the order (value down, id up): the last one that is kept
    float lowest = top - REACH;
    if (top_k < a.vocab || top_p < 1.0f) {
        Row r{scaled, a.vocab, top, s.items, {}, {}};
        r.fill();
        double total = 0.0;
        for (int b = 0; b < BUCKETS; b++) total += r.mass[b];
        if (top_k < a.vocab) {
            auto found = r.kth(top_k);
            lowest = std::max(lowest, found.first);
            total = found.second;
        }
        if (top_p < 1.0f) last = r.cut((double)top_p * total);
    }
    if (min_p > 0.0f) lowest = std::max(lowest, top + __builtin_logf(min_p));
    Best best;
    float values[LANES];
    int32_t ids[LANES];
    int held = 0;
    auto flush = [&] {
        for (int i = held; i < LANES; i++) values[i] = NEVER, ids[i] = ids[held - 1];
        best.see(load(values), load(ids), k0, k1);
        held = 0;
    };
    const f32x16 floor = splat(std::min(top, std::max(lowest, last.first)));
    for (int64_t block = 0; block < a.vocab; block += LANES) {
      if (!any(load(scaled + block) >= floor)) continue;
      for (int64_t i = block; i < std::min(block + LANES, a.vocab); i++) {
        const float v = scaled[i];
        const bool behind = v < last.first || (v == last.first && i > last.second);
        if (v == top || (v >= lowest && !behind)) {
            if (v == top && behind) continue;
            values[held] = v;
            ids[held++] = (int32_t)i;
            if (held == LANES) flush();
        }
      }
    }
    if (held) flush();
    return best.winner();
}

}  // namespace

EXPORT void tf_sample(const SampleArguments* arguments) {
    const SampleArguments a = *arguments;
#pragma omp parallel if (a.rows > 1)
    {
        Scratch scratch(a.vocab);
#pragma omp for schedule(dynamic)
        for (int64_t row = 0; row < a.rows; row++) a.out[row] = draw_row(a, row, scratch);
    }
}
