/* Decoding of bit planes on any processor; transform_attention.c includes it. */

#ifndef LARDER_PLANE_DECODING_H
#define LARDER_PLANE_DECODING_H

#include "plane_coder.h"

/* Bits that are read lowest first; zeros behind the end. */
struct bit_reader {
    const uint8_t *bytes;
    const uint8_t *end;
    int64_t next; /* bit */
};

INLINE uint64_t read_bit(struct bit_reader *reader) {
    const uint8_t *at = reader->bytes + reader->next / 8;
    uint64_t bit = at < reader->end ? *at >> (reader->next & 7) & 1 : 0;
    reader->next++;
    return bit;
}

/* A bit of each row that is marked, lowest row first. */
static uint64_t read_marked(struct bit_reader *reader, uint64_t marked) {
    uint64_t bits = 0;
    for (; marked; marked &= marked - 1)
        bits |= read_bit(reader) << __builtin_ctzll(marked);
    return bits;
}

/* The next plane of some rows; zeros behind the end. */
static uint64_t read_plane(struct bit_reader *reader, int64_t rows) {
    const uint8_t *at = reader->bytes + reader->next / 8;
    uint64_t plane = 0;
    for (int64_t b = 0; b < bytes_of_plane(rows) && at + b < reader->end; b++)
        plane |= (uint64_t)at[b] << 8 * b;
    reader->next += 8 * bytes_of_plane(rows);
    return plane & rows_of(rows);
}

/* Planes of a component while they are read. */
struct component_planes {
    int64_t component;
    uint64_t held;  /* rows that take a sign */
    uint64_t level; /* rows that have the level that was read last */
    uint32_t sizes[PLANE_ROWS];
};

INLINE void add_plane(struct component_planes *planes, uint64_t plane, uint32_t number) {
    planes->held |= plane;
    for (uint64_t left = plane; left; left &= left - 1)
        planes->sizes[__builtin_ctzll(left)] += number;
}

/* What a row of a level adds to its number. */
INLINE uint32_t level_of(struct plane_code code) {
    return code.kind == SIGNED_PLANES ? 0u - 1 : 1u << code.raw;
}

/* Turn raw bits into two's complement, whose last plane is given; the lowest number goes on. */
INLINE void sign_planes(struct component_planes *planes, struct plane_code code, uint64_t last) {
    uint32_t lowest = 1u << (code.raw - 1);
    planes->level = 0;
    for (uint64_t left = last; left; left &= left - 1) {
        int row = __builtin_ctzll(left);
        planes->level |= (uint64_t)(planes->sizes[row] == lowest) << row;
        planes->sizes[row] -= 2 * lowest;
    }
    planes->held = planes->level;
}

static void read_fixed(struct bit_reader *fixed, int64_t rows, struct plane_code code,
                       struct component_planes *planes) {
    memset(planes->sizes, 0, sizeof planes->sizes);
    planes->held = planes->level = 0;
    uint64_t last = 0;
    for (int b = 0; b < code.raw; b++) {
        last = read_plane(fixed, rows);
        add_plane(planes, last, 1u << b);
    }
    if (code.kind == SIGNED_PLANES)
        sign_planes(planes, code, last);
    if (fixed_planes(code) > code.raw) {
        planes->level = read_plane(fixed, rows);
        add_plane(planes, planes->level, level_of(code));
    }
}

/* Levels of some components of a code, from the first one that is not among the fixed planes. */
static void read_levels(struct bit_reader *rest, int64_t rows, struct plane_code code, int count,
                        struct component_planes *planes) {
    for (int t = 0; code.kind == SPARSE_LEVELS && t < count; t++)
        planes[t].level = rows_of_bytes(read_marked(rest, 0xFF)) & rows_of(rows);
    for (int t = 0; code.kind == SPARSE_LEVELS && t < count; t++) {
        planes[t].level = read_marked(rest, planes[t].level);
        add_plane(planes + t, planes[t].level, level_of(code));
    }
    for (int j = 1; j < code.most; j++)
        for (int t = 0; t < count; t++) {
            planes[t].level = read_marked(rest, planes[t].level);
            add_plane(planes + t, planes[t].level, level_of(code));
        }
}

/* Symbols [width, PLANE_ROWS] of a group; returns whether its bytes ended where it says. */
static int read_planes(const struct plane_group *group, int64_t rows, int64_t width,
                       int32_t *symbols) {
    uint8_t codes[MOST_WIDTH];
    int64_t num_planes = 0;
    for (int64_t c = 0; c < width; c++) {
        codes[c] = (uint8_t)plane_code_of(group->codes, c);
        num_planes += fixed_planes(plane_codes[group->is_wide][codes[c]]);
    }
    struct bit_reader fixed = {group->planes, group->end, 0};
    struct bit_reader rest = {group->planes, group->end, 8 * num_planes * bytes_of_plane(rows)};
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        struct plane_code code = plane_codes[group->is_wide][k];
        int64_t from = 0, tile[PLANE_TILE];
        for (int count; (count = next_tile(codes, width, k, &from, tile));) {
            struct component_planes planes[PLANE_TILE];
            for (int t = 0; t < count; t++)
                read_fixed(&fixed, rows, code, planes + t);
            read_levels(&rest, rows, code, count, planes);
            for (int t = 0; t < count; t++) {
                uint64_t signs = read_marked(&rest, planes[t].held);
                int32_t *own = symbols + tile[t] * PLANE_ROWS;
                for (int64_t n = 0; n < PLANE_ROWS; n++) {
                    uint32_t size = planes[t].sizes[n];
                    own[n] = (int32_t)(signs >> n & 1 ? 0u - size : size);
                }
            }
        }
    }
    return (rest.next + 7) / 8 == group->end - group->planes;
}

/* Put the numbers that codes do not hold into symbols; returns whether each lies in the group. */
static int read_lists(const struct plane_group *group, int64_t rows, int64_t width,
                      int32_t *symbols) {
    int is_whole = 1;
    for (int64_t i = 0; i < group->num_nears + group->num_fars; i++) {
        int is_far = i >= group->num_nears;
        const uint8_t *at = is_far ? group->fars + FAR_BYTES * (i - group->num_nears)
                                   : group->nears + NEAR_BYTES * i;
        uint16_t place;
        int32_t symbol = (int8_t)at[sizeof place];
        memcpy(&place, at, sizeof place);
        if (is_far)
            memcpy(&symbol, at + sizeof place, sizeof symbol);
        int64_t row = place & (PLANE_ROWS - 1), component = place >> ROW_BITS;
        if (row < rows && component < width)
            symbols[component * PLANE_ROWS + row] = symbol;
        else
            is_whole = 0;
    }
    return is_whole;
}

/* Tiers of the entries of a block, in order; returns what follows, or NULL where they end too soon;
 * `sound` says whether each is a tier. */
static const uint8_t *read_tiers(const uint8_t *bytes, const uint8_t *end, int64_t count,
                                 int32_t *tiers, int *sound) {
    int is_sound = 1;
    for (int64_t first = 0; first < count; first += PLANE_ROWS) {
        int64_t rows = least(count - first, PLANE_ROWS);
        struct bit_reader reader = {bytes, end, 0};
        uint64_t planes[TIER_PLANES];
        if (end - bytes < TIER_PLANES * bytes_of_plane(rows))
            return NULL;
        for (int p = 0; p < TIER_PLANES; p++)
            planes[p] = read_plane(&reader, rows);
        for (int64_t n = 0; n < rows; n++) {
            int tier = (int)(planes[0] >> n & 1) + 2 * (int)(planes[1] >> n & 1) +
                       4 * (int)(planes[2] >> n & 1) - LAST_TIER;
            tiers[first + n] = tier > LAST_TIER ? LAST_TIER : tier;
            is_sound &= tier <= LAST_TIER;
        }
        bytes += TIER_PLANES * bytes_of_plane(rows);
    }
    *sound = is_sound;
    return bytes;
}

/* Whether the bytes of a block of bit planes are those of its entries; `symbols` is a scratch
 * [width, PLANE_ROWS], `tiers` one of `count`. */
static int planes_are_whole(int64_t width, int64_t count, const uint8_t *bytes, const uint8_t *end,
                            int32_t *symbols, int32_t *tiers) {
    struct plane_group group;
    int is_whole = 0;
    bytes = read_tiers(bytes, end, count, tiers, &is_whole);
    is_whole &= bytes != NULL;
    for (int64_t n = 0; is_whole && n < count; n += PLANE_ROWS) {
        int64_t rows = least(count - n, PLANE_ROWS);
        if (!open_group(&group, bytes, end, width))
            return 0;
        is_whole = read_planes(&group, rows, width, symbols);
        is_whole &= read_lists(&group, rows, width, symbols);
        bytes = group.end;
    }
    return is_whole && bytes == end;
}

#endif
