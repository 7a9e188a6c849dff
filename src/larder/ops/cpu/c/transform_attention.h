/* Attention of a decode step to entries that are held as coded transform components. */

#ifndef LARDER_TRANSFORM_ATTENTION_H
#define LARDER_TRANSFORM_ATTENTION_H

#include <stdint.h>

#include "decode_attention.h"
#include "transform_coder.h"

/* Buckets of `AliasTables` of one class. */
struct alias_table {
    uint16_t dividers[BUCKETS];
    uint16_t sizes[2][BUCKETS]; /* frequencies */
    uint16_t shifts[2][BUCKETS];
    uint16_t codes[2][BUCKETS];
};

struct code_tables {
    const struct alias_table *rows; /* [classes + 1], tiers last */
    int64_t classes;
    int64_t first_raw; /* class c has (c - first_raw) / CLASSES_PER_TIER raw bits, rounded down */
};

struct transform_block {
    int64_t head;
    int64_t count;  /* entries */
    int64_t first;  /* position */
    int64_t span;   /* of the bitmap of positions; 0 where they are written out */
    int64_t offset; /* of the block's bytes in the payload */
    int64_t codes;  /* offset of its words */
    int64_t bytes;  /* of its words */
    int64_t entry;  /* index of its first entry in the tier */
};

/* Matrices from components to keys in bytes, `ByteMatrices` of transform_attention.py: an element is
 * (upper + lower / 256) * scale. All NULL for none. */
struct byte_matrices {
    const int8_t *numbers;  /* [kv_heads, 2, head_dim / 4, head_dim, 4]: upper, then lower ones */
    const int32_t *firsts;  /* [kv_heads, head_dim / 4 + 2, head_dim]: what sums begin with */
    const float *scales;    /* [kv_heads, head_dim] */
    const int32_t *lowers;  /* fours of components with lower bytes [kv_heads, NUM_TIERS] */
};

/* Coder of the components of blocks. */
enum component_coder { RANGE_CODER, BIT_PLANES };

struct transform_attention {
    const struct transform_block *blocks; /* by head */
    const uint8_t *payload;
    const float *queries;  /* [kv_heads, num_queries, head_dim], times the scaling */
    const float *inverse;  /* [2, kv_heads, head_dim, head_dim]: of keys, of values */
    const uint32_t *pairs; /* inverse of keys [kv_heads, head_dim / 2, head_dim] as pairs of
                              bfloat16, where keys are exact in no more; or NULL */
    const float *means;    /* [2, kv_heads, head_dim] */
    const int32_t *bases;  /* class of each component in tier 0 [kv_heads, 2 * head_dim] */
    const float *rotation; /* cosines and sines of each position [positions, 2, half] */
    const float *bias;     /* of each entry of the tier, or NULL */
    struct code_tables tables;
    const float *other_outs; /* attention to further entries that is merged, or NULL */
    const float *other_lses;
    float *outs; /* [kv_heads, num_queries, head_dim] */
    float *lses; /* [kv_heads, num_queries] */
    int64_t num_blocks;
    int64_t kv_heads;
    int64_t num_queries;
    int64_t head_dim; /* a multiple of 2 * LANES */
    int64_t half;     /* pairs of rotated dimensions, a multiple of LANES */
    double step;
    int64_t threads;
    struct byte_matrices bytes; /* inverse of keys, where keys are exact in no more than bfloat16 */
    int64_t coder;
};

int larder_transform_attention(const struct transform_attention *call);
int larder_attend_coded(const struct transform_attention *const *coded, int64_t count,
                        const struct attention *call, int64_t threads);

#endif
