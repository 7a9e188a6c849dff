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

#if defined(HAS_AVX512)
/* Sixteen states with a word taken by each that needs one, in order of lanes. */
TARGET INLINE __m512i NAME(pull)(__m512i states, struct word_stream *stream) {
    __mmask16 low = _mm512_cmplt_epu32_mask(states, _mm512_set1_epi32((int)LOWEST));
    __m256i halves;
    if (stream->left >= LANES)
        halves = _mm256_loadu_si256((const __m256i *)stream->at);
    else {
        int64_t left = stream->left > 0 ? stream->left : 0;
        halves = _mm256_maskz_loadu_epi16((__mmask16)((1u << left) - 1), stream->at);
    }
    __m512i taken = _mm512_maskz_expand_epi32(low, _mm512_cvtepu16_epi32(halves));
    int64_t count = __builtin_popcount(low);
    stream->at += count * (int64_t)sizeof(uint16_t);
    stream->left -= count;
    return _mm512_mask_or_epi32(states, low, _mm512_slli_epi32(states, 16), taken);
}

/* A chunk of the raw bits of sixteen lanes. */
TARGET INLINE __m512i NAME(pull_raw)(__m512i states, __m512i extras, int chunk, __m512i *symbols,
                                     struct word_stream *stream) {
    __m512i none = _mm512_setzero_si512(), most = _mm512_set1_epi32(CHUNK_BITS);
    __m512i size = _mm512_sub_epi32(extras, _mm512_set1_epi32(chunk * CHUNK_BITS));
    size = _mm512_min_epi32(_mm512_max_epi32(size, none), most);
    __m512i slot = _mm512_and_si512(states, _mm512_set1_epi32(NUM_SLOTS - 1));
    __m512i rest = _mm512_sub_epi32(_mm512_set1_epi32(SLOT_BITS), size);
    __m512i part = _mm512_srlv_epi32(slot, rest);
    *symbols = _mm512_or_si512(_mm512_sllv_epi32(*symbols, size), part);
    __m512i below = _mm512_sub_epi32(slot, _mm512_sllv_epi32(part, rest));
    states = _mm512_add_epi32(_mm512_sllv_epi32(_mm512_srli_epi32(states, SLOT_BITS), rest), below);
    return NAME(pull)(states, stream);
}

/* Numbers of sixteen lanes in even places, of sixteen others in odd ones. */
TARGET INLINE __m512i NAME(interleaved)(__m512i even, __m512i odd) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, even, _mm512_slli_epi32(odd, 16));
}

/* Numbers of a bucket's first code, or of its second one, by lanes of `is_second`. */
TARGET INLINE __m512i NAME(permuted)(const uint16_t numbers[2][BUCKETS], __m512i buckets,
                                     __mmask32 is_second) {
    __m512i one = _mm512_permutex2var_epi16(_mm512_loadu_si512(numbers[0]), buckets,
                                            _mm512_loadu_si512(numbers[0] + 2 * LANES));
    __m512i other = _mm512_permutex2var_epi16(_mm512_loadu_si512(numbers[1]), buckets,
                                              _mm512_loadu_si512(numbers[1] + 2 * LANES));
    return _mm512_mask_blend_epi16(is_second, one, other);
}

/* Rows of a group that share a tier: lanes in even places, then odd ones. */
struct NAME(tier_part) {
    int32_t tier;
    __mmask32 lanes;
};

/* What a code does to the states of thirty-two lanes. */
struct NAME(found) {
    __m512i sizes, ranks, codes, raw;
};

TARGET INLINE struct NAME(found) NAME(look_up)(const struct alias_table *table, __m512i slots,
                                               int32_t raw) {
    __m512i buckets = _mm512_srli_epi16(slots, BUCKET_BITS);
    __m512i within = _mm512_and_si512(slots, _mm512_set1_epi16((1 << BUCKET_BITS) - 1));
    __m512i dividers = _mm512_permutex2var_epi16(
        _mm512_loadu_si512(table->dividers), buckets,
        _mm512_loadu_si512(table->dividers + 2 * LANES));
    __mmask32 is_second = _mm512_cmpge_epu16_mask(within, dividers);
    struct NAME(found) found;
    found.sizes = NAME(permuted)(table->sizes, buckets, is_second);
    found.ranks = _mm512_add_epi16(slots, NAME(permuted)(table->shifts, buckets, is_second));
    found.codes = NAME(permuted)(table->codes, buckets, is_second);
    found.raw = _mm512_set1_epi16((short)raw);
    return found;
}

/* Slots of thirty-two lanes: those of the first states in even places, the others' in odd ones. */
TARGET INLINE __m512i NAME(slots_of)(const __m512i *states) {
    __m512i slots = NAME(interleaved)(states[0], states[1]);
    return _mm512_and_si512(slots, _mm512_set1_epi16(NUM_SLOTS - 1));
}

/* Take the codes that were found out of the states. */
TARGET INLINE void NAME(advance)(const struct NAME(found) *found, __m512i *states,
                                 struct word_stream *stream) {
    const __m512i lower = _mm512_set1_epi32(0xFFFF);
    __m512i sizes[CODER_VECTORS] = {_mm512_and_si512(found->sizes, lower),
                                    _mm512_srli_epi32(found->sizes, 16)};
    __m512i ranks[CODER_VECTORS] = {_mm512_and_si512(found->ranks, lower),
                                    _mm512_srli_epi32(found->ranks, 16)};
    for (int v = 0; v < CODER_VECTORS; v++) {
        __m512i high = _mm512_srli_epi32(states[v], SLOT_BITS);
        states[v] = _mm512_add_epi32(_mm512_mullo_epi32(sizes[v], high), ranks[v]);
        states[v] = NAME(pull)(states[v], stream);
    }
}

/* Numbers of even places, and of odd ones, with their signs. */
TARGET INLINE void NAME(separate)(__m512i both, __m512i *numbers) {
    numbers[0] = _mm512_srai_epi32(_mm512_slli_epi32(both, 16), 16);
    numbers[1] = _mm512_srai_epi32(both, 16);
}

/* Tiers of whole groups of entries. */
TARGET static void NAME(decode_tiers)(const struct code_tables *tables, int64_t groups,
                                      uint32_t *lanes, struct word_stream *stream,
                                      int32_t *tiers) {
    __m512i states[CODER_VECTORS] = {_mm512_loadu_si512(lanes), _mm512_loadu_si512(lanes + LANES)};
    for (int64_t g = 0; g < groups; g++, tiers += CODER_LANES) {
        __m512i own[CODER_VECTORS];
        struct NAME(found) found =
            NAME(look_up)(tables->rows + tables->classes, NAME(slots_of)(states), 0);
        NAME(separate)(_mm512_sub_epi16(found.codes, _mm512_set1_epi16(LAST_TIER)), own);
        _mm512_storeu_si512(tiers, own[0]);
        _mm512_storeu_si512(tiers + LANES, own[1]);
        NAME(advance)(&found, states, stream);
    }
    _mm512_storeu_si512(lanes, states[0]);
    _mm512_storeu_si512(lanes + LANES, states[1]);
}

/* Symbols of one component of a group, with `chunks` chunks of raw bits at most. */
TARGET INLINE void NAME(decode_symbols)(const struct code_tables *tables, int32_t base, int chunks,
                                        const struct NAME(tier_part) *parts, int num_parts,
                                        __m512i *states, struct word_stream *stream, float *into) {
    const __m512i lower = _mm512_set1_epi32(0xFFFF), none = _mm512_setzero_si512();
    __m512i slots = NAME(slots_of)(states), symbols[CODER_VECTORS];
    int64_t row = class_at(tables->classes, base, parts[0].tier);
    struct NAME(found) found =
        NAME(look_up)(tables->rows + row, slots, raw_bits_of(tables->first_raw, row));
    for (int p = 1; p < num_parts; p++) {
        row = class_at(tables->classes, base, parts[p].tier);
        struct NAME(found) own =
            NAME(look_up)(tables->rows + row, slots, raw_bits_of(tables->first_raw, row));
        found.sizes = _mm512_mask_mov_epi16(found.sizes, parts[p].lanes, own.sizes);
        found.ranks = _mm512_mask_mov_epi16(found.ranks, parts[p].lanes, own.ranks);
        found.codes = _mm512_mask_mov_epi16(found.codes, parts[p].lanes, own.codes);
        found.raw = _mm512_mask_mov_epi16(found.raw, parts[p].lanes, own.raw);
    }
    __mmask32 escapes = _mm512_cmpeq_epi16_mask(found.codes, _mm512_set1_epi16(ESCAPE));
    NAME(separate)(_mm512_sub_epi16(found.codes, _mm512_set1_epi16(MIDDLE)), symbols);
    NAME(advance)(&found, states, stream);
    if (chunks || escapes) {
        found.raw = _mm512_mask_mov_epi16(found.raw, escapes, _mm512_set1_epi16(ESCAPED_BITS));
        __m512i raw[CODER_VECTORS] = {_mm512_and_si512(found.raw, lower),
                                      _mm512_srli_epi32(found.raw, 16)};
        for (int v = 0; v < CODER_VECTORS; v++) {
            __mmask16 is_escape = _mm512_cmpeq_epi32_mask(raw[v], _mm512_set1_epi32(ESCAPED_BITS));
            symbols[v] = _mm512_mask_mov_epi32(symbols[v], is_escape, none);
        }
        for (int chunk = (escapes ? MOST_CHUNKS : chunks) - 1; chunk >= 0; chunk--)
            for (int v = 0; v < CODER_VECTORS; v++)
                states[v] = NAME(pull_raw)(states[v], raw[v], chunk, symbols + v, stream);
    }
    for (int v = 0; v < CODER_VECTORS; v++)
        _mm512_store_ps(into + v * LANES, _mm512_cvtepi32_ps(symbols[v]));
}

/* Most chunks of raw bits of a component in tiers from the given one on. */
INLINE int NAME(most_chunks)(const struct code_tables *tables, int32_t base, int32_t tier) {
    int32_t raw = raw_bits_of(tables->first_raw, class_at(tables->classes, base, tier));
    return (raw + CHUNK_BITS - 1) / CHUNK_BITS;
}

/* Parts of a group of rows; returns their number. */
TARGET INLINE int NAME(parts_of)(const struct transform_scratch *scratch, int64_t first,
                                 struct NAME(tier_part) *parts) {
    int held = 0;
    for (int l = 0; l < CODER_LANES; l++) {
        int32_t tier = scratch->tiers[scratch->order[first + l]];
        if (!held || parts[held - 1].tier != tier)
            parts[held++] = (struct NAME(tier_part)){tier, 0};
        parts[held - 1].lanes |= 1u << (l < LANES ? 2 * l : 2 * (l - LANES) + 1);
    }
    return held;
}
#endif

/* Block that is being decoded. */
struct NAME(decoding) {
    const int32_t *bases;
    int64_t count;
    struct word_stream stream;
    const struct transform_scratch *scratch;
    uint32_t states[CODER_LANES];
#if defined(HAS_AVX512)
    int64_t groups; /* of lanes that are decoded as vectors */
    int num_parts[MOST_GROUPS];
    struct NAME(tier_part) parts[MOST_GROUPS][NUM_TIERS];
#endif
};

/* Read the states and tiers of a block. */
TARGET static void NAME(begin)(struct NAME(decoding) *block, const struct code_tables *tables,
                               const int32_t *bases, int64_t width, int64_t count,
                               const uint8_t *bytes, int64_t num_bytes,
                               const struct transform_scratch *scratch) {
    block->bases = bases;
    block->count = count;
    block->scratch = scratch;
    block->stream = (struct word_stream){bytes, num_bytes / (int64_t)sizeof(uint16_t)};
    memset(block->states, 0, sizeof block->states);
    for (int64_t l = 0; l < least(count, CODER_LANES); l++) {
        block->states[l] = next_word(&block->stream) << 16;
        block->states[l] |= next_word(&block->stream);
    }
    int64_t whole = 0; /* entries of groups of lanes */
#if defined(HAS_AVX512)
    whole = count / CODER_LANES * CODER_LANES;
    NAME(decode_tiers)(tables, count / CODER_LANES, block->states, &block->stream, scratch->tiers);
#endif
    for (int64_t n = whole; n < count; n++)
        scratch->tiers[n] = decode_code(tables->rows + tables->classes,
                                        block->states + n % CODER_LANES, &block->stream) -
                            LAST_TIER;
    order_by_tier(scratch, count);
    for (int64_t c = 0; c < width; c++)
        for (int64_t n = count; n < (count + LANES - 1) / LANES * LANES; n++)
            scratch->symbols[c * scratch->room + n] = 0;
#if defined(HAS_AVX512)
    block->groups = least(count / CODER_LANES, MOST_GROUPS);
    for (int64_t g = 0; g < block->groups; g++)
        block->num_parts[g] = NAME(parts_of)(scratch, g * CODER_LANES, block->parts[g]);
#endif
}

/* Symbols [width, room] as float32 by row of some blocks, whose columns behind the rows are 0. With
 * two blocks at a time, one is computed while the other waits for its results. */
TARGET static void NAME(decode_blocks)(const struct code_tables *tables, int64_t width,
                                       struct NAME(decoding) *blocks, int num_blocks) {
    for (int64_t c = 0; c < width; c++) {
#if defined(HAS_AVX512)
        __m512i states[2][CODER_VECTORS];
        int64_t most = 0;
        for (int b = 0; b < num_blocks; b++) {
            most = blocks[b].groups > most ? blocks[b].groups : most;
            for (int v = 0; v < CODER_VECTORS; v++)
                states[b][v] = _mm512_loadu_si512(blocks[b].states + v * LANES);
        }
        for (int64_t g = 0; g < most; g++)
            for (int b = 0; b < num_blocks; b++) {
                struct NAME(decoding) *block = blocks + b;
                if (g >= block->groups)
                    continue;
                int chunks = NAME(most_chunks)(tables, block->bases[c], block->parts[g][0].tier);
                float *into = block->scratch->symbols + c * block->scratch->room + g * CODER_LANES;
                NAME(decode_symbols)(tables, block->bases[c], chunks, block->parts[g],
                                     block->num_parts[g], states[b], &block->stream, into);
            }
        for (int b = 0; b < num_blocks; b++)
            for (int v = 0; v < CODER_VECTORS; v++)
                _mm512_storeu_si512(blocks[b].states + v * LANES, states[b][v]);
#endif
        for (int b = 0; b < num_blocks; b++) {
            struct NAME(decoding) *block = blocks + b;
            const struct transform_scratch *scratch = block->scratch;
            int64_t n = 0;
#if defined(HAS_AVX512)
            n = block->groups * CODER_LANES;
#endif
            for (; n < block->count; n += CODER_LANES)
                decode_group(tables, block->bases[c], scratch->tiers, scratch->order + n,
                             least(block->count - n, CODER_LANES), block->states, &block->stream,
                             scratch->symbols + c * scratch->room + n);
        }
    }
}

/* Tiers and symbols of one block. */
TARGET static void NAME(decode_block)(const struct code_tables *tables, const int32_t *bases,
                                      int64_t width, int64_t count, const uint8_t *bytes,
                                      int64_t num_bytes, const struct transform_scratch *scratch) {
    struct NAME(decoding) block;
    NAME(begin)(&block, tables, bases, width, count, bytes, num_bytes, scratch);
    NAME(decode_blocks)(tables, width, &block, 1);
}

#if defined(HAS_AVX512)
/* Turn the components of some entries back into some vectors of keys. */
TARGET INLINE void NAME(turn_back)(const float *symbols, int64_t room, const float *inverse,
                                   int64_t dim, const float *scales, const float *mean, int vectors,
                                   float *keys) {
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
        for (int v = 0; v < vectors; v++) {
            floats key = sums[e][v] * scales[e] + NAME(load)(mean, v * LANES, dim, 0);
            memcpy(keys + e * dim + v * LANES, &key, sizeof key);
        }
}
#else
/* Turn the components of one entry back into some vectors of a key. */
TARGET INLINE void NAME(turn_back)(const float *symbols, int64_t room, const float *inverse,
                                   int64_t dim, const float *scales, const float *mean, int vectors,
                                   float *keys) {
    float sums[4 * LANES] = {0};
    for (int64_t c = 0; c < dim; c++) {
        float symbol = symbols[c * room];
        for (int d = 0; d < vectors * LANES; d++)
            sums[d] += symbol * inverse[c * dim + d];
    }
    for (int d = 0; d < vectors * LANES; d++)
        keys[d] = sums[d] * scales[0] + mean[d];
}
#endif

#if defined(HAS_DOT_PRODUCT)
/* The same with symbols and matrices as pairs of bfloat16. */
TARGET INLINE void NAME(turn_back_pairs)(const uint32_t *symbols, int64_t room,
                                         const uint32_t *inverse, int64_t dim, const float *scales,
                                         const float *mean, int vectors, float *keys) {
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
        for (int v = 0; v < vectors; v++) {
            __m512 key = _mm512_mul_ps(sums[e][v], _mm512_set1_ps(scales[e]));
            key = _mm512_add_ps(key, _mm512_loadu_ps(mean + v * LANES));
            _mm512_storeu_ps(keys + e * dim + v * LANES, key);
        }
}

/* Symbols of keys as pairs of bfloat16; 0 if one of them is not exact. */
TARGET static int NAME(pack_pairs)(const struct transform_scratch *scratch, int64_t dim,
                                   int64_t padded) {
    __m512i high = _mm512_set1_epi32((int)0xFFFF0000u);
    __m512 most = _mm512_setzero_ps();
    for (int64_t c = 0; c < dim; c += 2)
        for (int64_t n = 0; n < padded; n += LANES) {
            __m512 one = _mm512_load_ps(scratch->symbols + c * scratch->room + n);
            __m512 other = _mm512_load_ps(scratch->symbols + (c + 1) * scratch->room + n);
            most = _mm512_max_ps(most, _mm512_max_ps(_mm512_abs_ps(one), _mm512_abs_ps(other)));
            __m512i low = _mm512_srli_epi32(_mm512_castps_si512(one), 16);
            __m512i pair = _mm512_or_si512(low, _mm512_and_si512(_mm512_castps_si512(other), high));
            _mm512_store_si512(scratch->pairs + c / 2 * scratch->room + n, pair);
        }
    return _mm512_reduce_max_ps(most) <= EXACT_BF16;
}

#if defined(WITH_MATRIX_UNITS)
/* `turn_back_pairs` of sixteen entries by matrix units, which may add the products of pairs in
 * another order. */
TILES static void NAME(turn_back_tiles)(const uint32_t *symbols, int64_t room,
                                        const uint32_t *inverse, int64_t dim, const float *scales,
                                        const float *mean, float *keys) {
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
    for (int64_t e = 0; e < LANES; e++)
        for (int64_t d = 0; d < dim; d += LANES) {
            __m512 key = _mm512_mul_ps(_mm512_loadu_ps(keys + e * dim + d), _mm512_set1_ps(scales[e]));
            _mm512_storeu_ps(keys + e * dim + d, _mm512_add_ps(key, _mm512_loadu_ps(mean + d)));
        }
}

TILES static void NAME(release_tiles)(void) { _tile_release(); }
#endif
#endif

/* Rotate sixteen keys, and write their logits for every query. */
TARGET INLINE void NAME(weigh_keys)(const struct transform_attention *call, const float *queries,
                                    const int32_t *positions, float *keys, int64_t room,
                                    float *logits) {
    int64_t dim = call->head_dim, half = call->half;
    for (int e = 0; e < LANES; e++) {
        const float *turn = call->rotation + positions[e] * 2 * half;
        float *key = keys + e * dim;
        for (int64_t d = 0; d < half; d += LANES) {
            floats cosine = NAME(load)(turn, d, half, 0), sine = NAME(load)(turn + half, d, half, 0);
            floats one = NAME(load)(key, d, half, 0), other = NAME(load)(key + half, d, half, 0);
            floats first = one * cosine - other * sine, second = other * cosine + one * sine;
            memcpy(key + d, &first, sizeof first);
            memcpy(key + half + d, &second, sizeof second);
        }
    }
    for (int64_t r = 0; r < call->num_queries; r++) {
        floats sums[LANES];
        for (int e = 0; e < LANES; e++)
            sums[e] = (floats){0};
        for (int64_t d = 0; d < dim; d += LANES) {
            floats query = NAME(load)(queries + r * dim, d, dim, 0);
            for (int e = 0; e < LANES; e++)
                sums[e] += query * NAME(load)(keys + e * dim, d, dim, 0);
        }
        floats found = NAME(sum_each)(sums);
        memcpy(logits + r * room, &found, sizeof found);
    }
}

/* Logits of all entries of a block that is decoded. */
TARGET INLINE void NAME(logits_of)(const struct transform_attention *call,
                                   const struct transform_block *block,
                                   const struct transform_scratch *scratch) {
    int64_t dim = call->head_dim, head = block->head;
    const float *queries = call->queries + head * call->num_queries * dim;
    const float *inverse = call->inverse + head * dim * dim, *mean = call->means + head * dim;
    int has_pairs = 0;
#if defined(HAS_DOT_PRODUCT)
    int64_t padded = (block->count + LANES - 1) / LANES * LANES;
    has_pairs = call->pairs && NAME(pack_pairs)(scratch, dim, padded);
#endif
    int has_tiles = 0;
#if defined(HAS_DOT_PRODUCT) && defined(WITH_MATRIX_UNITS)
    has_tiles = has_pairs && larder_has_matrix_units();
    if (has_tiles)
        set_tile_shapes();
#endif
    for (int64_t n = 0; n < block->count; n += LANES) {
#if defined(HAS_DOT_PRODUCT) && defined(WITH_MATRIX_UNITS)
        if (has_tiles)
            NAME(turn_back_tiles)(scratch->pairs + n, scratch->room, call->pairs + head * dim / 2 * dim,
                                  dim, scratch->scales + n, mean, scratch->keys);
#endif
        for (int64_t e = 0; e < LANES && !has_tiles; e += KEY_TILE)
            for (int64_t d = 0; d < dim; d += 4 * LANES) {
                const float *symbols = scratch->symbols + n + e, *scales = scratch->scales + n + e;
                float *keys = scratch->keys + e * dim + d;
                int is_wide = dim - d >= 4 * LANES;
#if defined(HAS_DOT_PRODUCT)
                if (has_pairs) {
                    const uint32_t *own = call->pairs + head * dim / 2 * dim + d;
                    const uint32_t *pairs = scratch->pairs + n + e;
                    if (is_wide)
                        NAME(turn_back_pairs)(pairs, scratch->room, own, dim, scales, mean + d, 4,
                                              keys);
                    else
                        NAME(turn_back_pairs)(pairs, scratch->room, own, dim, scales, mean + d, 2,
                                              keys);
                    continue;
                }
#endif
                if (is_wide)
                    NAME(turn_back)(symbols, scratch->room, inverse + d, dim, scales, mean + d, 4,
                                    keys);
                else
                    NAME(turn_back)(symbols, scratch->room, inverse + d, dim, scales, mean + d, 2,
                                    keys);
            }
        NAME(weigh_keys)(call, queries, scratch->positions + n, scratch->keys, scratch->room,
                         scratch->logits + n);
    }
#if defined(HAS_DOT_PRODUCT) && defined(WITH_MATRIX_UNITS)
    if (has_tiles)
        NAME(release_tiles)();
#endif
    (void)has_pairs;
}

/* Averages of the components of values, their mass and peak, of one block that is decoded. */
TARGET static void NAME(attend_block)(const struct transform_attention *call,
                                      const struct transform_block *block,
                                      const struct transform_scratch *scratch, float *outs,
                                      float *peaks, float *masses) {
    int64_t dim = call->head_dim, room = scratch->room, count = block->count;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    read_positions(block, call->payload + block->offset, scratch->positions + room);
    const int32_t *places = scratch->positions + room;
    float scales[NUM_TIERS];
    for (int tier = -LAST_TIER; tier <= LAST_TIER; tier++)
        scales[tier + LAST_TIER] = (float)ldexp(call->step, tier);
    for (int64_t n = 0; n < padded; n++) {
        int32_t place = n < count ? scratch->order[n] : 0;
        scratch->scales[n] = scales[scratch->tiers[place] + LAST_TIER];
        scratch->positions[n] = places[place];
    }
    NAME(logits_of)(call, block, scratch);
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

/* The same of one or two blocks behind each other, which are decoded first. */
TARGET static void NAME(attend_blocks)(const struct transform_attention *call,
                                       const struct transform_block *blocks, int num_blocks,
                                       const struct transform_scratch *scratches, float *outs,
                                       float *peaks, float *masses) {
    int64_t width = NUM_SIDES * call->head_dim, rows = call->num_queries;
    struct NAME(decoding) decodings[2];
    for (int b = 0; b < num_blocks; b++)
        NAME(begin)(decodings + b, &call->tables, call->bases + blocks[b].head * width, width,
                    blocks[b].count, call->payload + blocks[b].codes, blocks[b].bytes,
                    scratches + b);
    NAME(decode_blocks)(&call->tables, width, decodings, num_blocks);
    for (int b = 0; b < num_blocks; b++)
        NAME(attend_block)(call, blocks + b, scratches + b, outs + b * rows * call->head_dim,
                           peaks + b * rows, masses + b * rows);
}

#include "vectors_end.h"
