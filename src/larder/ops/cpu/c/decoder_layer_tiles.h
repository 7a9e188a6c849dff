/* Products of bfloat16 rows by matrix units; a part of decoder_layer_body.h.
 *
 * A tile of weights is 16 outputs by 32 numbers as the model stores them, a tile of rows is 16 pairs of
 * numbers by 16 rows. Their product adds 16 outputs by 16 rows in float32, every number of it in the
 * order of the pairs.
 */

#define AHEAD 2 /* blocks of weights */

/* Tiles 0 to 3 hold sums, 4 and 5 weights, 6 and 7 rows: compilers want their numbers as such. */

/* Tiles of rows: those of 16 rows lie one behind the other; zeros behind the last row. */
TARGET static const void *NAME(pack)(const uint16_t *rows, int64_t count, int64_t size,
                                     float *scratch) {
    char *tile = (char *)scratch;
    for (int64_t first = 0; first < count; first += TILE_ROWS)
        for (int64_t d = 0; d < size; d += CHUNK, tile += TILE_ROWS * TILE_BYTES) {
            floats own[TILE_ROWS] = {{0}};
            for (int64_t r = first; r < count && r < first + TILE_ROWS; r++)
                memcpy(own + r - first, rows + r * size + d, sizeof *own);
            NAME(transpose)(own);
            memcpy(tile, own, sizeof own);
        }
    return scratch;
}

/* Sums of 16 rows, or of 32, with 16 outputs of each of two matrices; sums[i] are those of output i. */
TARGET INLINE void NAME(sum_tiles)(const uint16_t *const *matrices, int64_t size, const char *rows,
                                   int is_wide, floats (*sums)[2][TILE_ROWS]) {
    int64_t stride = size * (int64_t)sizeof(uint16_t), group = size / CHUNK * TILE_ROWS * TILE_BYTES;
    int64_t ahead = AHEAD * TILE_ROWS * size;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < size; d += CHUNK, rows += TILE_ROWS * TILE_BYTES) {
        _tile_loadd(6, rows, TILE_BYTES);
        _tile_loadd(4, matrices[0] + d, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, matrices[1] + d, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (is_wide) {
            _tile_loadd(7, rows + group, TILE_BYTES);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (int r = 0; r < TILE_ROWS; r++) { /* the next blocks */
            __builtin_prefetch(matrices[0] + ahead + r * size + d, 0, 2);
            __builtin_prefetch(matrices[1] + ahead + r * size + d, 0, 2);
        }
    }
    _tile_stored(0, sums[0][0], TILE_BYTES);
    _tile_stored(1, sums[0][1], TILE_BYTES);
    if (is_wide) {
        _tile_stored(2, sums[1][0], TILE_BYTES);
        _tile_stored(3, sums[1][1], TILE_BYTES);
    }
}

/* Products of all rows with blocks [start, stop) of outputs. */
TARGET static void NAME(multiply)(const struct products *all, int64_t start, int64_t stop) {
    int together = all->use == GATED ? 1 : 2;
    set_tile_shapes();
    for (int64_t block = start; block < stop; block += together) {
        int64_t blocks[2], second = together == 1 || block + 1 == stop ? block : block + 1;
        const struct weights *own[2] = {weights_of(all, block, blocks),
                                        weights_of(all, second, blocks + 1)};
        if (all->use == GATED)
            own[1]++;
        const uint16_t *matrices[2] = {own[0]->matrix + blocks[0] * LANES * all->size,
                                       own[1]->matrix + blocks[1] * LANES * all->size};
        for (int64_t first = 0; first < all->num_rows; first += 2 * TILE_ROWS) {
            floats sums[2][2][TILE_ROWS];
            int64_t rest = all->num_rows - first;
            const char *rows = (const char *)all->rows + first * all->size * (int64_t)sizeof(uint16_t);
            NAME(sum_tiles)(matrices, all->size, rows, rest > TILE_ROWS, sums);
            for (int64_t group = 0; group < 2 && group * TILE_ROWS < rest; group++) {
                int64_t left = rest - group * TILE_ROWS, count = left < TILE_ROWS ? left : TILE_ROWS;
                int64_t row = first + group * TILE_ROWS;
                NAME(transpose)(sums[group][0]);
                NAME(transpose)(sums[group][1]);
                for (int64_t r = 0; r < count; r++)
                    NAME(use)(all, own[0], blocks[0], row + r, sums[group][0][r], sums[group][1][r]);
                for (int64_t r = 0; r < count && second != block; r++)
                    NAME(use)(all, own[1], blocks[1], row + r, sums[group][1][r], (floats){0});
            }
        }
    }
    _tile_release();
}

#undef AHEAD
