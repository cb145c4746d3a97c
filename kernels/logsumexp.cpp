// The logarithm of the sum of exponentials of each row; see logsumexp.py for the contract.
#include "vec.h"

using namespace tf;

namespace {

constexpr int64_t RUN = 64 * LANES;  // values summed in fp32 before they enter the total

float row_logsumexp(const float* row, int64_t width) {
    f32x16 tops = splat(-__builtin_inff());
    for (int64_t i = 0; i < width; i += LANES) {
        tops = max(load_or(row + i, width - i, row[i]), tops);
    }
    const float top = highest(tops);
    if (!__builtin_isfinite(top)) return top;
    double total = 0.0;
    for (int64_t start = 0; start < width; start += RUN) {
        f32x16 part = {};
        for (int64_t i = start; i < start + RUN && i < width; i += LANES)
            part += exp(load_or(row + i, width - i, -__builtin_inff()) - top);
        total += sum(part);
    }
    return top + (float)__builtin_log(total);
}

}  // namespace

// Each field is 8 bytes wide, in the order in which logsumexp.py packs them.
struct LogsumexpArguments {
    const float* values;
    float* out;
    int64_t rows, width;
};

EXPORT void tf_logsumexp(const LogsumexpArguments* arguments) {
    const LogsumexpArguments a = *arguments;
#pragma omp parallel for schedule(static) if (a.rows > 1)
    for (int64_t row = 0; row < a.rows; row++) a.out[row] = row_logsumexp(a.values + row * a.width, a.width);
}
