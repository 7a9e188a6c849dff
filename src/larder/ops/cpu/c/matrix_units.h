/* Shapes of the tiles of matrix units: 16 rows of 64 bytes each. */

#ifndef LARDER_MATRIX_UNITS_H
#define LARDER_MATRIX_UNITS_H

#include <stdint.h>

#include "c_library.h"

#define TILES                                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512bf16,"   \
                          "avx512vnni,avx2,fma,bmi2,popcnt,amx-tile,amx-bf16")))
#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row of a tile */

struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

INLINE void set_tile_shapes(void) {
    struct tile_shapes shapes = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shapes.rows[tile] = TILE_ROWS;
        shapes.row_bytes[tile] = TILE_BYTES;
    }
    /* GCC 12 drops writes in front of its intrinsic, which names eight of these bytes as read. */
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

#endif
