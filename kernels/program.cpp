// Runs recorded calls one after the other; see recording.py.
//
// Of many rows, calls that follow each other and whose rows do not depend on each other are made by each thread for
// rows of its own, all of them in turn: a row then stays in one core's caches, and threads wait for each other only
// where rows meet, in attention. Such calls lie in two layers at most, whose results share no memory (workspace.py).
#include "row_wise.h"

using namespace tf;

EXPORT void tf_rms_norm(const NormArguments* arguments);
EXPORT void tf_add_rms_norm(const AddNormArguments* arguments);
EXPORT void tf_add_rms_norm_int8(const AddNormInt8Arguments* arguments);
EXPORT void tf_linear_bf16(const LinearArguments* arguments);
EXPORT void tf_linear_int8(const LinearArguments* arguments);
EXPORT void tf_gated_bf16(const GatedArguments* arguments);
EXPORT void tf_gated_int8(const GatedArguments* arguments);
EXPORT void tf_gated_mlp_bf16(const GatedMlpArguments* arguments);
EXPORT void tf_gated_mlp_int8(const GatedMlpArguments* arguments);
EXPORT void tf_rope_kv(const RopeArguments* arguments);

typedef void (*Kernel)(const void* arguments);

struct Call {
    Kernel function;
    const void* arguments;
};

// Each field is 8 bytes wide, in the order in which recording.py packs them.
struct ProgramArguments {
    const Call* calls;
    int64_t count;
};

namespace {

constexpr int64_t LEAST_ROWS = 128;  // of a thread: with fewer, that each reads all weights costs more than it brings
constexpr int64_t WHOLE_ROWS = 32;   // that products take at once

// A kernel whose rows do not depend on each other.
struct RowWise {
    Kernel function;
    int64_t (*rows)(const void* arguments);
    void (*make)(const void* arguments, int64_t first, int64_t count);  // the call for some of its rows
};

template <typename Arguments, void (*KERNEL)(const Arguments*)> RowWise row_wise() {
    return {(Kernel)KERNEL, [](const void* a) { return rows_of(*(const Arguments*)a); },
            [](const void* a, int64_t first, int64_t count) {
                Arguments some = *(const Arguments*)a;
                keep_rows(some, first, count);
                KERNEL(&some);
            }};
}

const RowWise* find_row_wise(Kernel function) {
    static const RowWise known[] = {
        row_wise<LinearArguments, tf_linear_bf16>(),         row_wise<LinearArguments, tf_linear_int8>(),
        row_wise<GatedArguments, tf_gated_bf16>(),           row_wise<GatedArguments, tf_gated_int8>(),
        row_wise<GatedMlpArguments, tf_gated_mlp_bf16>(),    row_wise<GatedMlpArguments, tf_gated_mlp_int8>(),
        row_wise<NormArguments, tf_rms_norm>(),              row_wise<AddNormArguments, tf_add_rms_norm>(),
        row_wise<AddNormInt8Arguments, tf_add_rms_norm_int8>(), row_wise<RopeArguments, tf_rope_kv>(),
    };
    for (const RowWise& kernel : known)
        if (kernel.function == function) return &kernel;
    return nullptr;
}

int64_t rows_in(const Call& call) {
    const RowWise* kernel = find_row_wise(call.function);
    return kernel ? kernel->rows(call.arguments) : 0;
}

// Calls [first, last), all of as many rows, whose threads take equal parts of them.
void run_by_rows(const Call* first, const Call* last, int64_t rows) {
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
        const auto begin = [&](int64_t i) { return i < threads ? (rows * i / threads + WHOLE_ROWS / 2) / WHOLE_ROWS * WHOLE_ROWS : rows; };
        const int64_t mine = begin(me), count = begin(me + 1) - mine;
        for (const Call* call = first; call < last; call++)
            find_row_wise(call->function)->make(call->arguments, mine, count);
    }
}

}  // namespace

EXPORT void tf_run(const ProgramArguments* program) {
    const Call *call = program->calls, *end = call + program->count;
    const int64_t threads = omp_get_max_threads();
    while (call < end) {
        const int64_t rows = rows_in(*call);
        if (threads == 1 || rows < threads * LEAST_ROWS) {
            call->function(call->arguments);
            call++;
            continue;
        }
        const Call* last = call + 1;
        while (last < end && rows_in(*last) == rows) last++;
        run_by_rows(call, last, rows);
        call = last;
    }
}
