/* Products and norms of rows for one instruction set; included once for each, with
 *
 *   NAME(x)            x with the suffix of the instruction set
 *   TARGET             function attribute that selects it
 *   HAS_DOT_PRODUCT    defined where it multiplies pairs of bfloat16
 *   HAS_MATRIX_UNITS   defined where it multiplies tiles of bfloat16
 */

#include "vectors.h"

#if defined(IS_FLOAT32)
TARGET INLINE floats NAME(widen)(const float *numbers) {
    floats values;
    memcpy(&values, numbers, sizeof values);
    return values;
}

TARGET INLINE floats NAME(round_each)(floats values) { return values; }

TARGET INLINE void NAME(narrow)(floats values, float *out) { memcpy(out, &values, sizeof values); }
#else
TARGET INLINE floats NAME(widen)(const uint16_t *numbers) {
    halves bits;
    memcpy(&bits, numbers, sizeof bits);
    return (floats)(NAME(to_words)(bits) << 16);
}

/* bfloat16 in the high half of each lane, rounded to the nearest, ties to even. */
TARGET INLINE floats NAME(round_each)(floats values) {
    words bits = (words)values;
    words near = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
    return NAME(select)(values != values, (floats)(near * 0 + 0x7fc00000u), (floats)near);
}

TARGET INLINE void NAME(narrow)(floats values, uint16_t *out) {
    halves bits = NAME(to_halves)((words)NAME(round_each)(values) >> 16);
    memcpy(out, &bits, sizeof bits);
}
#endif

/* x * sigmoid(x), rounded. */
TARGET INLINE floats NAME(silu)(floats x) {
    floats power = NAME(exponential)(NAME(select)(x < 0, x, -x)); /* of -|x| */
    return NAME(round_each)(x * NAME(select)(x < 0, power, power * 0 + 1) / (power + 1));
}

/* Numbers of one row with 16 outputs, used as the call says. */
TARGET INLINE void NAME(use)(const struct products *all, const struct weights *own, int64_t block,
                             int64_t row, floats sums, floats others) {
    number *out = own->out + row * own->outputs + block * LANES;
    if (own->bias)
        sums += NAME(widen)(own->bias + block * LANES);
    if (all->use == GATED)
        sums = NAME(silu)(NAME(round_each)(sums)) * NAME(round_each)(others);
    if (all->use == ADDED)
        sums = NAME(round_each)(sums) + NAME(widen)(out);
    NAME(narrow)(sums, out);
}

#if defined(HAS_MATRIX_UNITS)
#include "decoder_layer_tiles.h"
#else
#if defined(IS_FLOAT32)
/* Rows are multiplied as they are. */
TARGET static const void *NAME(pack)(const float *rows, int64_t count, int64_t size,
                                     float *scratch) {
    (void)count, (void)size, (void)scratch;
    return rows;
}

TARGET INLINE floats NAME(add_products)(floats sum, words weights, const void *row, int64_t first) {
    return sum + (floats)weights * NAME(widen)((const float *)row + first);
}
#define ROW_BYTES sizeof(float)
#elif defined(HAS_DOT_PRODUCT)
/* Rows are multiplied as they are. */
TARGET static const void *NAME(pack)(const number *rows, int64_t count, int64_t size,
                                     float *scratch) {
    (void)count, (void)size, (void)scratch;
    return rows;
}

TARGET INLINE floats NAME(add_products)(floats sum, words weights, const void *row, int64_t first) {
    words pairs;
    memcpy(&pairs, (const number *)row + first, sizeof pairs);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)pairs);
}
#define ROW_BYTES sizeof(number)
#else
/* Rows as float32: of every 32 numbers the 16 of even index, then the others. */
TARGET static const void *NAME(pack)(const number *rows, int64_t count, int64_t size,
                                     float *scratch) {
    for (int64_t n = 0; n < count * size; n++)
        scratch[n / CHUNK * CHUNK + n % 2 * LANES + n % CHUNK / 2] = from_number(rows[n]);
    return scratch;
}

TARGET INLINE floats NAME(add_products)(floats sum, words weights, const void *row, int64_t first) {
    floats even, odd;
    memcpy(&even, (const float *)row + first, sizeof even);
    memcpy(&odd, (const float *)row + first + LANES, sizeof odd);
    sum += (floats)(weights << 16) * even;
    return sum + (floats)(weights & 0xffff0000u) * odd;
}
#define ROW_BYTES sizeof(float)
#endif

/* Products of `count` rows with 16 outputs, TOGETHER outputs at a time, whose lanes are summed while
 * the processor is at those behind them. Beside them weights are fetched: `lines` lines a step from
 * `next` on, or where that is none those BYTES_AHEAD. */
TARGET INLINE void NAME(sum_products)(const number *matrix, int64_t size, const char *rows,
                                   int count, const char *next, int lines, floats *out) {
    floats fours[MOST_ROWS][LANES / TOGETHER];
    for (int group = 0; group < LANES / TOGETHER; group++) {
        const number *own = matrix + group * TOGETHER * size;
        floats totals[MOST_ROWS][TOGETHER] = {{{0}}};
        for (int64_t d = 0; d < size; d += CHUNK) {
            for (int line = 0; line < lines; line++, next += LINE_BYTES)
                __builtin_prefetch(next, 0, 2);
            for (int t = 0; t < TOGETHER; t++) {
                words weights;
                memcpy(&weights, own + t * size + d, sizeof weights);
                if (!lines)
                    __builtin_prefetch((const char *)(own + t * size + d) + BYTES_AHEAD, 0, 2);
                for (int r = 0; r < count; r++)
                    totals[r][t] = NAME(add_products)(totals[r][t], weights,
                                                   rows + r * size * (int64_t)ROW_BYTES, d);
            }
        }
        for (int r = 0; r < count; r++)
            fours[r][group] =
                NAME(sum_fours)(totals[r][0], totals[r][1], totals[r][2], totals[r][3]);
    }
    for (int r = 0; r < count; r++)
        out[r] = NAME(join_fours)(fours[r][0], fours[r][1], fours[r][2], fours[r][3]);
}

/* Products of at most MOST_ROWS rows with 16 outputs, as float32. Tile `tile` of several fetches its
 * part of `next`, the block behind; a single one, number -1, fetches what comes in its own order. */
TARGET static void NAME(dot)(const struct products *all, const number *matrix, const number *next,
                             int64_t tile, int64_t first, int64_t count, floats *out) {
    const char *rows = (const char *)all->rows + first * all->size * (int64_t)ROW_BYTES;
    const char *part = (const char *)next + tile * STEP_LINES * LINE_BYTES *
                                                (LANES / TOGETHER) * (all->size / CHUNK);
#define SUM(count, lines) NAME(sum_products)(matrix, all->size, rows, count, part, lines, out)
    switch (tile < 0 ? count : count + MOST_ROWS) {
    case 1: SUM(1, 0); break;
    case 2: SUM(2, 0); break;
    case 3: SUM(3, 0); break;
    case 4: SUM(4, 0); break;
    case 5: SUM(5, 0); break;
    case 6: SUM(6, 0); break;
    case 3 + MOST_ROWS: SUM(3, STEP_LINES); break;
    case 4 + MOST_ROWS: SUM(4, STEP_LINES); break;
    case 5 + MOST_ROWS: SUM(5, STEP_LINES); break;
    default: SUM(6, STEP_LINES);
    }
#undef SUM
}

/* Products of rows [from, to) with blocks [start, stop) of outputs. Rows are cut into tiles of nearly
 * equal size, which read a block from the caches while they fetch the next one. */
TARGET static void NAME(multiply_panel)(const struct products *all, int64_t from, int64_t to,
                                        int64_t start, int64_t stop) {
    int64_t rows = to - from, tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t block = start; block < stop; block++) {
        int64_t own_block, size = LANES * all->size;
        const struct weights *own = weights_of(all, block, &own_block);
        const number *matrix = own->matrix + own_block * size, *next = matrix + size;
        if (all->use != GATED && block + 1 < all->blocks) {
            int64_t next_block;
            next = weights_of(all, block + 1, &next_block)->matrix + next_block * size;
        }
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t first = from + rows * tile / tiles, part = tiles == 1 ? -1 : tile;
            int64_t count = from + rows * (tile + 1) / tiles - first;
            floats outs[MOST_ROWS], others[MOST_ROWS] = {{0}};
            NAME(dot)(all, matrix, next, part, first, count, outs);
            if (all->use == GATED) {
                const number *second = own[1].matrix + own_block * size;
                NAME(dot)(all, second, second + size, part, first, count, others);
            }
            for (int64_t r = 0; r < count; r++)
                NAME(use)(all, own, own_block, first + r, outs[r], others[r]);
        }
    }
}

/* Products of all rows with blocks [start, stop) of outputs: of as many rows at a time as stay in the
 * second cache. */
TARGET static void NAME(multiply)(const struct products *all, int64_t start, int64_t stop) {
    int64_t panels = (all->num_rows + PANEL_ROWS - 1) / PANEL_ROWS;
    for (int64_t panel = 0; panel < panels; panel++)
        NAME(multiply_panel)(all, all->num_rows * panel / panels,
                             all->num_rows * (panel + 1) / panels, start, stop);
}
#undef ROW_BYTES
#endif

/* Rows over the root of their mean square, times weights. */
TARGET static void NAME(norm)(const number *rows, const number *weights, float epsilon,
                              int64_t count, int64_t size, number *out) {
    for (int64_t row = 0; row < count; row++, rows += size, out += size) {
        floats squares = {0};
        float sum = 0;
        for (int64_t d = 0; d < size; d += LANES) {
            floats own = NAME(widen)(rows + d);
            squares += own * own;
        }
        for (int i = 0; i < LANES; i++)
            sum += squares[i];
        float factor = 1 / sqrtf(sum / (float)size + epsilon);
        for (int64_t d = 0; d < size; d += LANES)
            NAME(narrow)(NAME(round_each)(NAME(widen)(rows + d) * factor) *
                             NAME(widen)(weights + d),
                         out + d);
    }
}

/* A head of a row turned by its angles. */
TARGET static void NAME(rotate)(const number *own, const number *cosine, const number *sine,
                                int64_t dim, number *out) {
    int64_t half = dim / 2, d = 0;
    for (; d + LANES <= half; d += LANES) {
        floats lower = NAME(widen)(own + d), upper = NAME(widen)(own + d + half);
        NAME(narrow)(NAME(round_each)(lower * NAME(widen)(cosine + d)) +
                         NAME(round_each)(-upper * NAME(widen)(sine + d)),
                     out + d);
        NAME(narrow)(NAME(round_each)(upper * NAME(widen)(cosine + d + half)) +
                         NAME(round_each)(lower * NAME(widen)(sine + d + half)),
                     out + d + half);
    }
    for (; d < half; d++) {
        float lower = from_number(own[d]), upper = from_number(own[d + half]);
        out[d] = to_number(rounded(lower * from_number(cosine[d])) +
                             rounded(-upper * from_number(sine[d])));
        out[d + half] = to_number(rounded(upper * from_number(cosine[d + half])) +
                                    rounded(lower * from_number(sine[d + half])));
    }
}

static const struct kernels NAME(kernels) = {NAME(multiply), NAME(pack), NAME(norm), NAME(rotate)};

#include "vectors_end.h"
