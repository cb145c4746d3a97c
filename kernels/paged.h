// The paged cache and the step's tokens as the operations over them receive them. The fields and
// their order are those that paged_attention.py packs; each is 8 bytes wide.
#pragma once

#include "vec.h"

namespace tf {

struct Pool {
    void *k, *v;                 // [num_blocks, kv_heads, block_size, dim]
    float *k_scales, *v_scales;  // int8: [num_blocks, kv_heads, block_size]; others: null
    int64_t kv_heads, block_size, dim, dtype;
};

struct Batch {
    const int32_t *query_starts, *kv_lens, *block_tables;
    const int64_t *slots, *positions;
    int64_t table_stride, sequences;
};

}  // namespace tf
