/* Decoding of bit planes for one instruction set; plane_attention_body.h includes it. */

#if defined(HAS_AVX512)
/* Planes of a group that are read by words of 64 bits. */
struct NAME(plane_words) {
    const uint8_t *fixed; /* the next plane of a bit of each row */
    const uint8_t *rest;
    uint64_t next; /* bit of the rest */
    uint64_t rows;
    int64_t plane_bytes;
};

/* Bits of the rest from the next one on. */
TARGET INLINE uint64_t NAME(next_bits)(const struct NAME(plane_words) *words) {
    uint64_t low, high, next = words->next;
    memcpy(&low, words->rest + next / 64 * 8, sizeof low);
    memcpy(&high, words->rest + next / 64 * 8 + 8, sizeof high);
    return low >> (next & 63) | high << 1 << (~next & 63);
}

/* A bit of each row that is marked. */
TARGET INLINE uint64_t NAME(next_marked)(struct NAME(plane_words) *words, uint64_t marked) {
    uint64_t bits = _pdep_u64(NAME(next_bits)(words), marked);
    words->next += (uint64_t)__builtin_popcountll(marked);
    return bits;
}

TARGET INLINE uint64_t NAME(next_plane)(struct NAME(plane_words) *words) {
    uint64_t plane;
    memcpy(&plane, words->fixed, sizeof plane);
    words->fixed += sizeof plane;
    return plane;
}

/* First levels of a sparse code of a group of PLANE_ROWS rows. */
TARGET INLINE void NAME(read_sparse)(int count, struct NAME(plane_words) *words, uint64_t *level) {
    uint64_t marks = NAME(next_bits)(words);
    words->next += 8 * (uint64_t)count;
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
        uint64_t bytes = _pdep_u64(marks >> 8 * t, 0x0101010101010101u) * 0xFF;
        level[t] = NAME(next_marked)(words, bytes);
    }
}

/* Symbols of some components of one code of a group of PLANE_ROWS rows; all but the words, the tile
 * and the symbols are constants. */
TARGET INLINE void NAME(read_tile)(int raw, int most, enum plane_kind kind, int count,
                                   struct NAME(plane_words) *words, const uint16_t *tile,
                                   int8_t *symbols) {
    uint64_t held[PLANE_TILE], level[PLANE_TILE];
    __m512i sizes[PLANE_TILE];
    const __m512i step = _mm512_set1_epi8((char)(kind == SIGNED_PLANES ? -1 : 1 << raw));
    if (kind == SPARSE_LEVELS)
        NAME(read_sparse)(count, words, level);
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
        held[t] = 0;
        sizes[t] = _mm512_setzero_si512();
#pragma GCC unroll 8
        for (int b = 0; b < raw; b++) {
            uint64_t plane = NAME(next_plane)(words);
            int is_last = kind == SIGNED_PLANES && b == raw - 1;
            level[t] = plane & ~held[t]; /* of the last one: the lowest number */
            held[t] |= plane;
            sizes[t] = _mm512_mask_add_epi8(sizes[t], plane, sizes[t],
                                            _mm512_set1_epi8((char)(is_last ? -(1 << b) : 1 << b)));
        }
        if (kind == SIGNED_PLANES) {
            held[t] = level[t];
        } else if (most > 0) {
            if (kind == LEVELS)
                level[t] = NAME(next_plane)(words);
            held[t] |= level[t];
            sizes[t] = _mm512_mask_add_epi8(sizes[t], level[t], sizes[t], step);
        }
    }
#pragma GCC unroll 8
    for (int j = 1; j < most; j++)
#pragma GCC unroll 8
        for (int t = 0; t < count; t++) {
            level[t] = NAME(next_marked)(words, level[t]);
            sizes[t] = _mm512_mask_add_epi8(sizes[t], level[t], sizes[t], step);
        }
#pragma GCC unroll 8
    for (int t = 0; t < count; t++) {
        uint64_t signs = NAME(next_marked)(words, held[t]);
        __m512i own =
            _mm512_mask_sub_epi8(sizes[t], signs, _mm512_setzero_si512(), sizes[t]);
        _mm512_storeu_si512(symbols + tile[t] * PLANE_ROWS, own);
    }
}

/* Symbols of all components of one code. */
TARGET INLINE void NAME(read_code)(int raw, int most, enum plane_kind kind,
                                   struct NAME(plane_words) *given, const uint16_t *list,
                                   int64_t count, int8_t *symbols) {
    struct NAME(plane_words) words = *given; /* a copy, that stays in registers */
    for (; count >= PLANE_TILE; count -= PLANE_TILE, list += PLANE_TILE)
        NAME(read_tile)(raw, most, kind, PLANE_TILE, &words, list, symbols);
    switch (count) {
#define READ(left)                                                                                 \
    case left:                                                                                     \
        NAME(read_tile)(raw, most, kind, left, &words, list, symbols);                        \
        break;
        LEFT_IN_TILE(READ)
#undef READ
    }
    *given = words;
}

/* Components in order of codes, with room behind, and the number of each code. */
TARGET INLINE void NAME(sort_components)(const uint8_t *codes, int64_t width, uint16_t *list,
                                         int64_t *counts) {
#if defined(HAS_DOT_PRODUCT)
    __m512i held[MOST_WIDTH / PLANE_ROWS], places[2];
    int64_t vectors = (width + PLANE_ROWS - 1) / PLANE_ROWS, next = 0;
    for (int64_t v = 0; v < vectors; v++) {
        int64_t left = least((width + 1) / 2 - v * LANES * 2, LANES * 2);
        __m256i pairs = _mm256_maskz_loadu_epi8((__mmask32)((1ull << left) - 1), codes + v * 32);
        __m512i wide = _mm512_cvtepu8_epi16(pairs);
        held[v] = _mm512_and_si512(_mm512_or_si512(wide, _mm512_slli_epi16(wide, 4)),
                                   _mm512_set1_epi8(15));
    }
    for (int h = 0; h < 2; h++)
        places[h] = _mm512_loadu_si512(plane_places + h * 2 * LANES);
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        int64_t first = next;
        for (int64_t v = 0; v < vectors; v++) {
            __mmask64 own = _mm512_cmpeq_epi8_mask(held[v], _mm512_set1_epi8((char)k));
            own &= rows_of(width - v * PLANE_ROWS);
            __m512i base = _mm512_set1_epi16((short)(v * PLANE_ROWS));
            for (int h = 0; h < 2; h++) {
                uint32_t half = (uint32_t)(own >> 32 * h);
                _mm512_storeu_si512(list + next,
                                    _mm512_maskz_compress_epi16(
                                        half, _mm512_add_epi16(places[h], base)));
                next += __builtin_popcount(half);
            }
        }
        counts[k] = next - first;
    }
#else
    int64_t next[NUM_PLANE_CODES + 1] = {0};
    memset(counts, 0, NUM_PLANE_CODES * sizeof *counts);
    for (int64_t c = 0; c < width; c++)
        counts[plane_code_of(codes, c)]++;
    for (int k = 0; k < NUM_PLANE_CODES; k++)
        next[k + 1] = next[k] + counts[k];
    for (int64_t c = 0; c < width; c++)
        list[next[plane_code_of(codes, c)]++] = (uint16_t)c;
#endif
}

/* Planes of a group, in a copy with room behind; components in order of codes. */
TARGET INLINE struct NAME(plane_words)
NAME(open_words)(const struct plane_group *group, int64_t rows, int64_t width, uint8_t *copy,
                 uint16_t *list, int64_t *counts) {
    int64_t num_planes = 0, size = least(group->end - group->planes, MOST_PLANE_BYTES(width));
    int64_t plane = bytes_of_plane(rows);
    NAME(sort_components)(group->codes, width, list, counts);
    for (int k = 0; k < NUM_PLANE_CODES; k++)
        num_planes += counts[k] * fixed_planes(plane_codes[group->is_wide][k]);
    memcpy(copy, group->planes, (size_t)size);
    return (struct NAME(plane_words)){copy, copy + plane * num_planes, 0, rows_of(rows), plane};
}

/* Symbols [width, PLANE_ROWS] of a group of PLANE_ROWS rows that is not wide; 0 where its codes hold
 * none. */
TARGET static void NAME(read_words)(const struct plane_group *group, int64_t width, uint8_t *copy,
                                    int8_t *symbols) {
    uint16_t list[MOST_WIDTH + 32];
    int64_t counts[NUM_PLANE_CODES];
    struct NAME(plane_words) words =
        NAME(open_words)(group, PLANE_ROWS, width, copy, list, counts);
    const uint16_t *own = list;
#define READ(code, raw, most, kind)                                                                \
    NAME(read_code)(raw, most, kind, &words, own, counts[code], symbols);                     \
    own += counts[code];
    NARROW_CODES(READ)
#undef READ
}

/* Add a number to the rows of a plane. */
TARGET INLINE void NAME(add_marked)(int32_t *symbols, uint64_t plane, int32_t number) {
    for (int v = 0; v < PLANE_ROWS / LANES; v++) {
        __m512i own = _mm512_load_si512(symbols + v * LANES);
        own = _mm512_mask_add_epi32(own, (__mmask16)(plane >> v * LANES), own,
                                    _mm512_set1_epi32(number));
        _mm512_store_si512(symbols + v * LANES, own);
    }
}

/* Symbols of some components of one code of any group. */
TARGET static void NAME(read_wide_tile)(struct plane_code code, int count,
                                        struct NAME(plane_words) *words, const uint16_t *tile,
                                        int32_t *symbols) {
    uint64_t held[PLANE_TILE] = {0}, level[PLANE_TILE] = {0};
    int is_signed = code.kind == SIGNED_PLANES;
    for (int t = 0; code.kind == SPARSE_LEVELS && t < count; t++)
        level[t] = words->rows & rows_of_bytes(NAME(next_marked)(words, 0xFF));
    for (int t = 0; t < count; t++) {
        int32_t *own = symbols + tile[t] * PLANE_ROWS;
        memset(own, 0, PLANE_ROWS * sizeof *own);
        for (int b = 0; b < fixed_planes(code); b++) {
            uint64_t plane = NAME(next_plane)(words) & words->rows;
            int is_last = is_signed && b == code.raw - 1;
            words->fixed += words->plane_bytes - (int64_t)sizeof plane;
            level[t] = is_signed ? plane & ~held[t] : plane; /* of the last one: the first level */
            held[t] |= plane;
            NAME(add_marked)(own, plane, (int32_t)(is_last ? 0u - (1u << b) : 1u << b));
        }
        held[t] = is_signed ? level[t] : held[t];
    }
    for (int j = code.kind == SPARSE_LEVELS ? 0 : 1; j < code.most; j++)
        for (int t = 0; t < count; t++) {
            level[t] = NAME(next_marked)(words, level[t]);
            held[t] |= level[t];
            NAME(add_marked)(symbols + tile[t] * PLANE_ROWS, level[t], (int32_t)level_of(code));
        }
    for (int t = 0; t < count; t++) {
        uint64_t signs = NAME(next_marked)(words, held[t]);
        int32_t *own = symbols + tile[t] * PLANE_ROWS;
        for (int v = 0; v < PLANE_ROWS / LANES; v++) {
            __m512i size = _mm512_load_si512(own + v * LANES);
            size = _mm512_mask_sub_epi32(size, (__mmask16)(signs >> v * LANES),
                                         _mm512_setzero_si512(), size);
            _mm512_store_si512(own + v * LANES, size);
        }
    }
}

/* Symbols [width, PLANE_ROWS] of any group; 0 where its codes hold none. */
TARGET static void NAME(read_wide)(const struct plane_group *group, int64_t rows, int64_t width,
                                   uint8_t *copy, int32_t *symbols) {
    uint16_t list[MOST_WIDTH + 32];
    int64_t counts[NUM_PLANE_CODES];
    struct NAME(plane_words) words = NAME(open_words)(group, rows, width, copy, list, counts);
    const uint16_t *own = list;
    for (int k = 0; k < NUM_PLANE_CODES; own += counts[k++])
        for (int64_t at = 0; at < counts[k]; at += PLANE_TILE)
            NAME(read_wide_tile)(plane_codes[group->is_wide][k],
                                 (int)least(counts[k] - at, PLANE_TILE), &words, own + at, symbols);
}
#endif

/* All symbols [width, PLANE_ROWS] of a group. */
TARGET static void NAME(group_symbols)(const struct plane_group *group, int64_t rows, int64_t width,
                                       const struct transform_scratch *scratch) {
#if defined(HAS_AVX512)
    if (group->is_wide || rows < PLANE_ROWS) {
        NAME(read_wide)(group, rows, width, scratch->copy, scratch->wide);
    } else {
        NAME(read_words)(group, width, scratch->copy, scratch->bytes);
        for (int64_t i = 0; i < width * PLANE_ROWS; i++)
            scratch->wide[i] = scratch->bytes[i];
    }
#else
    read_planes(group, rows, width, scratch->wide);
#endif
    read_lists(group, rows, width, scratch->wide);
}

/* Tiers and symbols of one block by row, as float32 [width, room]. */
TARGET static void NAME(decode_plane_block)(int64_t width, int64_t count, const uint8_t *bytes,
                                            int64_t num_bytes,
                                            const struct transform_scratch *scratch) {
    int sound;
    const uint8_t *end = bytes + num_bytes;
    struct plane_group group;
    bytes = read_tiers(bytes, end, count, scratch->tiers, &sound);
    for (int64_t n = 0; !bytes && n < count; n++)
        scratch->tiers[n] = 0;
    order_by_tier(scratch, count);
    for (int64_t n = 0; n < count; n += PLANE_ROWS) {
        int is_open = bytes && open_group(&group, bytes, end, width);
        bytes = is_open ? group.end : NULL;
        if (is_open)
            NAME(group_symbols)(&group, least(count - n, PLANE_ROWS), width, scratch);
        else
            memset(scratch->wide, 0, (size_t)(width * PLANE_ROWS) * sizeof *scratch->wide);
        for (int64_t c = 0; c < width; c++)
            for (int64_t i = 0; i < PLANE_ROWS; i++)
                scratch->symbols[c * scratch->room + n + i] =
                    (float)scratch->wide[c * PLANE_ROWS + i];
    }
}
