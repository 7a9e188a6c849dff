/* Attention to entries in bit planes, whose symbols are bytes, for one instruction set;
 * transform_attention_body.h includes it, with its vectors. */

#include "plane_reading_body.h"

#if defined(HAS_DOT_PRODUCT)
/* Hold a symbol apart that is no byte; returns 0 where no more are held of its sixteen rows. */
INLINE int NAME(hold_far)(const struct transform_scratch *scratch, int64_t row, int64_t component,
                          int32_t symbol) {
    int64_t part = row / LANES, held = scratch->num_fars[part];
    if (held == MOST_FARS)
        return 0;
    scratch->fars[part * MOST_FARS + held] =
        (struct far_symbol){(uint16_t)(row % LANES), (uint16_t)component, symbol};
    scratch->num_fars[part]++;
    return 1;
}

/* Symbols of a group whose rows begin at `first`, as bytes [width, PLANE_ROWS]; others are 0, and
 * held apart. Returns 0 where these are too many. */
TARGET static int NAME(split_symbols)(int64_t first, int64_t width,
                                      const struct transform_scratch *scratch, int8_t *bytes) {
    const __m512i most = _mm512_set1_epi32(MOST_NEAR);
    for (int64_t c = 0; c < width; c++)
        for (int64_t n = 0; n < PLANE_ROWS; n += LANES) {
            const int32_t *symbols = scratch->wide + c * PLANE_ROWS + n;
            __m512i own = _mm512_load_si512(symbols);
            __mmask16 near = _mm512_cmple_epu32_mask(_mm512_abs_epi32(own), most);
            _mm_storeu_si128((__m128i *)(bytes + c * PLANE_ROWS + n),
                             _mm512_maskz_cvtepi32_epi8(near, own));
            for (uint32_t left = (uint16_t)~near; left; left &= left - 1) {
                int row = __builtin_ctz(left);
                if (!NAME(hold_far)(scratch, first + n + row, c, symbols[row]))
                    return 0;
            }
        }
    return 1;
}

/* The same of a group of PLANE_ROWS rows that is not wide. */
TARGET static int NAME(split_group)(const struct plane_group *group, int64_t first, int64_t width,
                                    const struct transform_scratch *scratch, int8_t *bytes) {
    NAME(read_words)(group, width, scratch->copy, bytes);
    for (int64_t i = 0; i < group->num_nears; i++) {
        uint16_t place;
        memcpy(&place, group->nears + NEAR_BYTES * i, sizeof place);
        if (place >> ROW_BITS < width)
            bytes[place] = (int8_t)group->nears[NEAR_BYTES * i + sizeof place];
    }
    for (int64_t i = 0; i < group->num_fars; i++) {
        uint16_t place;
        int32_t symbol;
        memcpy(&place, group->fars + FAR_BYTES * i, sizeof place);
        memcpy(&symbol, group->fars + FAR_BYTES * i + sizeof place, sizeof symbol);
        if (place >> ROW_BITS < width &&
            !NAME(hold_far)(scratch, first + place % PLANE_ROWS, place >> ROW_BITS, symbol))
            return 0;
    }
    return 1;
}

/* Tiers of a block, and symbols [width, PLANE_ROWS] of each group as bytes; those that are none are
 * 0, and held apart. Returns 0 where these are too many. */
TARGET static int NAME(split_block)(const struct transform_attention *call,
                                    const struct transform_block *block,
                                    const struct transform_scratch *scratch) {
    int64_t width = NUM_SIDES * call->head_dim;
    const uint8_t *bytes = call->payload + block->codes, *end = bytes + block->bytes;
    struct plane_group group;
    int sound;
    memset(scratch->num_fars, 0, (size_t)(scratch->room / LANES) * sizeof *scratch->num_fars);
    bytes = read_tiers(bytes, end, block->count, scratch->tiers, &sound);
    for (int64_t n = 0; n < block->count; n += PLANE_ROWS, bytes = group.end) {
        int64_t rows = least(block->count - n, PLANE_ROWS);
        int8_t *own = scratch->bytes + n * width;
        if (!bytes || !open_group(&group, bytes, end, width))
            return 0;
        int is_plain = rows == PLANE_ROWS && !group.is_wide;
        if (!is_plain)
            NAME(group_symbols)(&group, rows, width, scratch);
        if (is_plain ? !NAME(split_group)(&group, n, width, scratch, own)
                     : !NAME(split_symbols)(n, width, scratch, own))
            return 0;
    }
    return 1;
}

/* Symbols of the keys of a group plus 128 as fours of bytes [dim / 4, PLANE_ROWS]. */
TARGET INLINE void NAME(byte_fours)(const int8_t *symbols, int64_t dim, uint32_t *fours) {
    const __m512i offset = _mm512_set1_epi8((char)0x80);
    for (int64_t c = 0; c < dim; c += 4, symbols += 4 * PLANE_ROWS, fours += PLANE_ROWS) {
        __m512i a = _mm512_loadu_si512(symbols), b = _mm512_loadu_si512(symbols + PLANE_ROWS);
        __m512i d = _mm512_loadu_si512(symbols + 2 * PLANE_ROWS);
        __m512i e = _mm512_loadu_si512(symbols + 3 * PLANE_ROWS);
        __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
        __m512i low2 = _mm512_unpacklo_epi8(d, e), high2 = _mm512_unpackhi_epi8(d, e);
        /* Lane l of part q has rows 16 l + 4 q to 16 l + 4 q + 3. */
        __m512i p = _mm512_unpacklo_epi16(low, low2), q = _mm512_unpackhi_epi16(low, low2);
        __m512i r = _mm512_unpacklo_epi16(high, high2), s = _mm512_unpackhi_epi16(high, high2);
        __m512i pq = _mm512_shuffle_i64x2(p, q, 0x44), rs = _mm512_shuffle_i64x2(r, s, 0x44);
        __m512i pq2 = _mm512_shuffle_i64x2(p, q, 0xEE), rs2 = _mm512_shuffle_i64x2(r, s, 0xEE);
        __m512i rows[4] = {
            _mm512_shuffle_i64x2(pq, rs, 0x88), _mm512_shuffle_i64x2(pq, rs, 0xDD),
            _mm512_shuffle_i64x2(pq2, rs2, 0x88), _mm512_shuffle_i64x2(pq2, rs2, 0xDD)};
        for (int i = 0; i < 4; i++)
            _mm512_storeu_si512(fours + i * LANES, _mm512_xor_si512(rows[i], offset));
    }
}

/* Add components that are no bytes to sixteen keys, from row n on. */
TARGET INLINE void NAME(add_far_keys)(const struct transform_attention *call, int64_t head,
                                      const struct transform_scratch *scratch, int64_t n) {
    int64_t dim = call->head_dim, part = n / LANES;
    const struct far_symbol *fars = scratch->fars + part * MOST_FARS;
    for (int i = 0; i < scratch->num_fars[part]; i++) {
        const float *inverse = call->inverse + (head * dim + fars[i].component) * dim;
        float *key = scratch->keys + fars[i].row * dim;
        if (fars[i].component >= dim)
            continue;
        floats symbol = NAME(broadcast)((float)fars[i].symbol);
        for (int64_t d = 0; d < dim; d += LANES) {
            floats sum = NAME(load)(key, d, dim, 0) + symbol * NAME(load)(inverse, d, dim, 0);
            memcpy(key + d, &sum, sizeof sum);
        }
    }
}

/* Add values' components that are no bytes to their average for a query. */
TARGET INLINE void NAME(add_far_values)(const struct transform_scratch *scratch, int64_t dim,
                                        int64_t count, const float *weights, float *out) {
    for (int64_t part = 0; part * LANES < count; part++) {
        const struct far_symbol *fars = scratch->fars + part * MOST_FARS;
        for (int i = 0; i < scratch->num_fars[part]; i++)
            if (fars[i].component >= dim)
                out[fars[i].component - dim] +=
                    weights[part * LANES + fars[i].row] * (float)fars[i].symbol;
    }
}

/* Logits of all entries of a block whose symbols are bytes. */
TARGET static void NAME(byte_logits)(const struct transform_attention *call,
                                     const struct transform_block *block,
                                     const struct transform_scratch *scratch) {
    int64_t dim = call->head_dim, head = block->head, width = NUM_SIDES * dim;
    const int32_t *lowers = call->bytes.lowers + head * NUM_TIERS + LAST_TIER;
    for (int64_t n = 0; n < block->count; n += LANES) {
        if (n % PLANE_ROWS == 0)
            NAME(byte_fours)(scratch->bytes + n * width, dim, scratch->fours);
        const uint32_t *fours = scratch->fours + n % PLANE_ROWS;
        for (int64_t e = 0; e < LANES; e += KEY_TILE) {
            int64_t row = least(n + e, block->count - 1), d = 0;
            int32_t own = lowers[scratch->tiers[scratch->order[row]]];
            for (; dim - d >= 4 * LANES; d += 4 * LANES)
                NAME(turn_back_fours)(&call->bytes, head, d, own, fours + e, PLANE_ROWS, dim, 4,
                                      scratch->keys + e * dim + d);
            if (d < dim)
                NAME(turn_back_fours)(&call->bytes, head, d, own, fours + e, PLANE_ROWS, dim, 2,
                                      scratch->keys + e * dim + d);
        }
        NAME(add_far_keys)(call, head, scratch, n);
        NAME(weigh_sixteen)(call, block, scratch, n);
    }
}

/* Weights of a query's entries as two bytes each, in steps of the result. */
TARGET INLINE float NAME(byte_weights)(const float *weights, int64_t padded, int64_t room,
                                       uint8_t *bytes) {
    __m512 most = _mm512_set1_ps(1e-30f);
    for (int64_t n = 0; n < padded; n += LANES)
        most = _mm512_max_ps(most, _mm512_loadu_ps(weights + n));
    float highest = _mm512_reduce_max_ps(most);
    __m512 factor = _mm512_set1_ps(MOST_WEIGHT / highest);
    for (int64_t n = 0; n < room; n += LANES) {
        __m512 own = n < padded ? _mm512_loadu_ps(weights + n) : _mm512_setzero_ps();
        __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(own, factor));
        _mm_storeu_si128((__m128i *)(bytes + n), _mm512_cvtepi32_epi8(whole));
        _mm_storeu_si128((__m128i *)(bytes + room + n),
                         _mm512_cvtepi32_epi8(_mm512_srli_epi32(whole, 8)));
    }
    return highest / MOST_WEIGHT;
}

/* Averages of the components of values that are bytes, by weights of two bytes. */
TARGET static void NAME(average_bytes)(const struct transform_attention *call,
                                       const struct transform_block *block,
                                       const struct transform_scratch *scratch, float *outs) {
    int64_t dim = call->head_dim, room = scratch->room, width = NUM_SIDES * dim;
    int64_t padded = (block->count + LANES - 1) / LANES * LANES;
    int64_t whole = (block->count + PLANE_ROWS - 1) / PLANE_ROWS * PLANE_ROWS;
    for (int64_t r = 0; r < call->num_queries; r++) {
        uint8_t *weights = scratch->weights;
        float step = NAME(byte_weights)(scratch->logits + r * room, padded, room, weights);
        for (int64_t c = 0; c < dim; c += LANES) {
            floats sums[LANES];
            for (int l = 0; l < LANES; l++) {
                __m512i low = _mm512_setzero_si512(), high = low;
                const int8_t *values = scratch->bytes + (dim + c + l) * PLANE_ROWS;
                for (int64_t n = 0; n < whole; n += PLANE_ROWS) {
                    __m512i own = _mm512_loadu_si512(values + n * width);
                    ADD_PRODUCTS(low, _mm512_loadu_si512(weights + n), own);
                    ADD_PRODUCTS(high, _mm512_loadu_si512(weights + room + n), own);
                }
                sums[l] = (floats)_mm512_cvtepi32_ps(low) +
                          (floats)_mm512_cvtepi32_ps(high) * NAME(broadcast)(256.0f);
            }
            floats found = NAME(sum_each)(sums) * NAME(broadcast)(step);
            memcpy(outs + r * dim + c, &found, sizeof found);
        }
        NAME(add_far_values)(scratch, dim, block->count, scratch->logits + r * room, outs + r * dim);
    }
}
#endif

/* Averages of the components of values, their mass and peak, of one block. */
TARGET static void NAME(attend_plane_block)(const struct transform_attention *call,
                                            const struct transform_block *block,
                                            const struct transform_scratch *scratch, float *outs,
                                            float *peaks, float *masses) {
#if defined(HAS_DOT_PRODUCT)
    if (call->bytes.numbers && NAME(split_block)(call, block, scratch)) {
        order_by_tier(scratch, block->count);
        NAME(place_rows)(call, block, scratch);
        NAME(byte_logits)(call, block, scratch);
        NAME(weigh_entries)(call, block, scratch, peaks, masses);
        NAME(average_bytes)(call, block, scratch, outs);
        return;
    }
#endif
    NAME(decode_plane_block)(NUM_SIDES * call->head_dim, block->count, call->payload + block->codes,
                             block->bytes, scratch);
    NAME(attend_block)(call, block, scratch, outs, peaks, masses);
}
