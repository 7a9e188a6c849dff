/* Attention of a block of queries for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 *
 * Keys and values are packed into panels of LANES columns, so that products read them in order: a
 * step of a panel is one vector. With dot products a step is a pair of bfloat16 numbers per lane,
 * else a float32 number.
 */

#include "vectors.h"

#if defined(HAS_DOT_PRODUCT)
#define STEP 2 /* numbers of a lane */
#define number uint16_t
#else
#define STEP 1
#define number float
#endif
#if defined(HAS_AVX512)
#define PRODUCT_ROWS GROUP_ROWS
#define PRODUCT_VECTORS 2
#else
#define PRODUCT_ROWS 4
#define PRODUCT_VECTORS 1
#endif

/* Number of a stored row, as panels hold it. */
TARGET INLINE number NAME(number_at)(const void *row, int64_t at, int64_t item_bytes) {
#if defined(HAS_DOT_PRODUCT)
    (void)item_bytes;
    return ((const uint16_t *)row)[at];
#else
    if (item_bytes == 4)
        return ((const float *)row)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#endif
}

/* Panels of the keys [first, first + LANES): [steps of the head, LANES, STEP]. */
TARGET static void NAME(pack_keys)(const struct block_call *call, const struct block_head *head,
                                   int64_t first, void *panel) {
    int64_t dim = call->head_dim, count = head->entries - first;
    number *into = panel;
    memset(panel, 0, (size_t)(dim * LANES) * sizeof(number));
    for (int64_t l = 0; l < LANES && l < count; l++) {
        const char *row = key_row(call, head, first + l);
        for (int64_t d = 0; d < dim; d++)
            into[(d / STEP * LANES + l) * STEP + d % STEP] =
                NAME(number_at)(row, d, call->item_bytes);
    }
}

/* The values [first, first + LANES) in all panels: [vectors, steps of the entries, LANES, STEP]. */
TARGET static void NAME(pack_values)(const struct block_call *call, const struct block_head *head,
                                     int64_t first, void *panels) {
    int64_t dim = call->head_dim, width = head->width;
    for (int64_t v = 0; v < head->vectors; v++) {
        number *into = (number *)panels + (v * width + first) * LANES;
        memset(into, 0, LANES * LANES * sizeof(number));
        for (int64_t s = 0; s < LANES && first + s < head->entries; s++) {
            const char *row = value_row(call, head, first + s);
            for (int64_t l = 0; l < LANES && v * LANES + l < dim; l++)
                into[(s / STEP * LANES + l) * STEP + s % STEP] =
                    NAME(number_at)(row, v * LANES + l, call->item_bytes);
        }
    }
}

TARGET static void NAME(pack)(const struct block_call *call, const struct block_head *head,
                              int64_t panel, char *keys, char *values) {
    size_t bytes = (size_t)(call->head_dim * LANES) * sizeof(number);
    NAME(pack_keys)(call, head, panel * LANES, keys + (size_t)panel * bytes);
    if (call->outs)
        NAME(pack_values)(call, head, panel * LANES, values);
}

/* Products of PRODUCT_ROWS rows with PRODUCT_VECTORS panels, over `steps`. */
TARGET INLINE void NAME(product)(const number *left, int64_t left_stride, const number *right,
                                 int64_t panel_stride, int64_t steps, float *out,
                                 int64_t out_stride) {
    floats sums[PRODUCT_ROWS][PRODUCT_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < PRODUCT_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PRODUCT_VECTORS; v++)
            sums[r][v] = (floats){0};
    for (int64_t k = 0; k < steps; k++) {
#if defined(HAS_DOT_PRODUCT)
        __m512bh columns[PRODUCT_VECTORS];
#else
        floats columns[PRODUCT_VECTORS];
#endif
#pragma GCC unroll 2
        for (int v = 0; v < PRODUCT_VECTORS; v++)
            memcpy(&columns[v], right + v * panel_stride + k * LANES * STEP, sizeof columns[v]);
#pragma GCC unroll 8
        for (int r = 0; r < PRODUCT_ROWS; r++) {
#if defined(HAS_DOT_PRODUCT)
            int32_t pair;
            memcpy(&pair, left + r * left_stride + k * STEP, sizeof pair);
            __m512bh own = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 2
            for (int v = 0; v < PRODUCT_VECTORS; v++)
                sums[r][v] = (floats)_mm512_dpbf16_ps((__m512)sums[r][v], own, columns[v]);
#else
            float own = left[r * left_stride + k];
#pragma GCC unroll 2
            for (int v = 0; v < PRODUCT_VECTORS; v++)
                sums[r][v] += own * columns[v];
#endif
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < PRODUCT_ROWS; r++)
#pragma GCC unroll 2
        for (int v = 0; v < PRODUCT_VECTORS; v++)
            memcpy(out + r * out_stride + v * LANES, &sums[r][v], sizeof(floats));
}

/* Products of GROUP_ROWS rows with two panels. */
TARGET INLINE void NAME(multiply)(const number *left, int64_t left_stride, const number *right,
                                  int64_t panel_stride, int64_t steps, float *out,
                                  int64_t out_stride) {
    for (int r = 0; r < GROUP_ROWS; r += PRODUCT_ROWS)
        for (int v = 0; v < 2; v += PRODUCT_VECTORS)
            NAME(product)(left + r * left_stride, left_stride, right + v * panel_stride,
                          panel_stride, steps, out + r * out_stride + v * LANES, out_stride);
}

/* exp(logit - peak) of the entries that a query sees, zeros up to `width`. */
TARGET INLINE void NAME(exponentiate)(float *row, int64_t seen, int64_t width, const float *bias,
                                      float scaling, float *peak, float *mass) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t vectors = (seen + LANES - 1) / LANES;
    floats most = NAME(broadcast)(-INFINITY), sum = {0};
    for (int64_t v = 0; v < vectors; v++) {
        floats own;
        memcpy(&own, row + v * LANES, sizeof own);
        own *= scaling;
        if (bias) {
            floats added;
            memcpy(&added, bias + v * LANES, sizeof added);
            own += added;
        }
        if ((v + 1) * LANES > seen)
            own = NAME(select)(lane < (int32_t)(seen - v * LANES), own, NAME(broadcast)(-INFINITY));
        memcpy(row + v * LANES, &own, sizeof own);
        most = NAME(select)(own > most, own, most);
    }
    float high = most[0];
    for (int l = 1; l < LANES; l++)
        high = most[l] > high ? most[l] : high;
    for (int64_t v = 0; v < vectors; v++) {
        floats own;
        memcpy(&own, row + v * LANES, sizeof own);
        own = NAME(exponential)(own - high);
        if ((v + 1) * LANES > seen)
            own = NAME(select)(lane < (int32_t)(seen - v * LANES), own, (floats){0});
        memcpy(row + v * LANES, &own, sizeof own);
        sum += own;
    }
    memset(row + vectors * LANES, 0, (size_t)(width - vectors * LANES) * sizeof(float));
    float total = 0;
    for (int l = 0; l < LANES; l++)
        total += sum[l];
    *peak = high;
    *mass = total;
}

/* Add the weights of GROUP_ROWS rows to the sums of the entries. */
TARGET INLINE void NAME(add_weights)(const float *rows, int64_t stride, int64_t width,
                                     const float *factors, float *sums) {
    for (int64_t s = 0; s < width; s += LANES) {
        floats sum;
        memcpy(&sum, sums + s, sizeof sum);
        for (int r = 0; r < GROUP_ROWS; r++) {
            floats own;
            memcpy(&own, rows + r * stride + s, sizeof own);
            sum += factors[r] * own;
        }
        memcpy(sums + s, &sum, sizeof sum);
    }
}

/* Raise the largest weights of the entries to those of GROUP_ROWS rows; NaN stays. */
TARGET INLINE void NAME(raise_weights)(const float *rows, int64_t stride, int64_t width,
                                       const float *factors, float *largest) {
    for (int64_t s = 0; s < width; s += LANES) {
        floats most;
        memcpy(&most, largest + s, sizeof most);
        for (int r = 0; r < GROUP_ROWS; r++) {
            floats own;
            memcpy(&own, rows + r * stride + s, sizeof own);
            own *= factors[r];
            most = NAME(select)((own <= most) | (most != most), most, own);
        }
        memcpy(largest + s, &most, sizeof most);
    }
}

/* Weights of GROUP_ROWS rows as the left side of a product. */
TARGET INLINE const number *NAME(as_left)(const float *rows, int64_t stride, int64_t width,
                                          void *buffer) {
#if defined(HAS_DOT_PRODUCT)
    uint16_t *into = buffer;
    for (int r = 0; r < GROUP_ROWS; r++)
        for (int64_t s = 0; s < width; s += LANES) {
            floats own;
            memcpy(&own, rows + r * stride + s, sizeof own);
            __m256bh halves_of = _mm512_cvtneps_pbh((__m512)own);
            memcpy(into + r * stride + s, &halves_of, sizeof halves_of);
        }
    return into;
#else
    (void)width;
    (void)buffer;
    (void)stride;
    return rows;
#endif
}

/* Weighted sums of the values for GROUP_ROWS rows, from `row` of the tile on. */
TARGET INLINE void NAME(add_values)(const struct block_call *call, const struct block_head *head,
                                    const struct block_tile *tile, int64_t row,
                                    const number *left, const char *values) {
    float sums[GROUP_ROWS * 2 * LANES];
    for (int64_t v = 0; v < head->vectors; v += 2) {
        int64_t dims = call->head_dim - v * LANES;
        dims = dims < 2 * LANES ? dims : 2 * LANES;
        NAME(multiply)(left, tile->stride, (const number *)values + v * head->width * LANES,
                       head->width * LANES, tile->width / STEP, sums, 2 * LANES);
        for (int64_t r = 0; r < GROUP_ROWS; r++) {
            float *out = tile_out(call, head, tile, row + r);
            for (int64_t d = 0; out && d < dims; d++)
                out[v * LANES + d] = sums[r * 2 * LANES + d] * tile->factors[row + r];
        }
    }
}

/* Rows of the tile's queries, the query heads of a group one after the other. */
TARGET INLINE void NAME(gather_queries)(const struct block_call *call,
                                        const struct block_head *head,
                                        const struct block_tile *tile, number *rows) {
    int64_t dim = call->head_dim;
    for (int64_t row = 0; row < tile->rows; row++) {
        const char *query = tile_query(call, head, tile, row);
        for (int64_t d = 0; d < dim; d++)
            rows[row * dim + d] = query ? NAME(number_at)(query, d, call->item_bytes) : 0;
    }
}

/* Attention of the queries of one tile; `sums` gets their weights, unless it is NULL. */
TARGET static void NAME(attend_tile)(const struct block_call *call, const struct block_head *head,
                                     const struct block_tile *tile, const char *keys,
                                     const char *values, float *sums) {
    int64_t dim = call->head_dim, stride = tile->stride;
    number *queries = tile->queries;
    NAME(gather_queries)(call, head, tile, queries);
    for (int64_t s = 0; s < tile->width; s += 2 * LANES)
        for (int64_t row = 0; row < tile->rows; row += GROUP_ROWS)
            NAME(multiply)(queries + row * dim, dim, (const number *)keys + s * dim, LANES * dim,
                           dim / STEP, tile->logits + row * stride + s, stride);
    for (int64_t row = 0; row < tile->rows; row += GROUP_ROWS) {
        float *rows = tile->logits + row * stride;
        for (int64_t r = row; r < row + GROUP_ROWS; r++) {
            float peak, mass;
            int64_t seen = tile_limit(call, head, tile, r);
            NAME(exponentiate)(tile->logits + r * stride, seen, tile->width, head->bias,
                               call->scaling, &peak, &mass);
            tile->factors[r] = seen ? 1 / mass : 0;
            write_lse(call, head, tile, r, seen ? peak + logf(mass) : -INFINITY);
        }
        if (sums && call->is_largest)
            NAME(raise_weights)(rows, stride, tile->width, tile->factors + row, sums);
        else if (sums)
            NAME(add_weights)(rows, stride, tile->width, tile->factors + row, sums);
        if (call->outs)
            NAME(add_values)(call, head, tile, row,
                             NAME(as_left)(rows, stride, tile->width, tile->weights), values);
    }
}

#undef STEP
#undef number
#undef PRODUCT_ROWS
#undef PRODUCT_VECTORS

#include "vectors_end.h"
