/* Bit planes of transform components: bytes of a block, their number, and what they hold. The bytes
 * are described in ops/plane_coder.py.
 */

#include <math.h>
#include <stdlib.h>

#include "plane_coder.h"

#define MOST_SIZES 64 /* magnitudes at which the cost of any code changes */

/* Bits that are written behind each other, lowest first. */
struct bit_writer {
    uint8_t *at;
    int64_t bits; /* of the byte at `at` */
};

static void write_bit(struct bit_writer *writer, int bit) {
    if (!writer->bits)
        *writer->at = 0;
    *writer->at |= (uint8_t)(bit << writer->bits);
    if (++writer->bits == 8) {
        writer->bits = 0;
        writer->at++;
    }
}

/* Bits of the rows that are marked, lowest row first. */
static void write_marked(struct bit_writer *writer, uint64_t bits, uint64_t marked) {
    for (; marked; marked &= marked - 1)
        write_bit(writer, bits >> __builtin_ctzll(marked) & 1);
}

/* What a code costs by counts of magnitudes. */
struct code_cost {
    int32_t planes; /* of a bit of each row */
    int32_t is_sparse;
    int32_t signs; /* index of the least size of a row that takes a sign */
    int32_t beyond; /* index of the least size that the code does not hold */
    int32_t each_beyond;
    int32_t num_levels;
    int32_t levels[MOST_QUOTIENT]; /* indices of the sizes from which a row takes a bit of a level */
};

/* Costs of the codes of groups that are not wide, by counts of rows from some sizes on. */
struct plane_costs {
    uint8_t sizes[MOST_SIZES]; /* the first one is 1 */
    int32_t num_sizes;
    int32_t far; /* index of the least size that is no byte */
    struct code_cost codes[NUM_PLANE_CODES];
};

static int32_t index_of_size(struct plane_costs *costs, int32_t size) {
    int32_t s = 0;
    while (s < costs->num_sizes && costs->sizes[s] != size)
        s++;
    if (s == costs->num_sizes)
        costs->sizes[costs->num_sizes++] = (uint8_t)size;
    return s;
}

static void find_costs(struct plane_costs *costs) {
    costs->num_sizes = 0;
    index_of_size(costs, 1);
    costs->far = index_of_size(costs, MOST_NEAR + 1);
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        struct plane_code code = plane_codes[0][k];
        struct code_cost *cost = costs->codes + k;
        int is_signed = code.kind == SIGNED_PLANES;
        int32_t first = is_signed ? first_level(code) : 1 << code.raw;
        cost->planes = fixed_planes(code);
        cost->is_sparse = code.kind == SPARSE_LEVELS;
        cost->signs = index_of_size(costs, is_signed ? first : 1);
        cost->beyond = index_of_size(costs, (int32_t)most_of(code) + 1);
        cost->num_levels = code.most > 0 ? code.most - 1 : 0;
        for (int j = 0; j < cost->num_levels; j++)
            cost->levels[j] = index_of_size(costs, is_signed ? first + j : (j + 1) << code.raw);
        /* A row beyond takes no sign and no level. */
        cost->each_beyond = 8 * NEAR_BYTES - 1 - cost->num_levels;
    }
}

INLINE uint32_t magnitude_of(int32_t symbol) {
    return symbol < 0 ? 0u - (uint32_t)symbol : (uint32_t)symbol;
}

/* Rows of a group in planes: those of `symbols`, of which `code` does not hold all. */
struct row_planes {
    uint64_t raws[MOST_RAW];
    uint64_t levels[MOST_QUOTIENT];
    uint64_t signs; /* of rows that are turned to their opposites when they are read */
    uint64_t held; /* that take a sign */
    uint64_t bytes; /* with a number that is not 0, whether the code holds it or not */
};

static void split_planes(const int32_t *symbols, int64_t rows, struct plane_code code,
                         struct row_planes *planes) {
    memset(planes, 0, sizeof *planes);
    for (int64_t n = 0; n < rows; n++) {
        uint32_t size = magnitude_of(symbols[n]);
        planes->bytes |= (uint64_t)(size > 0) << n / 8;
        if (!size || size > most_of(code))
            continue;
        uint64_t row = 1ull << n;
        int is_signed = code.kind == SIGNED_PLANES;
        int32_t quotient = is_signed ? (int32_t)size - first_level(code) + 1
                                     : (int32_t)(size >> code.raw);
        uint32_t raw = !is_signed ? size : quotient > 0 ? 1u << (code.raw - 1) : (uint32_t)symbols[n];
        for (int b = 0; b < code.raw; b++)
            planes->raws[b] |= raw >> b & 1 ? row : 0;
        for (int j = 0; j < code.most && j < quotient; j++)
            planes->levels[j] |= row;
        if (is_signed && quotient <= 0)
            continue;
        planes->held |= row;
        planes->signs |= (symbols[n] < 0) != is_signed ? row : 0;
    }
}

typedef void (*choose_function)(const uint8_t *, int64_t, const struct plane_costs *, uint8_t *,
                                uint16_t *);
typedef void (*measure_function)(const float *, int64_t, float, uint8_t *);

#define BODY "plane_counting_body.h"
#include "instruction_sets.h"

static const choose_function choose_forms[] = FORMS(choose_codes);
static const measure_function measure_forms[] = FORMS(measure_row);

/* Codes of a component of a wide group with the fewest bits, and these bits. */
static int64_t choose_wide(const int32_t *symbols, int64_t rows, uint8_t *chosen) {
    int64_t fewest = INT64_MAX;
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        struct plane_code code = plane_codes[1][k];
        int64_t bits = 8 * bytes_of_plane(rows) * fixed_planes(code);
        uint64_t most = most_of(code);
        for (int64_t n = 0; n < rows; n++) {
            uint64_t size = magnitude_of(symbols[n]);
            if (size > most)
                bits += 8 * (size > MOST_NEAR ? FAR_BYTES : NEAR_BYTES);
            else
                bits += least((int64_t)(size >> code.raw), code.most - 1) + (size > 0);
        }
        if (bits < fewest) {
            fewest = bits;
            *chosen = (uint8_t)k;
        }
    }
    return fewest;
}

/* Group of rows that is coded: its symbols by component. */
struct group_symbols {
    int64_t rows;
    int64_t width;
    int32_t *symbols; /* [width, PLANE_ROWS] */
    uint8_t *sizes;   /* [width / PLANE_ROWS, rows, PLANE_ROWS], rounded up */
    uint8_t *codes;   /* [width], rounded up to PLANE_ROWS */
    uint16_t *bits;
};

/* Whether a group of symbols is wide; its codes are chosen. */
static int choose_group(const struct plane_costs *costs, struct group_symbols *group) {
    int64_t far = 0;
    for (int64_t c = 0; c < group->width; c += PLANE_ROWS)
        for (int64_t n = 0; n < group->rows; n++) {
            uint8_t *sizes = group->sizes + c * group->rows + n * PLANE_ROWS;
            for (int64_t i = 0; i < PLANE_ROWS; i++) {
                int64_t at = c + i;
                uint32_t size =
                    at < group->width ? magnitude_of(group->symbols[at * PLANE_ROWS + n]) : 0;
                sizes[i] = (uint8_t)(size < 255 ? size : 255);
                far += size > MOST_NEAR;
            }
        }
    int is_wide = far > MOST_FAR;
    for (int64_t c = 0; c < group->width && !is_wide; c += PLANE_ROWS)
        choose_forms[larder_instruction_set()](group->sizes + c * group->rows, group->rows, costs,
                                               group->codes + c, group->bits + c);
    for (int64_t c = 0; c < group->width && is_wide; c++)
        choose_wide(group->symbols + c * PLANE_ROWS, group->rows, group->codes + c);
    return is_wide;
}

/* Numbers that their codes do not hold, in order of components and rows: bytes or all others. */
static uint8_t *list_beyond(const struct group_symbols *group, int is_wide, int is_far,
                            uint8_t *at) {
    for (int64_t c = 0; c < group->width; c++)
        for (int64_t n = 0; n < group->rows; n++) {
            int32_t symbol = group->symbols[c * PLANE_ROWS + n];
            uint32_t size = magnitude_of(symbol);
            if (size <= most_of(plane_codes[is_wide][group->codes[c]]) ||
                (size > MOST_NEAR) != is_far)
                continue;
            uint16_t place = (uint16_t)(c << ROW_BITS | n);
            memcpy(at, &place, sizeof place);
            if (is_far)
                memcpy(at + sizeof place, &symbol, sizeof symbol);
            else
                at[sizeof place] = (uint8_t)symbol;
            at += is_far ? FAR_BYTES : NEAR_BYTES;
        }
    return at;
}

/* Levels and signs of the components of a tile. */
static void write_levels(struct bit_writer *writer, const struct row_planes *planes, int held,
                         int64_t rows, struct plane_code code) {
    for (int t = 0; code.kind == SPARSE_LEVELS && t < held; t++)
        write_marked(writer, planes[t].bytes, 0xFF);
    for (int t = 0; code.kind == SPARSE_LEVELS && t < held; t++)
        write_marked(writer, planes[t].levels[0], rows_of_bytes(planes[t].bytes) & rows_of(rows));
    for (int j = 1; j < code.most; j++)
        for (int t = 0; t < held; t++)
            write_marked(writer, planes[t].levels[j], planes[t].levels[j - 1]);
    for (int t = 0; t < held; t++)
        write_marked(writer, planes[t].signs, planes[t].held);
}

/* Planes of all components, behind the lists of a group. */
static uint8_t *write_planes(const struct group_symbols *group, int is_wide, uint8_t *at) {
    int64_t plane = bytes_of_plane(group->rows), num_planes = 0;
    for (int64_t c = 0; c < group->width; c++)
        num_planes += fixed_planes(plane_codes[is_wide][group->codes[c]]);
    struct bit_writer writer = {at + num_planes * plane, 0};
    for (int k = 0; k < NUM_PLANE_CODES; k++) {
        struct plane_code code = plane_codes[is_wide][k];
        int64_t from = 0, tile[PLANE_TILE];
        for (int held; (held = next_tile(group->codes, group->width, k, &from, tile));) {
            struct row_planes planes[PLANE_TILE];
            for (int t = 0; t < held; t++) {
                split_planes(group->symbols + tile[t] * PLANE_ROWS, group->rows, code, planes + t);
                for (int b = 0; b < code.raw; b++, at += plane)
                    memcpy(at, planes[t].raws + b, (size_t)plane);
                if (fixed_planes(code) > code.raw) {
                    memcpy(at, planes[t].levels, (size_t)plane);
                    at += plane;
                }
            }
            write_levels(&writer, planes, held, group->rows, code);
        }
    }
    return writer.at + (writer.bits > 0);
}

static uint8_t *write_group(const struct plane_costs *costs, struct group_symbols *group,
                            uint8_t *bytes) {
    int is_wide = choose_group(costs, group);
    int64_t width = group->width;
    uint8_t *codes = bytes + GROUP_HEAD, *at = codes + (width + 1) / 2;
    memset(codes, 0, (size_t)((width + 1) / 2));
    for (int64_t c = 0; c < width; c++)
        codes[c / 2] |= (uint8_t)(group->codes[c] << (c & 1) * 4);
    uint8_t *nears = at, *fars = list_beyond(group, is_wide, 0, nears);
    at = list_beyond(group, is_wide, 1, fars);
    uint16_t counts[2] = {(uint16_t)((fars - nears) / NEAR_BYTES),
                          (uint16_t)((at - fars) / FAR_BYTES)};
    at = write_planes(group, is_wide, at);
    uint32_t size = (uint32_t)(at - bytes) | (is_wide ? WIDE_GROUP : 0);
    memcpy(bytes, &size, sizeof size);
    memcpy(bytes + sizeof size, counts, sizeof counts);
    return at;
}

/* Tiers in order of entries, as planes. */
static uint8_t *write_tiers(const int8_t *tiers, int64_t count, uint8_t *at) {
    for (int64_t first = 0; first < count; first += PLANE_ROWS) {
        int64_t rows = least(count - first, PLANE_ROWS);
        for (int p = 0; p < TIER_PLANES; p++, at += bytes_of_plane(rows)) {
            uint64_t plane = 0;
            for (int64_t n = 0; n < rows; n++)
                plane |= (uint64_t)((tiers[first + n] + LAST_TIER) >> p & 1) << n;
            memcpy(at, &plane, (size_t)bytes_of_plane(rows));
        }
    }
    return at;
}

/* Entries in order of tiers. */
static void rows_by_tier(const int8_t *tiers, int64_t count, int32_t *order) {
    int64_t held = 0;
    for (int tier = -LAST_TIER; tier <= LAST_TIER; tier++)
        for (int64_t n = 0; n < count; n++)
            if (tiers[n] == tier)
                order[held++] = (int32_t)n;
}

static char *allocate_group(struct group_symbols *group, int64_t width, int64_t count,
                            int32_t **order) {
    int64_t padded = (width + PLANE_ROWS - 1) / PLANE_ROWS * PLANE_ROWS;
    size_t symbols = (size_t)(padded * PLANE_ROWS) * sizeof(int32_t);
    size_t rows = (size_t)count * sizeof **order, sizes = (size_t)(padded * PLANE_ROWS);
    char *memory = malloc(symbols + rows + sizes + (size_t)padded * 3);
    if (!memory)
        return NULL;
    *order = (int32_t *)(memory + symbols);
    *group = (struct group_symbols){
        .width = width,
        .symbols = (int32_t *)memory,
        .bits = (uint16_t *)(memory + symbols + rows),
        .sizes = (uint8_t *)(memory + symbols + rows + (size_t)padded * 2),
        .codes = (uint8_t *)(memory + symbols + rows + (size_t)padded * 2 + sizes),
    };
    return memory;
}

/* Bytes of a block of entries; returns their number, or -1 if memory is short. */
int64_t larder_encode_planes(int64_t width, int64_t count, const int32_t *symbols,
                             const int8_t *tiers, uint8_t *bytes) {
    struct plane_costs costs;
    struct group_symbols group;
    int32_t *order;
    char *memory = allocate_group(&group, width, count, &order);
    if (!memory)
        return -1;
    find_costs(&costs);
    rows_by_tier(tiers, count, order);
    uint8_t *at = write_tiers(tiers, count, bytes);
    for (int64_t first = 0; first < count; first += PLANE_ROWS) {
        group.rows = least(count - first, PLANE_ROWS);
        for (int64_t n = 0; n < group.rows; n++)
            for (int64_t c = 0; c < width; c++)
                group.symbols[c * PLANE_ROWS + n] = symbols[order[first + n] * width + c];
        at = write_group(&costs, &group, at);
    }
    free(memory);
    return at - bytes;
}

/* Bytes of a group of wide rows, rounded up. */
static int64_t wide_bytes(const struct group_symbols *group) {
    int64_t bits = 0;
    uint8_t code;
    for (int64_t c = 0; c < group->width; c++)
        bits += choose_wide(group->symbols + c * PLANE_ROWS, group->rows, &code);
    return (bits + 7) / 8;
}

/* Bytes of components of a group, whose `factors` are 1 over the step of each tier. */
static int64_t count_group(const struct plane_costs *costs, struct group_symbols *group,
                           const float *numbers, const int8_t *tiers, const int32_t *order,
                           const float *factors) {
    int64_t width = group->width, far = 0, bits = 0;
    enum instruction_set set = larder_instruction_set();
    for (int64_t c = 0; c < width; c += PLANE_ROWS) {
        uint8_t *sizes = group->sizes + c * group->rows;
        for (int64_t n = 0; n < group->rows; n++) {
            int64_t held = least(width - c, PLANE_ROWS);
            measure_forms[set](numbers + order[n] * width + c, held,
                               factors[tiers[order[n]] + LAST_TIER], sizes + n * PLANE_ROWS);
            memset(sizes + n * PLANE_ROWS + held, 0, (size_t)(PLANE_ROWS - held));
        }
        for (int64_t i = 0; i < group->rows * PLANE_ROWS; i++)
            far += sizes[i] > MOST_NEAR;
    }
    if (far <= MOST_FAR) {
        for (int64_t c = 0; c < width; c += PLANE_ROWS) {
            choose_forms[set](group->sizes + c * group->rows, group->rows, costs, group->codes + c,
                              group->bits + c);
            for (int64_t i = 0; i < PLANE_ROWS; i++)
                bits += group->bits[c + i];
        }
        return (bits + 7) / 8;
    }
    for (int64_t n = 0; n < group->rows; n++)
        for (int64_t c = 0; c < width; c++) {
            float symbol = rintf(numbers[order[n] * width + c] *
                                 factors[tiers[order[n]] + LAST_TIER]);
            symbol = fmaxf(fminf(symbol, 2147483520.0f), -2147483520.0f);
            group->symbols[c * PLANE_ROWS + n] = (int32_t)symbol;
        }
    return wide_bytes(group);
}

/* Bytes of some entries, or -1 if memory is short. */
int64_t larder_count_planes(int64_t width, int64_t count, const float *numbers, const int8_t *tiers,
                            const float *factors) {
    struct plane_costs costs;
    struct group_symbols group;
    int32_t *order;
    char *memory = allocate_group(&group, width, count, &order);
    if (!memory)
        return -1;
    find_costs(&costs);
    rows_by_tier(tiers, count, order);
    int64_t bytes = 0;
    for (int64_t first = 0; first < count; first += PLANE_ROWS) {
        group.rows = least(count - first, PLANE_ROWS);
        bytes += TIER_PLANES * bytes_of_plane(group.rows) + GROUP_HEAD + (width + 1) / 2;
        bytes += count_group(&costs, &group, numbers, tiers, order + first, factors);
    }
    free(memory);
    return bytes;
}
