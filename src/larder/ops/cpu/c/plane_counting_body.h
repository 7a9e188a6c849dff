/* Choice of codes of bit planes for one instruction set; instruction_sets.h includes it. Loops over
 * components are left to the compiler. */

/* Add the rows of a group whose magnitudes reach each of some sizes, by component. */
TARGET static void NAME(count_rows)(const uint8_t *sizes, int64_t rows, const struct plane_costs *costs,
                                    uint8_t counts[MOST_SIZES][PLANE_ROWS]) {
    for (int s = 0; s < costs->num_sizes; s++) {
        uint8_t own[PLANE_ROWS] = {0}, size = costs->sizes[s];
        for (int64_t n = 0; n < rows; n++)
            for (int c = 0; c < PLANE_ROWS; c++)
                own[c] += sizes[n * PLANE_ROWS + c] >= size;
        memcpy(counts[s], own, sizeof own);
    }
}

/* Bits of the first level of a sparse code, by component: of bytes that are not 0, and eight of
 * which these are. */
TARGET static void NAME(count_sparse)(const uint8_t *sizes, int64_t rows, uint8_t *bits) {
    memset(bits, 8, PLANE_ROWS);
    for (int64_t first = 0; first < rows; first += 8) {
        uint8_t any[PLANE_ROWS] = {0}, count = (uint8_t)least(rows - first, 8);
        for (int64_t n = first; n < first + count; n++)
            for (int c = 0; c < PLANE_ROWS; c++)
                any[c] |= sizes[n * PLANE_ROWS + c];
        for (int c = 0; c < PLANE_ROWS; c++)
            bits[c] += any[c] ? count : 0;
    }
}

/* Codes of PLANE_ROWS components of a group with the fewest bits, and these bits.
 *
 * sizes: magnitudes by row, 255 for those beyond. */
TARGET static void NAME(choose_codes)(const uint8_t *sizes, int64_t rows,
                                      const struct plane_costs *costs, uint8_t *codes,
                                      uint16_t *bits) {
    uint8_t counts[MOST_SIZES][PLANE_ROWS], sparse[PLANE_ROWS];
    uint16_t chosen[PLANE_ROWS], fewest[PLANE_ROWS];
    NAME(count_rows)(sizes, rows, costs, counts);
    NAME(count_sparse)(sizes, rows, sparse);
    memset(fewest, 0xFF, sizeof fewest);
    memset(chosen, 0, sizeof chosen);
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        const struct code_cost *cost = costs->codes + k;
        uint16_t own[PLANE_ROWS], fixed = (uint16_t)(8 * bytes_of_plane(rows) * cost->planes);
        const uint8_t *beyond = counts[cost->beyond], *far = counts[costs->far];
        for (int c = 0; c < PLANE_ROWS; c++)
            own[c] = (uint16_t)(fixed + counts[cost->signs][c] + beyond[c] * cost->each_beyond +
                                far[c] * (8 * (FAR_BYTES - NEAR_BYTES)));
        for (int c = 0; cost->is_sparse && c < PLANE_ROWS; c++)
            own[c] = (uint16_t)(own[c] + sparse[c]);
        for (int j = 0; j < cost->num_levels; j++)
            for (int c = 0; c < PLANE_ROWS; c++)
                own[c] = (uint16_t)(own[c] + counts[cost->levels[j]][c]);
        for (int c = 0; c < PLANE_ROWS; c++) {
            uint16_t is_less = own[c] < fewest[c] ? 0xFFFF : 0;
            chosen[c] = (uint16_t)((chosen[c] & ~is_less) | (k & is_less));
            fewest[c] = own[c] < fewest[c] ? own[c] : fewest[c];
        }
    }
    for (int c = 0; c < PLANE_ROWS; c++) {
        codes[c] = (uint8_t)chosen[c];
        bits[c] = fewest[c];
    }
}

/* Magnitudes of some components of a row, 255 for those beyond. */
TARGET static void NAME(measure_row)(const float *numbers, int64_t count, float factor,
                                     uint8_t *sizes) {
    for (int64_t c = 0; c < count; c++) {
        float size = numbers[c] < 0 ? -numbers[c] * factor : numbers[c] * factor;
        size = size < 256.0f ? size : 256.0f;
        size = (size + 8388608.0f) - 8388608.0f; /* rounded, half of them to even ones */
        int32_t whole = (int32_t)size;
        sizes[c] = (uint8_t)(whole < 255 ? whole : 255);
    }
}
