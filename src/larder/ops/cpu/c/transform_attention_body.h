/* Body of transform_attention.c for one instruction set; instruction_sets.h includes it. */

#include "vectors.h"

/* Entries that are turned back together: their sums fit in the registers. Elsewhere the compiler
 * keeps vectors of sixteen numbers in memory, and plain loops are faster. */
#undef KEY_TILE
#if defined(HAS_AVX512)
#define KEY_TILE 4
#else
#define KEY_TILE 1
#endif

#include "transform_decoding_body.h"

#if defined(HAS_AVX512)
/* Turn the components of some entries back into some vectors of keys, without scales and means. */
TARGET INLINE void NAME(turn_back)(const float *symbols, int64_t room, const float *inverse,
                                   int64_t dim, int vectors, float *keys) {
    floats sums[KEY_TILE][4];
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            sums[e][v] = (floats){0};
    for (int64_t c = 0; c < dim; c++) {
        floats row[4];
        for (int v = 0; v < vectors; v++)
            row[v] = NAME(load)(inverse + c * dim, v * LANES, dim, 0);
        for (int e = 0; e < KEY_TILE; e++) {
            floats symbol = NAME(broadcast)(symbols[c * room + e]);
            for (int v = 0; v < vectors; v++)
                sums[e][v] += symbol * row[v];
        }
    }
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            memcpy(keys + e * dim + v * LANES, sums[e] + v, sizeof **sums);
}
#else
/* Turn the components of one entry back into some vectors of a key, without scale and mean. */
TARGET INLINE void NAME(turn_back)(const float *symbols, int64_t room, const float *inverse,
                                   int64_t dim, int vectors, float *keys) {
    float sums[4 * LANES] = {0};
    for (int64_t c = 0; c < dim; c++) {
        float symbol = symbols[c * room];
        for (int d = 0; d < vectors * LANES; d++)
            sums[d] += symbol * inverse[c * dim + d];
    }
    for (int d = 0; d < vectors * LANES; d++)
        keys[d] = sums[d];
}
#endif

#if defined(HAS_DOT_PRODUCT)
/* The same with symbols and matrices as pairs of bfloat16. */
TARGET INLINE void NAME(turn_back_pairs)(const uint32_t *symbols, int64_t room,
                                         const uint32_t *inverse, int64_t dim, int vectors,
                                         float *keys) {
    __m512 sums[KEY_TILE][4];
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            sums[e][v] = _mm512_setzero_ps();
    for (int64_t c = 0; c < dim / 2; c++) {
        __m512i row[4];
        for (int v = 0; v < vectors; v++)
            row[v] = _mm512_loadu_si512(inverse + c * dim + v * LANES);
        for (int e = 0; e < KEY_TILE; e++) {
            __m512i pair = _mm512_set1_epi32((int)symbols[c * room + e]);
            for (int v = 0; v < vectors; v++)
                sums[e][v] = _mm512_dpbf16_ps(sums[e][v], (__m512bh)pair, (__m512bh)row[v]);
        }
    }
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(keys + e * dim + v * LANES, sums[e][v]);
}

/* Symbols of sixteen keys as pairs of bfloat16 [dim / 2, LANES]; 0 if one of them is not exact. */
TARGET INLINE int NAME(pack_pairs)(const float *symbols, int64_t room, int64_t dim,
                                   uint32_t *pairs) {
    __m512i high = _mm512_set1_epi32((int)0xFFFF0000u);
    __m512 most = _mm512_setzero_ps();
    for (int64_t c = 0; c < dim; c += 2) {
        __m512 one = _mm512_load_ps(symbols + c * room);
        __m512 other = _mm512_load_ps(symbols + (c + 1) * room);
        most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
        __m512i low = _mm512_srli_epi32(_mm512_castps_si512(one), 16);
        __m512i pair = _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(other), high));
        _mm512_store_si512(pairs + c / 2 * LANES, pair);
    }
    return _mm512_reduce_max_ps(most) <= EXACT_BF16;
}

/* Symbols of sixteen keys plus 128 as fours of bytes [dim / 4, LANES]; 0 if one is no byte. */
TARGET INLINE int NAME(pack_fours)(const float *symbols, int64_t room, int64_t dim,
                                   uint32_t *fours) {
    __m512 most = _mm512_setzero_ps();
    for (int64_t c = 0; c < dim; c += 4) {
        __m512i parts[4];
        for (int i = 0; i < 4; i++) {
            __m512 own = _mm512_load_ps(symbols + (c + i) * room);
            most = _mm512_max_ps(most, _mm512_abs_ps(own));
            parts[i] = _mm512_slli_epi32(_mm512_cvtps_epi32(own), 8 * i);
        }
        /* A number below 0 borrows from the bytes above its own, and 128 in each repays it. */
        __m512i sum = _mm512_add_epi32(_mm512_add_epi32(parts[0], parts[1]),
                                       _mm512_add_epi32(parts[2], parts[3]));
        _mm512_store_si512(fours + c / 4 * LANES,
                           _mm512_add_epi32(sum, _mm512_set1_epi32((int)0x80808080u)));
    }
    return _mm512_reduce_max_ps(most) <= MOST_BYTE;
}

/* Products of the first fours of components of some entries with bytes of a matrix, added to sums. */
TARGET INLINE void NAME(add_fours)(const uint32_t *symbols, int64_t room, const int8_t *numbers,
                                   int64_t fours, int64_t dim, int vectors,
                                   __m512i sums[KEY_TILE][4]) {
    for (int64_t c = 0; c < fours; c++) {
        __m512i row[4];
        for (int v = 0; v < vectors; v++)
            row[v] = _mm512_loadu_si512(numbers + 4 * (c * dim + v * LANES));
        for (int e = 0; e < KEY_TILE; e++) {
            __m512i four = _mm512_set1_epi32((int)symbols[c * room + e]);
            for (int v = 0; v < vectors; v++)
                ADD_PRODUCTS(sums[e][v], four, row[v]);
        }
    }
}

/* The same as `turn_back` from fours of bytes, from dimension `first` on.
 *
 * lowers: fours of components whose matrix has lower bytes, too. */
TARGET INLINE void NAME(turn_back_fours)(const struct byte_matrices *bytes, int64_t head,
                                         int64_t first, int64_t lowers, const uint32_t *symbols,
                                         int64_t room, int64_t dim, int vectors, float *keys) {
    int64_t fours = dim / 4;
    const int8_t *numbers = bytes->numbers + 2 * head * dim * dim + 4 * first;
    const int32_t *firsts = bytes->firsts + head * (fours + 2) * dim + first;
    const float *scales = bytes->scales + head * dim + first;
    __m512i sums[KEY_TILE][4];
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            sums[e][v] = _mm512_loadu_si512(firsts + lowers * dim + v * LANES);
    NAME(add_fours)(symbols, room, numbers + dim * dim, lowers, dim, vectors, sums);
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            sums[e][v] =
                _mm512_add_epi32(_mm512_srai_epi32(sums[e][v], LOWER_BITS),
                                 _mm512_loadu_si512(firsts + (fours + 1) * dim + v * LANES));
    NAME(add_fours)(symbols, room, numbers, fours, dim, vectors, sums);
    for (int e = 0; e < KEY_TILE; e++)
        for (int v = 0; v < vectors; v++)
            _mm512_storeu_ps(keys + e * dim + v * LANES,
                             _mm512_mul_ps(_mm512_cvtepi32_ps(sums[e][v]),
                                           _mm512_loadu_ps(scales + v * LANES)));
}

#if defined(WITH_MATRIX_UNITS)
/* `turn_back_pairs` of sixteen entries by matrix units, which may add the products of pairs in
 * another order. */
TILES static void NAME(turn_back_tiles)(const uint32_t *symbols, int64_t room,
                                        const uint32_t *inverse, int64_t dim, float *keys) {
    floats entries[MOST_PAIRS / TILE_ROWS][TILE_ROWS]; /* sixteen pairs of each entry */
    int64_t blocks = dim / 2 / TILE_ROWS;
    for (int64_t b = 0; b < blocks; b++) {
        for (int64_t c = 0; c < TILE_ROWS; c++)
            memcpy(entries[b] + c, symbols + (b * TILE_ROWS + c) * room, sizeof **entries);
        NAME(transpose)(entries[b]);
    }
    __asm__ volatile("" : : : "memory"); /* the compiler does not know what tiles read */
    for (int64_t d = 0; d < dim; d += 2 * LANES) {
        const uint32_t *own = inverse + d;
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t b = 0; b < blocks; b++, own += TILE_ROWS * dim) {
            _tile_loadd(4, entries[b], TILE_BYTES);
            _tile_loadd(6, own, dim * 4);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, own + LANES, dim * 4);
            _tile_dpbf16ps(1, 4, 7);
        }
        _tile_stored(0, keys + d, dim * 4);
        _tile_stored(1, keys + d + LANES, dim * 4);
    }
    __asm__ volatile("" : : : "memory"); /* nor what they write */
}

TILES static void NAME(release_tiles)(void) { _tile_release(); }
#endif
#endif

/* Scale and rotate sixteen keys, and write their logits for every query.
 *
 * halves: vectors of a half of a key, all of whose dimensions are rotated; 0 where some are not, or
 *     the compiler is not told. */
TARGET INLINE void NAME(weigh_keys)(const struct transform_attention *call, const float *queries,
                                    const float *mean, const int32_t *positions,
                                    const float *scales, const float *keys, int64_t room,
                                    int halves, float *logits) {
    int64_t half = halves ? halves * LANES : call->half;
    int64_t dim = halves ? 2 * half : call->head_dim;
    floats sums[MOST_QUERIES][LANES];
    for (int e = 0; e < LANES; e++, keys += dim) {
        const float *turn = call->rotation + positions[e] * 2 * half;
        floats turned[2 * MOST_PAIRS / LANES];
        for (int64_t d = 0; d < dim; d += LANES)
            turned[d / LANES] =
                NAME(load)(keys, d, dim, 0) * scales[e] + NAME(load)(mean, d, dim, 0);
        for (int64_t d = 0; d < half; d += LANES) {
            floats cosine = NAME(load)(turn, d, half, 0), sine = NAME(load)(turn + half, d, half, 0);
            floats one = turned[d / LANES], other = turned[(half + d) / LANES];
            turned[d / LANES] = one * cosine - other * sine;
            turned[(half + d) / LANES] = other * cosine + one * sine;
        }
        for (int64_t r = 0; r < call->num_queries; r++) {
            floats sum = {0};
            for (int64_t d = 0; d < dim; d += LANES)
                sum += NAME(load)(queries + r * dim, d, dim, 0) * turned[d / LANES];
            sums[r][e] = sum;
        }
    }
    for (int64_t r = 0; r < call->num_queries; r++) {
        floats found = NAME(sum_each)(sums[r]);
        memcpy(logits + r * room, &found, sizeof found);
    }
}

/* Fetch the rotations of sixteen positions. */
TARGET INLINE void NAME(prefetch_rotations)(const struct transform_attention *call,
                                            const int32_t *positions) {
    for (int e = 0; e < LANES; e++)
        for (int64_t d = 0; d < 2 * call->half; d += LANES)
            __builtin_prefetch(call->rotation + positions[e] * 2 * call->half + d);
}

#if defined(HAS_DOT_PRODUCT)
/* Turn back sixteen keys of a block from row n on, by the narrowest numbers that hold their symbols;
 * returns 0 where only float32 does. */
TARGET INLINE int NAME(turn_back_narrow)(const struct transform_attention *call,
                                         const struct transform_block *block,
                                         const struct transform_scratch *scratch, int64_t n,
                                         int has_tiles) {
    int64_t dim = call->head_dim, room = scratch->room, head = block->head;
    const float *symbols = scratch->symbols + n;
    int has_bytes = call->bytes.numbers && !has_tiles;
    if (has_bytes && NAME(pack_fours)(symbols, room, dim, scratch->pairs)) {
        const int32_t *lowers = call->bytes.lowers + head * NUM_TIERS + LAST_TIER;
        for (int64_t e = 0; e < LANES; e += KEY_TILE) {
            int64_t row = least(n + e, block->count - 1), d = 0;
            int32_t own = lowers[scratch->tiers[scratch->order[row]]]; /* the finest tier is first */
            for (; dim - d >= 4 * LANES; d += 4 * LANES)
                NAME(turn_back_fours)(&call->bytes, head, d, own, scratch->pairs + e, LANES, dim, 4,
                                      scratch->keys + e * dim + d);
            if (d < dim)
                NAME(turn_back_fours)(&call->bytes, head, d, own, scratch->pairs + e, LANES, dim, 2,
                                      scratch->keys + e * dim + d);
        }
        return 1;
    }
    if (!call->pairs || !NAME(pack_pairs)(symbols, room, dim, scratch->pairs))
        return 0;
    const uint32_t *pairs = call->pairs + head * dim / 2 * dim;
#if defined(WITH_MATRIX_UNITS)
    if (has_tiles) {
        NAME(turn_back_tiles)(scratch->pairs, LANES, pairs, dim, scratch->keys);
        return 1;
    }
#endif
    for (int64_t e = 0; e < LANES; e += KEY_TILE) {
        int64_t d = 0;
        for (; dim - d >= 4 * LANES; d += 4 * LANES)
            NAME(turn_back_pairs)(scratch->pairs + e, LANES, pairs + d, dim, 4,
                                  scratch->keys + e * dim + d);
        if (d < dim)
            NAME(turn_back_pairs)(scratch->pairs + e, LANES, pairs + d, dim, 2,
                                  scratch->keys + e * dim + d);
    }
    return 1;
}
#endif

/* Turn back sixteen keys of a block from row n on, in float32. */
TARGET INLINE void NAME(turn_back_wide)(const struct transform_attention *call, int64_t head,
                                        const struct transform_scratch *scratch, int64_t n) {
    int64_t dim = call->head_dim;
    const float *inverse = call->inverse + head * dim * dim;
    for (int64_t e = 0; e < LANES; e += KEY_TILE)
        for (int64_t d = 0; d < dim; d += 4 * LANES) {
            const float *symbols = scratch->symbols + n + e;
            float *keys = scratch->keys + e * dim + d;
            if (dim - d >= 4 * LANES)
                NAME(turn_back)(symbols, scratch->room, inverse + d, dim, 4, keys);
            else
                NAME(turn_back)(symbols, scratch->room, inverse + d, dim, 2, keys);
        }
}

/* Logits of sixteen entries of a block from row n on, whose keys are turned back. */
TARGET INLINE void NAME(weigh_sixteen)(const struct transform_attention *call,
                                       const struct transform_block *block,
                                       const struct transform_scratch *scratch, int64_t n) {
    int64_t dim = call->head_dim, room = scratch->room;
    const float *queries = call->queries + block->head * call->num_queries * dim;
    const float *mean = call->means + block->head * dim, *keys = scratch->keys;
    const int32_t *positions = scratch->positions + n;
    const float *scales = scratch->scales + n;
    float *logits = scratch->logits + n;
    if (n + LANES < block->count)
        NAME(prefetch_rotations)(call, positions + LANES);
    if (dim == 4 * LANES && 2 * call->half == dim)
        NAME(weigh_keys)(call, queries, mean, positions, scales, keys, room, 2, logits);
    else if (dim == 8 * LANES && 2 * call->half == dim)
        NAME(weigh_keys)(call, queries, mean, positions, scales, keys, room, 4, logits);
    else
        NAME(weigh_keys)(call, queries, mean, positions, scales, keys, room, 0, logits);
}

/* Logits of all entries of a block that is decoded. */
TARGET INLINE void NAME(logits_of)(const struct transform_attention *call,
                                   const struct transform_block *block,
                                   const struct transform_scratch *scratch) {
    int64_t head = block->head;
#if defined(HAS_DOT_PRODUCT)
    int has_tiles = 0;
#if defined(WITH_MATRIX_UNITS)
    has_tiles = call->pairs && larder_has_matrix_units();
    if (has_tiles)
        set_tile_shapes();
#endif
#endif
    for (int64_t n = 0; n < block->count; n += LANES) {
#if defined(HAS_DOT_PRODUCT)
        if (!NAME(turn_back_narrow)(call, block, scratch, n, has_tiles))
#endif
            NAME(turn_back_wide)(call, head, scratch, n);
        NAME(weigh_sixteen)(call, block, scratch, n);
    }
#if defined(HAS_DOT_PRODUCT) && defined(WITH_MATRIX_UNITS)
    if (has_tiles)
        NAME(release_tiles)();
#endif
}

/* Steps and positions of the rows of a block, and of those behind the last one. */
TARGET static void NAME(place_rows)(const struct transform_attention *call,
                                    const struct transform_block *block,
                                    const struct transform_scratch *scratch) {
    int64_t count = block->count, padded = (count + LANES - 1) / LANES * LANES;
    read_positions(block, call->payload + block->offset, scratch->positions + scratch->room);
    const int32_t *places = scratch->positions + scratch->room;
    float scales[NUM_TIERS];
    for (int tier = -LAST_TIER; tier <= LAST_TIER; tier++)
        scales[tier + LAST_TIER] = (float)ldexp(call->step, tier);
    for (int64_t n = 0; n < padded; n++) {
        int32_t place = n < count ? scratch->order[n] : 0;
        scratch->scales[n] = scales[scratch->tiers[place] + LAST_TIER];
        scratch->positions[n] = places[place];
    }
}

/* Weights of the entries of a block, times their steps, in place of logits. */
TARGET static void NAME(weigh_entries)(const struct transform_attention *call,
                                       const struct transform_block *block,
                                       const struct transform_scratch *scratch, float *peaks,
                                       float *masses) {
    int64_t room = scratch->room, count = block->count;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    const float *bias = call->bias ? call->bias + block->entry : NULL;
    for (int64_t r = 0; r < call->num_queries; r++) {
        float *logits = scratch->logits + r * room, peak = -INFINITY;
        for (int64_t n = 0; bias && n < count; n++)
            logits[n] += bias[scratch->order[n]];
        for (int64_t n = count; n < padded; n++)
            logits[n] = -INFINITY;
        floats highest = NAME(broadcast)(-INFINITY), mass = {0};
        for (int64_t n = 0; n < padded; n += LANES) {
            floats own = NAME(load)(logits, n, padded, 0);
            highest = NAME(select)(own > highest, own, highest);
        }
        for (int l = 0; l < LANES; l++)
            peak = highest[l] > peak ? highest[l] : peak;
        for (int64_t n = 0; n < padded; n += LANES) {
            floats own = NAME(load)(logits, n, padded, 0);
            floats weight = NAME(exponential)(own - peak);
            weight = (floats)((ints)weight & (own > NAME(broadcast)(-INFINITY)));
            mass += weight;
            weight *= NAME(load)(scratch->scales, n, padded, 0);
            memcpy(logits + n, &weight, sizeof weight);
        }
        peaks[r] = peak;
        masses[r] = 0;
        for (int l = 0; l < LANES; l++)
            masses[r] += mass[l];
    }
}

/* Averages of the components of values, their mass and peak, of one block that is decoded. */
TARGET static void NAME(attend_block)(const struct transform_attention *call,
                                      const struct transform_block *block,
                                      const struct transform_scratch *scratch, float *outs,
                                      float *peaks, float *masses) {
    int64_t dim = call->head_dim, room = scratch->room;
    int64_t padded = (block->count + LANES - 1) / LANES * LANES;
    NAME(place_rows)(call, block, scratch);
    NAME(logits_of)(call, block, scratch);
    NAME(weigh_entries)(call, block, scratch, peaks, masses);
    for (int64_t c = 0; c < dim; c += LANES)
        for (int64_t r = 0; r < call->num_queries; r++) {
            floats sums[LANES];
            for (int l = 0; l < LANES; l++)
                sums[l] = (floats){0};
            for (int64_t n = 0; n < padded; n += LANES) {
                floats weight = NAME(load)(scratch->logits + r * room, n, padded, 0);
                for (int l = 0; l < LANES; l++)
                    sums[l] += weight * NAME(load)(scratch->symbols + (dim + c + l) * room, n,
                                                   padded, 0);
            }
            floats found = NAME(sum_each)(sums);
            memcpy(outs + r * dim + c, &found, sizeof found);
        }
}

#include "plane_attention_body.h"

/* The same of one or two blocks behind each other, which are decoded first. */
TARGET static void NAME(attend_blocks)(const struct transform_attention *call,
                                       const struct decoding_tables *tables,
                                       const struct transform_block *blocks, int num_blocks,
                                       const struct transform_scratch *scratches, float *outs,
                                       float *peaks, float *masses) {
    int64_t width = NUM_SIDES * call->head_dim, rows = call->num_queries;
    struct NAME(decoding) decodings[2];
    if (call->coder == BIT_PLANES) {
        for (int b = 0; b < num_blocks; b++)
            NAME(attend_plane_block)(call, blocks + b, scratches, outs + b * rows * call->head_dim,
                                     peaks + b * rows, masses + b * rows);
        return;
    }
    for (int b = 0; b < num_blocks; b++)
        NAME(begin)(decodings + b, tables, call->bases + blocks[b].head * width, width,
                    blocks[b].count, call->payload + blocks[b].codes, blocks[b].bytes,
                    scratches + b);
    NAME(decode_blocks)(tables, width, decodings, num_blocks);
    for (int b = 0; b < num_blocks; b++)
        NAME(attend_block)(call, blocks + b, scratches + b, outs + b * rows * call->head_dim,
                           peaks + b * rows, masses + b * rows);
}

#include "vectors_end.h"
