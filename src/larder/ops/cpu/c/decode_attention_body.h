/* Decode attention for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

#include "vectors.h"
#include "coded_rows_body.h"

TARGET INLINE float NAME(largest)(floats values) {
    const ints by_eight = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    const ints by_four = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    const ints by_two = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
    const ints by_one = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    const ints steps[] = {by_eight, by_four, by_two, by_one};
    for (int i = 0; i < 4; i++) {
        floats others = __builtin_shuffle(values, steps[i]);
        values = NAME(select)(others > values, others, values);
    }
    return values[0];
}

TARGET INLINE float NAME(sum)(floats values) {
    float sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += values[i];
    return sum;
}

/* Have the row AHEAD of another one on its way to the processor's cache, unless a bias hides it.
 *
 * stop: rows from there on may be of another head, or not be there. */
INLINE void NAME(fetch_ahead)(const struct attention *call, const char *stored, int64_t row,
                              int64_t stop, int64_t dim) {
    int64_t bytes = dim * call->item_bytes;
    int has_bias = call->bias && !call->splice && row + AHEAD < stop;
    if (call->coded || (has_bias && call->bias[row + AHEAD] < HIDDEN_BIAS))
        return;
    for (int64_t byte = 0; byte < bytes; byte += LINE)
        __builtin_prefetch(stored + (row + AHEAD) * bytes + byte, 0, 2);
}

/* Logits of the stored rows [first, first + count) with every query, biases included; products of
 * the `seen` rows alone. */
TARGET INLINE void NAME(score)(const struct attention *call, const floats *queries, int64_t first,
                               int64_t count, int64_t stop, uint32_t seen, floats *logits,
                               floats *sums, int64_t dim) {
    const char *keys = (const char *)call->keys;
    int64_t vectors = (dim + LANES - 1) / LANES, rows = call->num_queries;
    for (int64_t b = 0; b < LANES; b++) {
        NAME(fetch_ahead)(call, keys, first + b, stop, dim);
        if (!(seen >> b & 1)) {
            for (int64_t n = 0; n < rows; n++)
                sums[n * LANES + b] = (floats){0};
            continue;
        }
        const char *key = keys + (first + b) * dim * call->item_bytes;
        floats row[MAX_VECTORS];
        for (int64_t v = 0; v < vectors; v++)
            row[v] = NAME(load)(key, v * LANES, dim, call->item_bytes == 2);
        for (int64_t n = 0; n < rows; n++) {
            floats sum = queries[n * vectors] * row[0];
            for (int64_t v = 1; v < vectors; v++)
                sum += queries[n * vectors + v] * row[v];
            sums[n * LANES + b] = sum;
        }
    }
    floats bias = {0};
    if (call->bias)
        memcpy(&bias, call->bias + first, (size_t)count * sizeof(float));
    for (int64_t n = 0; n < rows; n++) {
        logits[n] = NAME(sum_each)(sums + n * LANES) + bias;
        if (call->logits)
            memcpy(call->logits + n * call->logits_stride + first, &logits[n],
                   (size_t)count * sizeof(float));
    }
}

/* Turn logits into weights, and rescale the sums so far where the peak rises. */
TARGET INLINE void NAME(raise)(floats *logits, int64_t count, int64_t rows, int64_t vectors,
                               float *peaks, float *masses, floats *outs) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ints held = lane < (int32_t)count;
    for (int64_t n = 0; n < rows; n++) {
        floats own = NAME(select)(held, logits[n], NAME(broadcast)(-INFINITY));
        float peak = NAME(largest)(own);
        if (peak > peaks[n]) {
            float faded = expf(peaks[n] - peak);
            masses[n] *= faded;
            for (int64_t v = 0; v < vectors; v++)
                outs[n * vectors + v] *= faded;
            peaks[n] = peak;
        }
        floats weights = NAME(exponential)(own - peaks[n]);
        logits[n] = NAME(select)(held, weights, (floats){0});
        masses[n] += NAME(sum)(logits[n]);
    }
}

/* Add the weighted value rows of one block that are `seen`. */
TARGET INLINE void NAME(accumulate)(const struct attention *call, const floats *weights,
                                    int64_t first, int64_t stop, uint32_t seen, floats *values,
                                    floats *outs, int64_t dim) {
    const char *stored = (const char *)call->values;
    int64_t vectors = (dim + LANES - 1) / LANES, count = 0, lanes[LANES];
    for (; seen; seen &= seen - 1)
        lanes[count++] = __builtin_ctz(seen);
    for (int64_t b = 0; call->bias && b < LANES; b++)
        NAME(fetch_ahead)(call, stored, first + b, stop, dim);
    for (int64_t b = 0; b < count; b++) {
        const char *value = stored + (first + lanes[b]) * dim * call->item_bytes;
        if (!call->bias)
            NAME(fetch_ahead)(call, stored, first + lanes[b], stop, dim);
        for (int64_t v = 0; v < vectors; v++)
            values[b * vectors + v] =
                NAME(load)(value, v * LANES, dim, call->item_bytes == 2);
    }
    for (int64_t n = 0; n < call->num_queries; n++) {
        const float *weight = (const float *)&weights[n];
        floats sums[MAX_VECTORS];
        for (int64_t v = 0; v < vectors; v++)
            sums[v] = outs[n * vectors + v];
        for (int64_t b = 0; b < count; b++)
            for (int64_t v = 0; v < vectors; v++)
                sums[v] += weight[lanes[b]] * values[b * vectors + v];
        for (int64_t v = 0; v < vectors; v++)
            outs[n * vectors + v] = sums[v];
    }
}

/* The rows of a block that a bias does not hide, as bits. */
TARGET INLINE uint32_t NAME(seen_rows)(const struct attention *call, int64_t first, int64_t count) {
    uint32_t seen = 0;
    for (int64_t b = 0; call->bias && b < count; b++)
        seen |= (uint32_t)!(call->bias[first + b] < HIDDEN_BIAS) << b;
    return call->bias ? seen : (1u << count) - 1;
}

/* Unnormalized attention of one head over the stored rows [first, stop), or over these entries of
 * the head where they are spliced or quantized. */
TARGET INLINE void NAME(attend_part)(const struct attention *call, const float *queries,
                                     int64_t first, int64_t stop, float *peaks, float *masses,
                                     float *out, void *scratch, int64_t dim) {
    int64_t vectors = (dim + LANES - 1) / LANES, rows = call->num_queries;
    floats *scaled = scratch, *outs = scaled + rows * vectors, *logits = outs + rows * vectors;
    floats *sums = logits + rows, *values = sums + rows * LANES;
    for (int64_t n = 0; n < rows; n++) {
        peaks[n] = -INFINITY;
        masses[n] = 0;
        for (int64_t v = 0; v < vectors; v++) {
            scaled[n * vectors + v] =
                NAME(load)(queries + n * dim, v * LANES, dim, 0) * call->scaling;
            outs[n * vectors + v] = (floats){0};
        }
    }
    for (int64_t block = first; block < stop; block += LANES) {
        int64_t count = stop - block < LANES ? stop - block : LANES, row = block;
        struct attention copied;
        const struct attention *from = call;
        if (call->coded) {
            copied = *call;
            NAME(decode_rows)(&copied, block, count, dim);
            row = 0;
            from = &copied;
        } else if (call->splice) {
            copied = *call;
            row = splice_rows(&copied, block, count);
            from = &copied;
        }
        uint32_t seen = NAME(seen_rows)(from, row, count);
        if (!seen && !from->logits)
            continue;
        NAME(score)(from, scaled, row, count, stop, seen, logits, sums, dim);
        NAME(raise)(logits, count, rows, vectors, peaks, masses, outs);
        NAME(accumulate)(from, logits, row, stop, seen, values, outs, dim);
    }
    for (int64_t n = 0; n < rows; n++)
        memcpy(out + n * dim, &outs[n * vectors], (size_t)dim * sizeof(float));
}

/* `attend_part`; the usual head sizes are compiled with their length known. */
TARGET static void NAME(attend)(const struct attention *call, const float *queries, int64_t first,
                                int64_t stop, float *peaks, float *masses, float *out,
                                void *scratch) {
#define ATTEND(dim) \
    NAME(attend_part)(call, queries, first, stop, peaks, masses, out, scratch, dim)
    switch (call->head_dim) {
    case 32: ATTEND(32); break;
    case 64: ATTEND(64); break;
    case 96: ATTEND(96); break;
    case 128: ATTEND(128); break;
    case 256: ATTEND(256); break;
    case 576: ATTEND(576); break;
    default: ATTEND(call->head_dim);
    }
#undef ATTEND
}

#include "vectors_end.h"
