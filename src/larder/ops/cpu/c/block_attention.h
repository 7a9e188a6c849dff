/* Attention of blocks of queries, and of the decode steps beside them. */

#ifndef LARDER_BLOCK_ATTENTION_H
#define LARDER_BLOCK_ATTENTION_H

#include <stdint.h>

#include "decode_attention.h"

struct block_call {
    const void *queries; /* [heads * group_len, query_len, head_dim], float32 or bfloat16 */
    const void *keys;    /* [stored rows, head_dim] */
    const void *values;
    const float *bias; /* [stored rows], or NULL */
    const int64_t *starts;
    const int64_t *lengths;
    const void *new_keys; /* [heads, new_len, head_dim], entries behind the stored ones */
    const void *new_values;
    const int64_t *limits; /* [heads, query_len], entries that a query sees: the first ones */
    float *outs;           /* [heads * group_len, query_len, head_dim], or NULL for sums alone */
    float *lses;           /* [heads * group_len, query_len] */
    float *sums;           /* of the weights of each entry, head by head, or NULL */
    int64_t heads;
    int64_t group_len;
    int64_t query_len;
    int64_t new_len;
    int64_t head_dim;
    int64_t item_bytes;
    int64_t is_largest; /* `sums` are the largest weights, not their sums */
    float scaling;
    int32_t threads;
};

/* Blocks and decode steps of one pass, SegmentCall of c_library.py. */
struct segment_call {
    const struct block_call *const *blocks;
    int64_t count;
    const struct attention *step; /* NULL for none */
    int64_t *starts;              /* of the step, as in `larder_decode_step` */
    int64_t *lengths;
    int64_t threads;
};

int larder_attend_segments(const struct segment_call *call);

#endif
