/* Range coder of transform components: words of a block, and the number of their bits. The coder is
 * described in ops/cpu/range_coder_kernels.py.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "transform_coder.h"

#define NUM_CODES (ESCAPE + 1)

/* Tables to encode by. */
struct encoding_tables {
    const uint16_t *starts; /* [classes + 1, NUM_CODES + 1] */
    const uint16_t *places; /* [classes + 1, NUM_SLOTS]: slots by code, then by rank */
    const float *costs;     /* bits of each code [classes, NUM_CODES] */
    int64_t classes;
    int64_t first_raw;
};

static void push_word(uint32_t *state, uint64_t limit, uint16_t *words, int64_t *count) {
    int64_t is_full = *state >= limit; /* no branch: it would be guessed wrong too often */
    words[*count] = (uint16_t)*state;
    *count += is_full;
    *state >>= 16 * is_full;
}

INLINE void encode_code(const struct encoding_tables *tables, int64_t row, int32_t code,
                        uint32_t *state, uint16_t *words, int64_t *count) {
    const uint16_t *starts = tables->starts + row * (NUM_CODES + 1);
    uint32_t start = starts[code], size = starts[code + 1] - start;
    push_word(state, (uint64_t)size << (32 - SLOT_BITS), words, count);
    uint32_t slot = tables->places[row * NUM_SLOTS + start + *state % size];
    *state = (*state / size << SLOT_BITS) + slot;
}

/* One component of a group of rows, last lane first. */
static void encode_group(const struct encoding_tables *tables, const int32_t *symbols,
                         const int64_t *rows, int64_t lanes, uint32_t *states, uint16_t *words,
                         int64_t *count) {
    int32_t codes[CODER_LANES], extras[CODER_LANES], most = 0;
    for (int64_t l = 0; l < lanes; l++) {
        int32_t raw = raw_bits_of(tables->first_raw, rows[l]);
        const uint16_t *starts = tables->starts + rows[l] * (NUM_CODES + 1);
        codes[l] = (symbols[l] >> raw) + MIDDLE;
        extras[l] = raw;
        if (codes[l] < 0 || codes[l] >= ESCAPE || starts[codes[l]] == starts[codes[l] + 1]) {
            codes[l] = ESCAPE;
            extras[l] = ESCAPED_BITS;
        }
        most = extras[l] > most ? extras[l] : most;
    }
    for (int chunk = 0; chunk * CHUNK_BITS < most; chunk++)
        for (int64_t l = lanes - 1; l >= 0; l--) {
            int32_t size = chunk_size(extras[l], chunk);
            if (!size)
                continue;
            uint32_t rest = (uint32_t)(SLOT_BITS - size), mask = (1u << rest) - 1;
            uint32_t part = (uint32_t)symbols[l] >> (chunk * CHUNK_BITS) & ((1u << size) - 1);
            push_word(states + l, 1ull << (32 - size), words, count);
            states[l] = (states[l] >> rest << SLOT_BITS) + (part << rest) + (states[l] & mask);
        }
    for (int64_t l = lanes - 1; l >= 0; l--)
        encode_code(tables, rows[l], codes[l], states + l, words, count);
}

/* Words of a block in decoding order; returns their number, or -1 if memory is short. */
int64_t larder_encode_components(const struct encoding_tables *tables, const int32_t *bases,
                                 int64_t width, int64_t num_rows, const int32_t *symbols,
                                 const int8_t *tiers, uint16_t *words) {
    /* Rows in order, and their symbols of LANES components, by component. */
    int32_t *order = malloc((size_t)num_rows * (1 + LANES) * sizeof *order + 1);
    if (!order)
        return -1;
    int32_t *columns = order + num_rows;
    int64_t held = 0, count = 0, last = (num_rows - 1) / CODER_LANES * CODER_LANES;
    for (int tier = -LAST_TIER; tier <= LAST_TIER; tier++)
        for (int64_t n = 0; n < num_rows; n++)
            if (tiers[n] == tier)
                order[held++] = (int32_t)n;
    uint32_t states[CODER_LANES];
    for (int l = 0; l < CODER_LANES; l++)
        states[l] = LOWEST;
    for (int64_t c = width - 1; c >= 0; c--) {
        int64_t place = c % LANES;
        if (c == width - 1 || place == LANES - 1)
            for (int64_t n = 0; n < num_rows; n++)
                for (int64_t p = 0; p <= place; p++)
                    columns[p * num_rows + n] = symbols[order[n] * width + c - place + p];
        for (int64_t first = last; first >= 0; first -= CODER_LANES) {
            int64_t lanes = least(CODER_LANES, num_rows - first), rows[CODER_LANES];
            for (int64_t l = 0; l < lanes; l++)
                rows[l] = class_at(tables->classes, bases[c], tiers[order[first + l]]);
            encode_group(tables, columns + place * num_rows + first, rows, lanes, states, words,
                         &count);
        }
    }
    for (int64_t n = num_rows - 1; n >= 0; n--)
        encode_code(tables, tables->classes, tiers[n] + LAST_TIER, states + n % CODER_LANES, words,
                    &count);
    for (int64_t l = least(CODER_LANES, num_rows) - 1; l >= 0; l--) {
        words[count++] = (uint16_t)states[l];
        words[count++] = (uint16_t)(states[l] >> 16);
    }
    for (int64_t i = 0; i < count / 2; i++) {
        uint16_t word = words[i];
        words[i] = words[count - 1 - i];
        words[count - 1 - i] = word;
    }
    free(order);
    return count;
}

typedef double (*bits_function)(const struct encoding_tables *, const int32_t *, int64_t, int64_t,
                                const float *, const int8_t *, const float *);

#define BODY "transform_encoding_body.h"
#include "instruction_sets.h"

static const bits_function bits_forms[] = FORMS(coded_bits);

/* Bits of some entries, tiers included, whose `factors` are 1 over the step of each tier. */
double larder_coded_bits(const struct encoding_tables *tables, const int32_t *bases, int64_t width,
                         int64_t num_rows, const float *numbers, const int8_t *tiers,
                         const float *factors) {
    return bits_forms[larder_instruction_set()](tables, bases, width, num_rows, numbers, tiers,
                                                factors);
}
