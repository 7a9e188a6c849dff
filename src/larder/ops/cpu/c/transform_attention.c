/* Attention of a decode step to entries that are held as coded transform components.
 *
 * Each block of a head is decoded by one thread, attended to, and forgotten: keys are turned back
 * and rotated, components of values are averaged as they are, and the average alone is turned back.
 * The coders are described in ops/cpu/range_coder_kernels.py and ops/plane_coder.py. Blocks are
 * merged by log-sum-exp in order, so that the number of threads changes no result.
 */

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "matrix_units.h"
#include "plane_decoding.h"
#include "transform_attention.h"
#include "transform_coder.h"

#define MOST_GROUPS 64 /* of lanes that are decoded as vectors: 2,048 entries of a block */
#define EXACT_BF16 256.0f /* integers up to here are bfloat16 numbers */
#define MOST_BYTE 127.0f
#define MOST_FARS 512 /* symbols of sixteen rows that are no bytes; with more, all are float32 */
#define MOST_WEIGHT 65535.0f /* of two bytes */
#define LOWER_BITS 8 /* of an element of a matrix of bytes */
#define NUM_SIDES 2
#define MOST_PAIRS 128 /* of components of a head */
#define MOST_QUERIES 16 /* of a kv head */
#define TOGETHER 2 /* blocks that a thread decodes at once */
#define ALL_LANES 0xFFFFFFFFu

/* `_mm512_dpbusd_epi32` in place: GCC 12 moves the sums of a loop from register to register. */
#define ADD_PRODUCTS(sums, bytes, numbers)                                                         \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(bytes), "v"(numbers))

/* Small numbers of a table as bytes, of which a vector holds all. */
struct alias_bytes {
    uint8_t dividers[BUCKETS];
    uint8_t codes[2][BUCKETS];
};

struct decoding_tables {
    const struct alias_table *rows;
    const struct alias_bytes *bytes; /* of each row */
    int64_t classes;
    int64_t first_raw;
};

/* What a thread needs for a block; `room` entries, a multiple of CODER_LANES. */
struct transform_scratch {
    int64_t room;
    float *symbols; /* [width, room] */
    uint32_t *pairs; /* symbols of sixteen keys in pairs or fours [dim / 2, LANES] */
    float *keys; /* [LANES, head_dim] */
    float *logits; /* [num_queries, room] */
    float *scales; /* of each entry [room] */
    int32_t *tiers;     /* of each entry by position, as all that follows of rows by tier */
    int32_t *order;     /* place by position of each row */
    int32_t *positions; /* by row, then by place [2, room] */
    /* Of bit planes alone: */
    int8_t *bytes;    /* symbols of groups of rows [room / PLANE_ROWS, width, PLANE_ROWS] */
    int32_t *wide;    /* those of a group [width, PLANE_ROWS] */
    uint32_t *fours;  /* keys of a group [dim / 4, PLANE_ROWS] */
    uint8_t *copy;    /* planes of a group */
    uint8_t *weights; /* of entries, lower and upper bytes [2, room] */
    struct far_symbol *fars; /* that are no bytes, of sixteen rows each [room / LANES, MOST_FARS] */
    int32_t *num_fars;       /* [room / LANES] */
};

static const uint16_t plane_places[PLANE_ROWS] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* Symbol of one of sixteen rows that is no byte. */
struct far_symbol {
    uint16_t row;
    uint16_t component;
    int32_t symbol;
};

struct word_stream {
    const uint8_t *at; /* of 16 bits each, not aligned */
    int64_t left;
};

INLINE uint32_t next_word(struct word_stream *stream) {
    uint16_t word = 0;
    if (stream->left > 0)
        memcpy(&word, stream->at, sizeof word);
    stream->at += sizeof word;
    stream->left--;
    return word;
}

INLINE void pull_word(uint32_t *state, struct word_stream *stream) {
    if (*state < LOWEST)
        *state = *state << 16 | next_word(stream);
}

/* Raw bits behind the codes of a group of lanes, the highest chunk first. */
static void decode_raw(uint32_t *states, const int32_t *extras, int32_t *symbols, int64_t count,
                       struct word_stream *stream) {
    int32_t most = 0;
    for (int64_t l = 0; l < count; l++)
        most = extras[l] > most ? extras[l] : most;
    for (int32_t chunk = (most - 1) / CHUNK_BITS; most > 0 && chunk >= 0; chunk--)
        for (int64_t l = 0; l < count; l++) {
            int32_t size = chunk_size(extras[l], chunk);
            if (!size)
                continue;
            uint32_t slot = states[l] & (NUM_SLOTS - 1), rest = SLOT_BITS - (uint32_t)size;
            symbols[l] = (int32_t)((uint32_t)symbols[l] << size | slot >> rest);
            states[l] = (states[l] >> SLOT_BITS << rest) + (slot & ((1u << rest) - 1));
            pull_word(states + l, stream);
        }
}

/* Code of a state in a table, with the state behind it. */
INLINE int32_t decode_code(const struct alias_table *table, uint32_t *state,
                           struct word_stream *stream) {
    uint32_t slot = *state & (NUM_SLOTS - 1), bucket = slot >> BUCKET_BITS;
    int side = (slot & ((1u << BUCKET_BITS) - 1)) >= table->dividers[bucket];
    uint32_t rank = (slot + table->shifts[side][bucket]) & 0xFFFF;
    *state = table->sizes[side][bucket] * (*state >> SLOT_BITS) + rank;
    pull_word(state, stream);
    return table->codes[side][bucket];
}

/* Symbols of one component of a group of rows. */
INLINE void decode_group(const struct decoding_tables *tables, int32_t base, const int32_t *tiers,
                         const int32_t *order, int64_t count, uint32_t *states,
                         struct word_stream *stream, float *into) {
    int32_t symbols[CODER_LANES], extras[CODER_LANES], has_raw = 0;
    for (int64_t l = 0; l < count; l++) {
        int64_t row = class_at(tables->classes, base, tiers[order[l]]);
        int32_t code = decode_code(tables->rows + row, states + l, stream);
        symbols[l] = code == ESCAPE ? 0 : code - MIDDLE;
        extras[l] = code == ESCAPE ? ESCAPED_BITS : raw_bits_of(tables->first_raw, row);
        has_raw |= extras[l];
    }
    if (has_raw)
        decode_raw(states, extras, symbols, count, stream);
    for (int64_t l = 0; l < count; l++)
        into[l] = (float)symbols[l];
}

/* Rows of a block: its entries in order of tiers. */
static void order_by_tier(const struct transform_scratch *scratch, int64_t count) {
    int64_t firsts[NUM_TIERS + 1] = {0};
    for (int64_t n = 0; n < count; n++)
        firsts[scratch->tiers[n] + LAST_TIER + 1]++;
    for (int tier = 1; tier < NUM_TIERS; tier++)
        firsts[tier] += firsts[tier - 1];
    for (int64_t n = 0; n < count; n++)
        scratch->order[firsts[scratch->tiers[n] + LAST_TIER]++] = (int32_t)n;
}

/* Positions of the entries of a block. */
static void read_positions(const struct transform_block *block, const uint8_t *bytes,
                           int32_t *positions) {
    if (!block->span) {
        memcpy(positions, bytes, (size_t)block->count * sizeof *positions);
        return;
    }
    int64_t held = 0;
    for (int64_t at = 0; at < (block->span + 7) / 8; at++)
        for (uint32_t bits = bytes[at]; bits && held < block->count; held++) {
            int place = __builtin_clz(bits) - 24; /* the highest bit comes first */
            positions[held] = (int32_t)(block->first + 8 * at + place);
            bits &= ~(0x80u >> place);
        }
}

typedef void (*decode_function)(const struct decoding_tables *, const int32_t *, int64_t, int64_t,
                                const uint8_t *, int64_t, const struct transform_scratch *);
typedef void (*decode_planes_function)(int64_t, int64_t, const uint8_t *, int64_t,
                                       const struct transform_scratch *);
typedef void (*attend_function)(const struct transform_attention *, const struct decoding_tables *,
                                const struct transform_block *, int,
                                const struct transform_scratch *, float *, float *, float *);

#define BODY "transform_attention_body.h"
#define WITH_DOT_PRODUCT
#include "instruction_sets.h"

static const decode_function decode_forms[] = FORMS(decode_block);
static const attend_function attend_forms[] = FORMS(attend_blocks);
static const decode_planes_function decode_planes_forms[] = FORMS(decode_plane_block);

/* Size of the bytes of all tables, a multiple of a cache line. */
static size_t table_bytes(const struct code_tables *tables) {
    return (size_t)(tables->classes + 1) * sizeof(struct alias_bytes);
}

/* Tables with their bytes, which take the microsecond of copying some KB at each call. */
static struct decoding_tables with_bytes(const struct code_tables *tables, char *memory) {
    struct alias_bytes *bytes = (struct alias_bytes *)memory;
    for (int64_t row = 0; row <= tables->classes; row++)
        for (int b = 0; b < BUCKETS; b++) {
            bytes[row].dividers[b] = (uint8_t)tables->rows[row].dividers[b];
            for (int k = 0; k < 2; k++)
                bytes[row].codes[k][b] = (uint8_t)tables->rows[row].codes[k][b];
        }
    return (struct decoding_tables){tables->rows, bytes, tables->classes, tables->first_raw};
}

/* Bytes of a scratch, whose parts begin on cache lines; `memory` may be NULL to count them. */
static size_t lay_out(struct transform_scratch *scratch, char *memory, int64_t entries,
                      int64_t width, int64_t queries, enum component_coder coder) {
    int64_t lanes = coder == BIT_PLANES ? PLANE_ROWS : CODER_LANES;
    int64_t room = (entries + lanes - 1) / lanes * lanes, dim = width / NUM_SIDES;
    int64_t group = coder == BIT_PLANES ? width * PLANE_ROWS : 0; /* symbols */
    int64_t copied = coder == BIT_PLANES ? MOST_PLANE_BYTES(width) / 4 : 0;
    int64_t sizes[] = {width * room, dim / 2 * LANES, LANES * dim, queries * room, room, room, room,
                       2 * room, group ? width * room / 4 : 0, group, group / 8, copied, room,
                       group ? room / LANES * MOST_FARS * 2 : 0, room / LANES};
    char *parts[sizeof sizes / sizeof *sizes];
    size_t bytes = 0;
    for (size_t p = 0; p < sizeof sizes / sizeof *sizes; p++) {
        parts[p] = memory ? memory + bytes : NULL;
        bytes += ((size_t)sizes[p] * sizeof(float) + 63) / 64 * 64;
    }
    *scratch = (struct transform_scratch){
        room,
        (float *)parts[0],
        (uint32_t *)parts[1],
        (float *)parts[2],
        (float *)parts[3],
        (float *)parts[4],
        (int32_t *)parts[5],
        (int32_t *)parts[6],
        (int32_t *)parts[7],
        (int8_t *)parts[8],
        (int32_t *)parts[9],
        (uint32_t *)parts[10],
        (uint8_t *)parts[11],
        (uint8_t *)parts[12],
        (struct far_symbol *)parts[13],
        (int32_t *)parts[14],
    };
    return bytes;
}

struct block_tasks {
    const struct transform_attention *call;
    struct decoding_tables tables;
    float *outs; /* [num_blocks, num_queries, head_dim] */
    float *peaks;
    float *masses;
    char *memory;
    size_t memory_bytes; /* of one block */
    int64_t longest;
    int next; /* block that no thread has taken */
    int next_thread;
};

static void attend_as_thread(void *given) {
    struct block_tasks *tasks = given;
    const struct transform_attention *call = tasks->call;
    attend_function attend = attend_forms[larder_instruction_set()];
    int thread = __atomic_fetch_add(&tasks->next_thread, 1, __ATOMIC_RELAXED);
    char *memory = tasks->memory + (size_t)thread * TOGETHER * tasks->memory_bytes;
    struct transform_scratch scratches[TOGETHER];
    for (int b = 0; b < TOGETHER; b++)
        lay_out(scratches + b, memory + (size_t)b * tasks->memory_bytes, tasks->longest,
                NUM_SIDES * call->head_dim, call->num_queries, (enum component_coder)call->coder);
    int64_t rows = call->num_queries;
    for (int64_t b; (b = __atomic_fetch_add(&tasks->next, TOGETHER, __ATOMIC_RELAXED)) <
                    call->num_blocks;)
        attend(call, &tasks->tables, call->blocks + b,
               (int)least(TOGETHER, call->num_blocks - b), scratches,
               tasks->outs + b * rows * call->head_dim, tasks->peaks + b * rows,
               tasks->masses + b * rows);
}

/* Merge the blocks [first, last) of a head for one query, and turn the average back. */
static void merge_head(const struct block_tasks *tasks, int64_t row, int64_t query, int64_t first,
                       int64_t last, float *average) {
    const struct transform_attention *call = tasks->call;
    int64_t rows = call->num_queries, dim = call->head_dim, side = call->kv_heads + row / rows;
    float *out = call->outs + row * dim, peak = -INFINITY, mass = 0, share = 0;
    float other = call->other_lses ? call->other_lses[row] : -INFINITY;
    memset(average, 0, (size_t)dim * sizeof *average);
    memset(out, 0, (size_t)dim * sizeof *out);
    for (int64_t b = first; b < last; b++)
        peak = fmaxf(peak, tasks->peaks[b * rows + query]);
    for (int64_t b = first; b < last; b++) {
        float own = expf(tasks->peaks[b * rows + query] - peak);
        mass += own * tasks->masses[b * rows + query];
        for (int64_t c = 0; c < dim; c++)
            average[c] += own * tasks->outs[(b * rows + query) * dim + c];
    }
    float lse = last > first ? peak + logf(mass) : -INFINITY, whole = fmaxf(lse, other);
    if (whole > -INFINITY) {
        share = expf(lse - whole) / (expf(lse - whole) + expf(other - whole));
        whole += logf(expf(lse - whole) + expf(other - whole));
    }
    call->lses[row] = whole;
    for (int64_t c = 0; last > first && c < dim; c++) {
        float weight = share * average[c] / mass;
        for (int64_t d = 0; d < dim; d++)
            out[d] += weight * call->inverse[(side * dim + c) * dim + d];
    }
    for (int64_t d = 0; last > first && d < dim; d++)
        out[d] += share * call->means[side * dim + d];
    for (int64_t d = 0; other > -INFINITY && d < dim; d++)
        out[d] += (1 - share) * call->other_outs[row * dim + d];
}

/* A head without entries gives 0 and -inf. */
static void merge_blocks(const struct block_tasks *tasks, float *average) {
    const struct transform_attention *call = tasks->call;
    int64_t rows = call->num_queries, b = 0;
    for (int64_t head = 0; head < call->kv_heads; head++) {
        int64_t first = b;
        while (b < call->num_blocks && call->blocks[b].head == head)
            b++;
        for (int64_t query = 0; query < rows; query++)
            merge_head(tasks, head * rows + query, query, first, b, average);
    }
}

/* Returns 0, or 1 if memory is short. */
int larder_transform_attention(const struct transform_attention *call) {
    int64_t rows = call->num_queries, dim = call->head_dim;
    struct block_tasks tasks = {.call = call};
    for (int64_t b = 0; b < call->num_blocks; b++)
        tasks.longest = call->blocks[b].count > tasks.longest ? call->blocks[b].count : tasks.longest;
    int64_t threads = least(call->threads, (call->num_blocks + TOGETHER - 1) / TOGETHER);
    threads = threads < 1 ? 1 : threads;
    struct transform_scratch scratch;
    tasks.memory_bytes = lay_out(&scratch, NULL, tasks.longest, NUM_SIDES * dim, rows,
                                 (enum component_coder)call->coder);
    size_t sums = (size_t)(call->num_blocks * rows * (dim + 2) + dim) * sizeof(float);
    size_t decoded = (size_t)threads * TOGETHER * tasks.memory_bytes;
    size_t bytes = decoded + table_bytes(&call->tables) + sums;
    tasks.memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!tasks.memory)
        return 1;
    tasks.tables = with_bytes(&call->tables, tasks.memory + decoded);
    tasks.outs = (float *)(tasks.memory + decoded + table_bytes(&call->tables));
    tasks.peaks = tasks.outs + call->num_blocks * rows * dim;
    tasks.masses = tasks.peaks + call->num_blocks * rows;
    larder_parallel(attend_as_thread, &tasks, (int)threads);
    merge_blocks(&tasks, tasks.masses + call->num_blocks * rows);
    free(tasks.memory);
    return 0;
}

/* Merge attention to the coded entries of sequences into that to their others; `threads` at once.
 *
 * coded: of each of `count` sequences with `kv_heads` heads of the call, NULL where it has none.
 * Returns 0, or 1 if memory is short. */
int larder_attend_coded(const struct transform_attention *const *coded, int64_t count,
                        const struct attention *call, int64_t threads) {
    int64_t lses = call->kv_heads * call->num_queries, wide = lses * call->head_dim;
    float *queries = malloc((size_t)(2 * wide + lses) * sizeof *queries);
    int failed = !queries;
    for (int64_t n = 0; n < count && !failed; n++) {
        if (!coded[n])
            continue;
        struct transform_attention own = *coded[n];
        for (int64_t d = 0; d < wide; d++)
            queries[d] = call->queries[n * wide + d] * call->scaling;
        own.queries = queries;
        own.other_outs = call->outs + n * wide;
        own.other_lses = call->lses + n * lses;
        own.outs = queries + wide;
        own.lses = queries + 2 * wide;
        own.num_queries = call->num_queries;
        own.threads = threads;
        failed = larder_transform_attention(&own);
        memcpy(call->outs + n * wide, own.outs, (size_t)wide * sizeof(float));
        memcpy(call->lses + n * lses, own.lses, (size_t)lses * sizeof(float));
    }
    free(queries);
    return failed;
}

/* Components [count, width] and tiers of a block that is decoded. */
static void scale_components(const struct transform_scratch *scratch, int64_t width, int64_t count,
                             double step, float *components, int8_t *tiers) {
    for (int64_t row = 0; row < count; row++) {
        int64_t n = scratch->order[row];
        float scale = (float)(step * exp2((double)scratch->tiers[n]));
        tiers[n] = (int8_t)scratch->tiers[n];
        for (int64_t c = 0; c < width; c++)
            components[n * width + c] = scratch->symbols[c * scratch->room + row] * scale;
    }
}

/* Dequantized components [count, width] and tiers of one block; returns 1 if memory is short. */
int larder_decode_components(const struct code_tables *tables, const int32_t *bases, int64_t width,
                             int64_t count, const uint8_t *words, int64_t bytes, double step,
                             float *components, int8_t *tiers) {
    struct transform_scratch scratch;
    size_t size = lay_out(&scratch, NULL, count, width, 1, RANGE_CODER);
    char *memory = aligned_alloc(64, size + table_bytes(tables));
    if (!memory)
        return 1;
    lay_out(&scratch, memory, count, width, 1, RANGE_CODER);
    struct decoding_tables own = with_bytes(tables, memory + size);
    decode_forms[larder_instruction_set()](&own, bases, width, count, words, bytes, &scratch);
    scale_components(&scratch, width, count, step, components, tiers);
    free(memory);
    return 0;
}

/* The same of a block of bit planes. */
int larder_decode_planes(int64_t width, int64_t count, const uint8_t *bytes, int64_t num_bytes,
                         double step, float *components, int8_t *tiers) {
    struct transform_scratch scratch;
    size_t size = lay_out(&scratch, NULL, count, width, 1, BIT_PLANES);
    char *memory = aligned_alloc(64, size);
    if (!memory)
        return 1;
    lay_out(&scratch, memory, count, width, 1, BIT_PLANES);
    decode_planes_forms[larder_instruction_set()](width, count, bytes, num_bytes, &scratch);
    scale_components(&scratch, width, count, step, components, tiers);
    free(memory);
    return 0;
}

/* Whether the bytes of a block of bit planes are those of its entries; -1 if memory is short. */
int larder_planes_are_whole(int64_t width, int64_t count, const uint8_t *bytes, int64_t num_bytes) {
    int32_t *symbols = malloc((size_t)(width * PLANE_ROWS + count) * sizeof *symbols);
    if (!symbols)
        return -1;
    int is_whole = planes_are_whole(width, count, bytes, bytes + num_bytes, symbols,
                                    symbols + width * PLANE_ROWS);
    free(symbols);
    return is_whole;
}

/* Entries of blocks of `count` entries each that are to be decoded. */
struct block_rows {
    struct code_tables tables;
    const int32_t *bases;          /* class of each component in tier 0 [heads, width] */
    const int64_t *heads;          /* of each block: row of `bases` */
    const int64_t *starts, *sizes; /* of each block in the payload, in bytes */
    const uint8_t *payload;
    const int64_t *places; /* [rows]: entry e of block b is at b * count + e */
    float *components;     /* [rows, read] */
    int64_t width, read;   /* components of an entry, and how many are decoded */
    int64_t count, blocks, rows, coder;
    double step;
};

/* Decode a block into scratch memory. The range coder reads no component behind the last one. */
static void decode_block_of(const struct block_rows *call, const struct decoding_tables *tables,
                            int64_t block, const struct transform_scratch *scratch) {
    const uint8_t *bytes = call->payload + call->starts[block];
    enum instruction_set set = larder_instruction_set();
    if (call->coder == BIT_PLANES)
        decode_planes_forms[set](call->width, call->count, bytes, call->sizes[block], scratch);
    else
        decode_forms[set](tables, call->bases + call->heads[block] * call->width, call->read,
                          call->count, bytes, call->sizes[block], scratch);
    for (int64_t row = 0; row < call->count; row++)
        scratch->positions[scratch->order[row]] = (int32_t)row;
}

/* Dequantized components of some entries: each block with any is decoded once. Returns 1 if memory
 * is short. */
int larder_decode_rows(const struct block_rows *call) {
    enum component_coder coder = (enum component_coder)call->coder;
    int64_t width = coder == BIT_PLANES ? call->width : (call->read + 1) / 2 * 2;
    struct transform_scratch scratch;
    size_t size = lay_out(&scratch, NULL, call->count, width, 1, coder);
    size_t tables = size + table_bytes(&call->tables);
    size_t links = (size_t)(call->blocks + call->rows) * sizeof(int64_t);
    char *memory = aligned_alloc(64, (tables + links + 63) / 64 * 64);
    if (!memory)
        return 1;
    lay_out(&scratch, memory, call->count, width, 1, coder);
    struct decoding_tables own = with_bytes(&call->tables, memory + size);
    int64_t *firsts = (int64_t *)(memory + tables), *nexts = firsts + call->blocks;
    memset(firsts, 0xFF, (size_t)call->blocks * sizeof *firsts);
    for (int64_t n = call->rows - 1; n >= 0; n--) {
        nexts[n] = firsts[call->places[n] / call->count];
        firsts[call->places[n] / call->count] = n;
    }
    for (int64_t b = 0; b < call->blocks; b++) {
        if (firsts[b] >= 0)
            decode_block_of(call, &own, b, &scratch);
        for (int64_t n = firsts[b]; n >= 0; n = nexts[n]) {
            int64_t entry = call->places[n] % call->count;
            const float *symbols = scratch.symbols + scratch.positions[entry];
            float scale = (float)(call->step * exp2((double)scratch.tiers[entry]));
            for (int64_t c = 0; c < call->read; c++)
                call->components[n * call->read + c] = symbols[c * scratch.room] * scale;
        }
    }
    free(memory);
    return 0;
}
