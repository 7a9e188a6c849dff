/* What coding and decoding of transform components share: constants of `symbol_model` and of
 * ops/cpu/range_coder_kernels.py. */

#ifndef LARDER_TRANSFORM_CODER_H
#define LARDER_TRANSFORM_CODER_H

#include "c_library.h"

#define SLOT_BITS 12
#define NUM_SLOTS (1 << SLOT_BITS)
#define BUCKETS 64
#define BUCKET_BITS 6 /* slots of a bucket */
#define MIDDLE 32
#define ESCAPE 64
#define ESCAPED_BITS 32
#define CHUNK_BITS 8
#define MOST_CHUNKS (ESCAPED_BITS / CHUNK_BITS)
#define LAST_TIER 2
#define NUM_TIERS (2 * LAST_TIER + 1)
#define CLASSES_PER_TIER 4
#define CODER_VECTORS 2
#define CODER_LANES (CODER_VECTORS * LANES)
#define LOWEST 65536u

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

/* Class of a component in a tier. */
INLINE int64_t class_at(int64_t classes, int64_t base, int64_t tier) {
    int64_t row = base - CLASSES_PER_TIER * tier;
    return row < 0 ? 0 : least(row, classes - 1);
}

INLINE int32_t raw_bits_of(int64_t first_raw, int64_t row) {
    return row < first_raw ? 0 : (int32_t)(row - first_raw) / CLASSES_PER_TIER;
}

/* Size of a chunk of raw bits; chunk 0 has the lowest ones. */
INLINE int32_t chunk_size(int32_t bits, int chunk) {
    int32_t size = bits - chunk * CHUNK_BITS;
    return size < 0 ? 0 : size < CHUNK_BITS ? size : CHUNK_BITS;
}

#endif
