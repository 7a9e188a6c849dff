/* Body of transform_encoding.c for one instruction set; instruction_sets.h includes it. */

#include "vectors.h"

/* Sixteen numbers rounded to integers, half of them to even ones. */
TARGET INLINE floats NAME(rounded)(floats numbers) {
    const floats whole = NAME(broadcast)(8388608.0f); /* 2^23, from which floats are integers */
    ints sign = (ints)numbers & (int32_t)0x80000000u;
    floats size = (floats)((ints)numbers ^ sign);
    floats nearest = NAME(select)(size < whole, (size + whole) - whole, size);
    return (floats)((ints)nearest | sign);
}

/* Bits of sixteen entries, whose `tiers` and `factors` are given; as many as `count` are real. */
TARGET INLINE floats NAME(bits_of_entries)(const struct encoding_tables *tables,
                                           const int32_t *bases, int64_t width, int64_t count,
                                           const float *numbers, ints tiers, floats factors) {
    const floats most = NAME(broadcast)(2147483648.0f);
    const ints last = (ints){0} + (int32_t)(tables->classes - 1);
    floats sums = {0};
    for (int64_t c = 0; c < width; c++) {
        floats column = {0}, costs;
        for (int64_t l = 0; l < count; l++)
            column[l] = numbers[l * width + c];
        ints rows = bases[c] - CLASSES_PER_TIER * tiers;
        rows &= rows >= 0;
        ints beyond = rows > last;
        rows = (last & beyond) | (rows & ~beyond);
        ints raw = rows - (int32_t)tables->first_raw;
        raw = (raw & (raw > 0)) / CLASSES_PER_TIER;
        floats symbols = NAME(rounded)(column * factors);
        ints fits = (symbols > -most) & (symbols < most);
        ints whole = __builtin_convertvector(NAME(select)(fits, symbols, (floats){0}), ints);
        ints codes = (whole >> raw) + MIDDLE;
        fits &= (codes >= 0) & (codes < ESCAPE);
        ints places = rows * NUM_CODES + ((codes & fits) | (ESCAPE & ~fits));
        for (int l = 0; l < LANES; l++)
            costs[l] = tables->costs[places[l]];
        sums += costs;
    }
    return sums;
}

/* Bits of some entries, tiers included. Those of an entry are added in order of components, as on
 * any other processor. */
TARGET static double NAME(coded_bits)(const struct encoding_tables *tables, const int32_t *bases,
                                      int64_t width, int64_t num_rows, const float *numbers,
                                      const int8_t *tiers, const float *factors) {
    double total = 0;
    for (int64_t n = 0; n < num_rows; n += LANES) {
        int64_t count = least(num_rows - n, LANES);
        ints own = {0};
        floats steps = {0};
        for (int64_t l = 0; l < count; l++) {
            own[l] = tiers[n + l];
            steps[l] = factors[tiers[n + l] + LAST_TIER];
        }
        floats bits =
            NAME(bits_of_entries)(tables, bases, width, count, numbers + n * width, own, steps);
        for (int64_t l = 0; l < count; l++) {
            total += own[l] == LAST_TIER || own[l] == -LAST_TIER ? 3 : 2;
            total += bits[l];
        }
    }
    return total;
}

#include "vectors_end.h"
