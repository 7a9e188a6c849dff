/* Codes of bit planes: transform components whose symbols are signs, raw bits and unary quotients.
 * The bytes of a block are described in ops/plane_coder.py. */

#ifndef LARDER_PLANE_CODER_H
#define LARDER_PLANE_CODER_H

#include <stdint.h>
#include <string.h>

#include "transform_coder.h"

#define PLANE_ROWS 64 /* rows of a group: bits of a plane */
#define NUM_PLANE_CODES 16
#define MOST_RAW 30
#define MOST_QUOTIENT 7
#define PLANE_TILE 4 /* components of one code whose levels take turns, at most */
#define LEFT_IN_TILE(count) count(1) count(2) count(3)
#define TIER_PLANES 3
#define GROUP_HEAD 8 /* bytes */
#define WIDE_GROUP 0x80000000u
#define NEAR_BYTES 3 /* of a number that its code does not hold, and is a byte */
#define FAR_BYTES 6  /* of any other */
#define MOST_NEAR 127
#define ROW_BITS 6
#define MOST_FAR 32 /* numbers of a group that are no bytes; with more it is wide */
#define MOST_WIDTH 1024 /* components of an entry */
#define MOST_PLANES 40 /* of a component: bits of a row, with room for damaged ones */
#define MOST_PLANE_BYTES(width) ((width) * 8 * MOST_PLANES)

/* How a code writes what its raw bits leave:
 *
 * LEVELS         the quotient of the magnitude by a power of two, in levels; signs of what is not 0
 * SPARSE_LEVELS  the same, the first level of the bytes of its plane that are not 0
 * SIGNED_PLANES  symbols in two's complement; the lowest number stands for all beyond, whose
 *                magnitudes go on in levels of 1, with signs */
enum plane_kind { LEVELS, SPARSE_LEVELS, SIGNED_PLANES };

struct plane_code {
    int32_t raw;  /* bits */
    int32_t most; /* levels */
    enum plane_kind kind;
};

INLINE int64_t bytes_of_plane(int64_t rows) { return (rows + 7) / 8; }

/* The least magnitude that is written in levels of SIGNED_PLANES. */
INLINE int32_t first_level(struct plane_code code) { return 1 << (code.raw - 1); }

/* Largest magnitude that a code holds. */
INLINE uint64_t most_of(struct plane_code code) {
    if (code.kind == SIGNED_PLANES)
        return (uint64_t)(first_level(code) + code.most - 1);
    return ((uint64_t)(code.most + 1) << code.raw) - 1;
}

/* Codes of groups that are not wide: index, raw bits, levels, kind. */
#define NARROW_CODES(code)                                                                         \
    code(0, 0, 0, LEVELS) code(1, 0, 1, SPARSE_LEVELS) code(2, 0, 1, LEVELS)                       \
    code(3, 0, 2, LEVELS) code(4, 0, 3, SPARSE_LEVELS) code(5, 0, 7, LEVELS)                       \
    code(6, 2, 2, SIGNED_PLANES) code(7, 2, 3, SIGNED_PLANES) code(8, 2, 7, SIGNED_PLANES)         \
    code(9, 3, 7, SIGNED_PLANES) code(10, 4, 7, SIGNED_PLANES) code(11, 1, 7, LEVELS)              \
    code(12, 2, 7, LEVELS) code(13, 3, 7, LEVELS) code(14, 4, 7, LEVELS) code(15, 5, 3, LEVELS)
#define IN_TABLE(index, raw, most, kind) {raw, most, kind},

static const struct plane_code plane_codes[2][NUM_PLANE_CODES] = {
    {NARROW_CODES(IN_TABLE)},
    {{0, 7, 0}, {2, 7, 0}, {4, 7, 0}, {6, 7, 0}, {8, 7, 0}, {10, 7, 0}, {12, 7, 0}, {14, 7, 0},
     {16, 7, 0}, {18, 7, 0}, {20, 7, 0}, {22, 7, 0}, {24, 7, 0}, {26, 7, 0}, {28, 7, 0}, {30, 7, 0}},
};

/* Planes of a bit of each row. */
INLINE int32_t fixed_planes(struct plane_code code) {
    return code.raw + (code.most > 0 && code.kind == LEVELS);
}

INLINE uint64_t rows_of(int64_t rows) { return rows < PLANE_ROWS ? (1ull << rows) - 1 : ~0ull; }

/* Rows of the bytes of a plane that are marked by the bits of a byte. */
INLINE uint64_t rows_of_bytes(uint64_t bytes) {
    uint64_t spread = 0;
    for (; bytes; bytes &= bytes - 1)
        spread |= 0xFFull << 8 * __builtin_ctzll(bytes);
    return spread;
}

/* Group of up to PLANE_ROWS rows in the bytes of a block. */
struct plane_group {
    const uint8_t *codes; /* two to a byte */
    const uint8_t *nears;
    const uint8_t *fars;
    const uint8_t *planes;
    const uint8_t *end;
    int64_t num_nears;
    int64_t num_fars;
    int is_wide;
};

INLINE int plane_code_of(const uint8_t *codes, int64_t component) {
    return codes[component / 2] >> (component & 1) * 4 & 15;
}

/* The next components of a code, up to PLANE_TILE; codes are bytes. */
INLINE int next_tile(const uint8_t *codes, int64_t width, int code, int64_t *from, int64_t *tile) {
    int held = 0;
    for (; *from < width && held < PLANE_TILE; ++*from)
        if (codes[*from] == code)
            tile[held++] = *from;
    return held;
}

/* Head of a group; returns 0 if its bytes do not hold what it says. */
INLINE int open_group(struct plane_group *group, const uint8_t *bytes, const uint8_t *end,
                      int64_t width) {
    uint32_t size;
    uint16_t counts[2];
    if (end - bytes < GROUP_HEAD + (width + 1) / 2)
        return 0;
    memcpy(&size, bytes, sizeof size);
    memcpy(counts, bytes + sizeof size, sizeof counts);
    group->is_wide = (size & WIDE_GROUP) != 0;
    size &= ~WIDE_GROUP;
    group->codes = bytes + GROUP_HEAD;
    group->num_nears = counts[0];
    group->num_fars = counts[1];
    group->nears = group->codes + (width + 1) / 2;
    int64_t listed = NEAR_BYTES * group->num_nears + FAR_BYTES * group->num_fars;
    if (size > end - bytes || group->nears - bytes + listed > (int64_t)size)
        return 0;
    group->fars = group->nears + NEAR_BYTES * group->num_nears;
    group->planes = group->fars + FAR_BYTES * group->num_fars;
    group->end = bytes + size;
    return 1;
}

#endif
