/* Quantized entries, as decode attention reads them. */

#ifndef LARDER_CODED_ENTRIES_H
#define LARDER_CODED_ENTRIES_H

#include <stdint.h>

/* Quantized keys or values; fields of CodedSide in quantized_attention.py. */
struct coded_side {
    const uint8_t *codes; /* [rows, row_bytes], fields of 8, 4, 2 and 1 bits in planes */
    const uint16_t *offsets; /* float16: by group [groups, width], or by row [rows, pieces] */
    const uint16_t *scales;
    const int16_t *channels; /* [groups, width], places in the head; NULL where all are stored */
    const uint16_t *factors; /* float16 [groups, width]; NULL for none */
    const int32_t *outlier_places; /* row * width + channel, ascending */
    const uint16_t *outliers;      /* float16 */
    int64_t row_bytes;
    int64_t bits;
    int64_t width; /* stored channels */
    int64_t piece; /* channels that share a scale by row */
    int64_t is_by_row;
    int64_t num_outliers;
};

/* Layout of a group: the rows [first, first + count) of the stored ones. */
struct coded_group {
    int64_t number;
    int64_t first;
    int64_t count;
};

struct coded_entries {
    struct coded_side keys;
    struct coded_side values;
    const struct coded_group *groups; /* head by head */
    const int64_t *group_starts;      /* of each head */
};

/* Place in the entries of a head, read in ascending order. */
struct coded_cursor {
    const struct coded_entries *entries;
    const struct coded_group *group; /* that holds the entries [first, first + count) of the head */
    int64_t first;
    const struct coded_group *loaded; /* whose scales are in `tables` */
    float *tables; /* offsets and scales of keys, then of values, [4, head_dim] */
    float *numbers; /* of one row, [head_dim] */
    float *buffer; /* keys and values [LANES, head_dim], and biases */
};

#endif
