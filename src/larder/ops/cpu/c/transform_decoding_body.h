/* Decoding of blocks of transform components for one instruction set; transform_attention_body.h
 * includes it, with its vectors. */

#if defined(HAS_AVX512)
/* Thirty-two states, in order of lanes: their upper and lower 16 bits. */
struct NAME(lanes) {
    __m512i high, low;
};

/* Vectors of sixteen states, in order of lanes. */
TARGET INLINE void NAME(widen)(const struct NAME(lanes) *lanes, __m512i *states) {
    for (int v = 0; v < CODER_VECTORS; v++) {
        __m256i high = v ? _mm512_extracti64x4_epi64(lanes->high, 1)
                         : _mm512_castsi512_si256(lanes->high);
        __m256i low = v ? _mm512_extracti64x4_epi64(lanes->low, 1)
                        : _mm512_castsi512_si256(lanes->low);
        __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
        states[v] = _mm512_or_si512(upper, _mm512_cvtepu16_epi32(low));
    }
}

/* Lower halves of the numbers of two vectors of sixteen. */
TARGET INLINE __m512i NAME(narrowed)(__m512i first, __m512i second) {
    __m512i lower = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(first));
    return _mm512_inserti64x4(lower, _mm512_cvtepi32_epi16(second), 1);
}

TARGET INLINE void NAME(narrow)(const __m512i *states, struct NAME(lanes) *lanes) {
    lanes->low = NAME(narrowed)(states[0], states[1]);
    lanes->high =
        NAME(narrowed)(_mm512_srli_epi32(states[0], 16), _mm512_srli_epi32(states[1], 16));
}

/* The next thirty-two words of a stream; zeros behind its end. */
TARGET INLINE __m512i NAME(next_words)(const struct word_stream *stream) {
    if (__builtin_expect(stream->left >= CODER_LANES, 1))
        return _mm512_loadu_si512(stream->at);
    int64_t left = stream->left > 0 ? stream->left : 0;
    return _mm512_maskz_loadu_epi16((1u << left) - 1, stream->at);
}

/* Lanes of `taking` with the first words in order, all others as they are. */
TARGET INLINE __m512i NAME(with_words)(__m512i lanes, __mmask32 taking, __m512i upcoming) {
#if defined(HAS_DOT_PRODUCT)
    return _mm512_mask_expand_epi16(lanes, taking, upcoming);
#else
    __mmask16 first = (__mmask16)taking, second = (__mmask16)(taking >> LANES);
    __m512i places = _mm512_add_epi32(_mm512_set1_epi32(__builtin_popcount(first)),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                        13, 14, 15));
    __m512i one = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(upcoming));
    __m512i other = _mm512_permutexvar_epi16(places, upcoming); /* in the lower halves */
    __m512i spread = NAME(narrowed)(_mm512_maskz_expand_epi32(first, one),
                                    _mm512_maskz_expand_epi32(second, other));
    return _mm512_mask_mov_epi16(lanes, taking, spread);
#endif
}

/* Take a word into each state of `held` that needs one, in order of lanes. */
TARGET INLINE void NAME(pull)(struct NAME(lanes) *lanes, __mmask32 held,
                              struct word_stream *stream) {
    __mmask32 taking = _mm512_mask_testn_epi16_mask(held, lanes->high, lanes->high);
    __m512i upcoming = NAME(next_words)(stream);
    lanes->high = _mm512_mask_mov_epi16(lanes->high, taking, lanes->low);
    lanes->low = NAME(with_words)(lanes->low, taking, upcoming);
    int64_t count = __builtin_popcount(taking);
    stream->at += count * (int64_t)sizeof(uint16_t);
    stream->left -= count;
}

/* Raw bits of thirty-two lanes, of `sizes` up to CHUNK_BITS each. */
TARGET INLINE __m512i NAME(pull_raw)(struct NAME(lanes) *lanes, __m512i sizes, __mmask32 held,
                                     struct word_stream *stream) {
    __m512i slots = _mm512_and_si512(lanes->low, _mm512_set1_epi16(NUM_SLOTS - 1));
    __m512i rest = _mm512_sub_epi16(_mm512_set1_epi16(SLOT_BITS), sizes);
    __m512i parts = _mm512_srlv_epi16(slots, rest);
    __m512i below = _mm512_sub_epi16(slots, _mm512_sllv_epi16(parts, rest));
    __m512i above = _mm512_sllv_epi16(_mm512_srli_epi16(lanes->low, SLOT_BITS), rest);
    __m512i taken = _mm512_sub_epi16(_mm512_set1_epi16(16), sizes);
    __m512i carried = _mm512_sllv_epi16(lanes->high, taken);
    lanes->low = _mm512_or_si512(_mm512_or_si512(above, below), carried);
    lanes->high = _mm512_srlv_epi16(lanes->high, sizes);
    NAME(pull)(lanes, held, stream);
    return parts;
}

/* Numbers of the buckets of thirty-two lanes. */
TARGET INLINE __m512i NAME(permuted)(const uint16_t *numbers, __m512i buckets) {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(numbers), buckets,
                                     _mm512_loadu_si512(numbers + 2 * LANES));
}

/* Numbers of a bucket's first code, or of its second one, by lanes of `is_second`. */
TARGET INLINE __m512i NAME(chosen)(const uint16_t numbers[2][BUCKETS], __m512i buckets,
                                   __mmask32 is_second) {
    __m512i one = NAME(permuted)(numbers[0], buckets), other = NAME(permuted)(numbers[1], buckets);
    return _mm512_mask_blend_epi16(is_second, one, other);
}

#if defined(HAS_DOT_PRODUCT)
/* Bytes of the buckets of thirty-two lanes. */
TARGET INLINE __m512i NAME(bytes_of)(const uint8_t *bytes, __m512i buckets) {
    return _mm512_maskz_permutexvar_epi8(0x5555555555555555u, buckets, _mm512_loadu_si512(bytes));
}
#endif

/* Rows of a group that share a tier. */
struct NAME(tier_part) {
    int32_t tier; /* above the finest */
    __mmask32 lanes;
};

/* What a code does to the states of thirty-two lanes. */
struct NAME(found) {
    __m512i sizes, ranks, codes;
};

TARGET INLINE struct NAME(found) NAME(look_up)(const struct alias_table *table,
                                               const struct alias_bytes *bytes, __m512i slots) {
    __m512i buckets = _mm512_srli_epi16(slots, BUCKET_BITS);
    __m512i within = _mm512_and_si512(slots, _mm512_set1_epi16((1 << BUCKET_BITS) - 1));
#if defined(HAS_DOT_PRODUCT)
    __m512i dividers = NAME(bytes_of)(bytes->dividers, buckets);
#else
    __m512i dividers = NAME(permuted)(table->dividers, buckets);
    (void)bytes;
#endif
    __mmask32 is_second = _mm512_cmpge_epu16_mask(within, dividers);
    struct NAME(found) found;
    found.sizes = NAME(chosen)(table->sizes, buckets, is_second);
    found.ranks = _mm512_add_epi16(slots, NAME(chosen)(table->shifts, buckets, is_second));
#if defined(HAS_DOT_PRODUCT)
    found.codes = _mm512_mask_blend_epi16(is_second, NAME(bytes_of)(bytes->codes[0], buckets),
                                          NAME(bytes_of)(bytes->codes[1], buckets));
#else
    found.codes = NAME(chosen)(table->codes, buckets, is_second);
#endif
    return found;
}

TARGET INLINE __m512i NAME(slots_of)(const struct NAME(lanes) *lanes) {
    return _mm512_and_si512(lanes->low, _mm512_set1_epi16(NUM_SLOTS - 1));
}

/* Take the codes that were found out of the states of `held`: size * (state >> SLOT_BITS) + rank.
 * A size of less than NUM_SLOTS, times 16, is a number of 16 bits, so that no product loses any. */
TARGET INLINE void NAME(advance)(const struct NAME(found) *found, struct NAME(lanes) *lanes,
                                 __mmask32 held, struct word_stream *stream) {
    __m512i sizes = _mm512_slli_epi16(found->sizes, 16 - SLOT_BITS);
    __m512i above = _mm512_and_si512(lanes->low, _mm512_set1_epi16((short)-NUM_SLOTS));
    __m512i least = _mm512_add_epi16(_mm512_mulhi_epu16(sizes, above), found->ranks);
    __m512i low = _mm512_add_epi16(_mm512_mullo_epi16(sizes, lanes->high), least);
    __mmask32 carries = _mm512_cmplt_epu16_mask(low, least);
    __m512i high = _mm512_mulhi_epu16(sizes, lanes->high);
    high = _mm512_mask_sub_epi16(high, carries, high, _mm512_set1_epi16(-1));
    lanes->low = _mm512_mask_mov_epi16(lanes->low, held, low);
    lanes->high = _mm512_mask_mov_epi16(lanes->high, held, high);
    NAME(pull)(lanes, held, stream);
}

/* Signed numbers of thirty-two lanes in vectors of sixteen. */
TARGET INLINE void NAME(separate)(__m512i numbers, __m512i *vectors) {
    vectors[0] = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(numbers));
    vectors[1] = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(numbers, 1));
}

/* Tiers of whole groups of entries. */
TARGET static void NAME(decode_tiers)(const struct decoding_tables *tables, int64_t groups,
                                      uint32_t *memory, struct word_stream *stream,
                                      int32_t *tiers) {
    __m512i states[CODER_VECTORS] = {_mm512_loadu_si512(memory),
                                     _mm512_loadu_si512(memory + LANES)};
    struct NAME(lanes) lanes;
    NAME(narrow)(states, &lanes);
    for (int64_t g = 0; g < groups; g++, tiers += CODER_LANES) {
        __m512i own[CODER_VECTORS];
        struct NAME(found) found =
            NAME(look_up)(tables->rows + tables->classes, tables->bytes + tables->classes,
                          NAME(slots_of)(&lanes));
        NAME(separate)(_mm512_sub_epi16(found.codes, _mm512_set1_epi16(LAST_TIER)), own);
        _mm512_storeu_si512(tiers, own[0]);
        _mm512_storeu_si512(tiers + LANES, own[1]);
        NAME(advance)(&found, &lanes, ALL_LANES, stream);
    }
    NAME(widen)(&lanes, states);
    _mm512_storeu_si512(memory, states[0]);
    _mm512_storeu_si512(memory + LANES, states[1]);
}

/* Tables and raw bits of a component in each tier, from the finest on. */
struct NAME(tier_tables) {
    const struct alias_table *tables[NUM_TIERS];
    const struct alias_bytes *bytes[NUM_TIERS];
    int32_t raw_bits[NUM_TIERS];
};

INLINE void NAME(find_tables)(const struct decoding_tables *tables, int32_t base,
                              struct NAME(tier_tables) *found) {
    for (int tier = -LAST_TIER; tier <= LAST_TIER; tier++) {
        int64_t row = class_at(tables->classes, base, tier);
        found->tables[tier + LAST_TIER] = tables->rows + row;
        found->bytes[tier + LAST_TIER] = tables->bytes + row;
        found->raw_bits[tier + LAST_TIER] = raw_bits_of(tables->first_raw, row);
    }
}

/* Raw bits of a component of each lane of a group. */
TARGET INLINE __m512i NAME(raw_bits)(const struct NAME(tier_tables) *tables,
                                     const struct NAME(tier_part) *parts, int num_parts) {
    __m512i bits = _mm512_setzero_si512();
    for (int p = 0; p < num_parts; p++) {
        __m512i own = _mm512_set1_epi16((short)tables->raw_bits[parts[p].tier]);
        bits = _mm512_mask_mov_epi16(bits, parts[p].lanes, own);
    }
    return bits;
}

/* Symbols with raw bits in more than one chunk, and escaped ones. */
TARGET static void NAME(decode_chunks)(__m512i bits, int chunks, __mmask32 held, __m512i *symbols,
                                       struct NAME(lanes) *lanes, struct word_stream *stream) {
    __m512i none = _mm512_setzero_si512(), most = _mm512_set1_epi16(CHUNK_BITS);
    for (int chunk = chunks - 1; chunk >= 0; chunk--) {
        __m512i sizes = _mm512_sub_epi16(bits, _mm512_set1_epi16((short)(chunk * CHUNK_BITS)));
        sizes = _mm512_min_epi16(_mm512_max_epi16(sizes, none), most);
        __m512i parts = NAME(pull_raw)(lanes, sizes, held, stream);
        __m512i wide_parts[CODER_VECTORS], wide_sizes[CODER_VECTORS];
        NAME(separate)(parts, wide_parts);
        NAME(separate)(sizes, wide_sizes);
        for (int v = 0; v < CODER_VECTORS; v++)
            symbols[v] =
                _mm512_or_si512(_mm512_sllv_epi32(symbols[v], wide_sizes[v]), wide_parts[v]);
    }
}

/* Symbols of one component of a group, of which `held` lanes hold rows; the others give 0. */
TARGET INLINE void NAME(decode_symbols)(const struct NAME(tier_tables) *tables,
                                        const struct NAME(tier_part) *parts, int num_parts,
                                        __mmask32 held, struct NAME(lanes) *lanes,
                                        struct word_stream *stream, float *into) {
    __m512i slots = NAME(slots_of)(lanes), bits, wide[CODER_VECTORS];
    int32_t tier = parts[0].tier, most = tables->raw_bits[tier]; /* of the finest tier */
    struct NAME(found) found = NAME(look_up)(tables->tables[tier], tables->bytes[tier], slots);
    for (int p = 1; p < num_parts; p++) {
        tier = parts[p].tier;
        struct NAME(found) own = NAME(look_up)(tables->tables[tier], tables->bytes[tier], slots);
        found.sizes = _mm512_mask_mov_epi16(found.sizes, parts[p].lanes, own.sizes);
        found.ranks = _mm512_mask_mov_epi16(found.ranks, parts[p].lanes, own.ranks);
        found.codes = _mm512_mask_mov_epi16(found.codes, parts[p].lanes, own.codes);
    }
    __mmask32 escapes =
        _mm512_mask_cmpeq_epi16_mask(held, found.codes, _mm512_set1_epi16(ESCAPE));
    __m512i symbols = _mm512_maskz_sub_epi16(held, found.codes, _mm512_set1_epi16(MIDDLE));
    NAME(advance)(&found, lanes, held, stream);
    if (most)
        bits = NAME(raw_bits)(tables, parts, num_parts);
    if (__builtin_expect(!escapes && most <= CHUNK_BITS, 1)) {
        if (most) {
            __m512i raw = NAME(pull_raw)(lanes, bits, held, stream);
            symbols = _mm512_or_si512(_mm512_sllv_epi16(symbols, bits), raw);
        }
        NAME(separate)(symbols, wide);
    } else {
        bits = _mm512_mask_mov_epi16(most ? bits : _mm512_setzero_si512(), escapes,
                                     _mm512_set1_epi16(ESCAPED_BITS));
        NAME(separate)(_mm512_mask_mov_epi16(symbols, escapes, _mm512_setzero_si512()), wide);
        int chunks = escapes ? MOST_CHUNKS : (most + CHUNK_BITS - 1) / CHUNK_BITS;
        struct NAME(lanes) given = *lanes; /* copies: the others stay in registers */
        struct word_stream own_stream = *stream;
        NAME(decode_chunks)(bits, chunks, held, wide, &given, &own_stream);
        *lanes = given;
        *stream = own_stream;
    }
    for (int v = 0; v < CODER_VECTORS; v++)
        _mm512_store_ps(into + v * LANES, _mm512_cvtepi32_ps(wide[v]));
}

/* Parts of a group of rows; returns their number. */
TARGET INLINE int NAME(parts_of)(const struct transform_scratch *scratch, int64_t first,
                                 int64_t count, struct NAME(tier_part) *parts) {
    int held = 0;
    for (int64_t l = 0; l < count; l++) {
        int32_t tier = scratch->tiers[scratch->order[first + l]] + LAST_TIER;
        if (!held || parts[held - 1].tier != tier)
            parts[held++] = (struct NAME(tier_part)){tier, 0};
        parts[held - 1].lanes |= 1u << l;
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
    __mmask32 last_lanes; /* that hold rows in the last of them */
    int num_parts[MOST_GROUPS];
    struct NAME(tier_part) parts[MOST_GROUPS][NUM_TIERS];
#endif
};

/* Read the states and tiers of a block. */
TARGET static void NAME(begin)(struct NAME(decoding) *block, const struct decoding_tables *tables,
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
    int64_t next = 0; /* row behind those that are decoded as vectors */
#if defined(HAS_AVX512)
    block->groups = least((count + CODER_LANES - 1) / CODER_LANES, MOST_GROUPS);
    for (int64_t g = 0; g < block->groups; g++, next += CODER_LANES)
        block->num_parts[g] =
            NAME(parts_of)(scratch, next, least(count - next, CODER_LANES), block->parts[g]);
    block->last_lanes = next > count ? (1u << count % CODER_LANES) - 1 : ALL_LANES;
#endif
    for (int64_t c = 0; next < count && c < width; c++)
        for (int64_t n = count; n < (count + LANES - 1) / LANES * LANES; n++)
            scratch->symbols[c * scratch->room + n] = 0;
}

#if defined(HAS_AVX512)
TARGET INLINE struct NAME(lanes) NAME(load_lanes)(const struct NAME(decoding) *block) {
    __m512i states[CODER_VECTORS] = {_mm512_loadu_si512(block->states),
                                     _mm512_loadu_si512(block->states + LANES)};
    struct NAME(lanes) lanes;
    NAME(narrow)(states, &lanes);
    return lanes;
}

TARGET INLINE void NAME(store_lanes)(struct NAME(decoding) *block, const struct NAME(lanes) *lanes) {
    __m512i states[CODER_VECTORS];
    NAME(widen)(lanes, states);
    for (int v = 0; v < CODER_VECTORS; v++)
        _mm512_storeu_si512(block->states + v * LANES, states[v]);
}

/* One component of a group of a block. */
TARGET INLINE void NAME(decode_lanes)(const struct NAME(tier_tables) *tables,
                                      const struct NAME(decoding) *block, int64_t group,
                                      struct NAME(lanes) *lanes, struct word_stream *stream,
                                      float *symbols) {
    __mmask32 held = group + 1 < block->groups ? ALL_LANES : block->last_lanes;
    NAME(decode_symbols)(tables, block->parts[group], block->num_parts[group], held, lanes, stream,
                         symbols + group * CODER_LANES);
}

/* One component of the groups of one or two blocks, whose states stay in registers. */
TARGET INLINE void NAME(decode_groups)(const struct decoding_tables *tables, int64_t component,
                                       struct NAME(decoding) *blocks, int num_blocks) {
    struct NAME(decoding) *one = blocks, *other = blocks + num_blocks - 1;
    struct NAME(tier_tables) found, other_found;
    NAME(find_tables)(tables, one->bases[component], &found);
    NAME(find_tables)(tables, other->bases[component], &other_found);
    float *symbols = one->scratch->symbols + component * one->scratch->room;
    float *other_symbols = other->scratch->symbols + component * other->scratch->room;
    struct NAME(lanes) lanes = NAME(load_lanes)(one), others = NAME(load_lanes)(other);
    struct word_stream stream = one->stream, other_stream = other->stream;
    int64_t both = num_blocks > 1 ? least(one->groups, other->groups) : 0, g = 0;
    for (; g < both; g++) {
        NAME(decode_lanes)(&found, one, g, &lanes, &stream, symbols);
        NAME(decode_lanes)(&other_found, other, g, &others, &other_stream, other_symbols);
    }
    for (int64_t rest = g; rest < one->groups; rest++)
        NAME(decode_lanes)(&found, one, rest, &lanes, &stream, symbols);
    NAME(store_lanes)(one, &lanes);
    one->stream = stream;
    if (num_blocks == 1)
        return;
    for (; g < other->groups; g++)
        NAME(decode_lanes)(&other_found, other, g, &others, &other_stream, other_symbols);
    NAME(store_lanes)(other, &others);
    other->stream = other_stream;
}
#endif

/* Symbols [width, room] as float32 by row of one or two blocks, whose columns behind the rows are
 * 0. One of two blocks is computed while the other waits for its results. */
TARGET static void NAME(decode_blocks)(const struct decoding_tables *tables, int64_t width,
                                       struct NAME(decoding) *blocks, int num_blocks) {
    for (int64_t c = 0; c < width; c++) {
#if defined(HAS_AVX512)
        NAME(decode_groups)(tables, c, blocks, num_blocks);
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
TARGET static void NAME(decode_block)(const struct decoding_tables *tables, const int32_t *bases,
                                      int64_t width, int64_t count, const uint8_t *bytes,
                                      int64_t num_bytes, const struct transform_scratch *scratch) {
    struct NAME(decoding) block;
    NAME(begin)(&block, tables, bases, width, count, bytes, num_bytes, scratch);
    NAME(decode_blocks)(tables, width, &block, 1);
}
