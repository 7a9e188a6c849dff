/* Decoder layer of the Llama family around its attention, for a few rows: norms, products with the
 * weights as the model stores them, rotation, gated activation and residuals. Included once for each
 * type of numbers, with
 *
 *   number        uint16_t for bfloat16, or float
 *   IS_FLOAT32    defined for float
 *   EXPORTED(x)   name of an exported function
 *
 * Every number of a row is summed in an order that follows from its own length: a row's result is
 * the same bits alone, beside others and on any number of threads. bfloat16 is rounded to where the
 * layers of transformers do.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "decode_attention.h"
#include "decode_eviction.h"
#include "matrix_units.h"
#include "transform_attention.h"

#if defined(WITH_MATRIX_UNITS) && !defined(IS_FLOAT32)
#define HAS_TILES
#endif
#if defined(IS_FLOAT32)
#define CHUNK LANES
#else
#define CHUNK 32 /* bfloat16 numbers of a vector of 16 pairs */
#endif
#define TOGETHER 4    /* outputs whose sums stay in registers with those of */
#define MOST_ROWS 6   /* rows */
#define MOST_WEIGHTS 3
#define PANEL_ROWS 64     /* rows that are multiplied by all weights before others are */
#define BYTES_AHEAD 16384 /* bytes of weights that are fetched ahead, into the second cache */
#define LINE_BYTES 64
#define STEP_LINES 2 /* lines of the next weights that a step of one of several tiles fetches */

enum use { STORED, GATED, ADDED }; /* written; silu(first) * second; added to what is there */

struct weights {
    const number *matrix; /* [outputs, size] */
    const number *bias;   /* [outputs], or NULL */
    int64_t outputs;
    number *out; /* [rows, outputs] */
};

struct products {
    struct weights weights[MOST_WEIGHTS];
    int count;
    enum use use;
    const void *rows; /* as `pack` leaves them */
    int64_t num_rows;
    int64_t size;
    int64_t blocks; /* of 16 outputs */
    int shares;
    int next; /* share that no thread has taken */
};

struct kernels {
    void (*multiply)(const struct products *, int64_t, int64_t);
    const void *(*pack)(const number *, int64_t, int64_t, float *);
    void (*norm)(const number *, const number *, float, int64_t, int64_t, number *);
    void (*rotate)(const number *, const number *, const number *, int64_t, number *);
};

#if defined(IS_FLOAT32)
static float to_number(float value) { return value; }
static float from_number(float value) { return value; }
#else
static uint16_t to_number(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value != value ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float from_number(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
#endif

static float rounded(float value) { return from_number(to_number(value)); }

/* Weights that a block of 16 outputs belongs to, and its number among theirs. */
static const struct weights *weights_of(const struct products *all, int64_t block, int64_t *own_block) {
    const struct weights *own = all->weights;
    while (all->use != GATED && block >= own->outputs / LANES)
        block -= own++->outputs / LANES;
    *own_block = block;
    return own;
}

#if !defined(IS_FLOAT32)
#define WITH_DOT_PRODUCT
#endif
#define BODY "decoder_layer_body.h"
#include "instruction_sets.h"

#if defined(HAS_TILES)
#define HAS_MATRIX_UNITS
#define NAME(x) x##_tiles
#define TARGET TILES
#include BODY
#undef NAME
#undef TARGET
#undef HAS_MATRIX_UNITS
#endif

static const struct kernels *choose_kernels(void) {
    static const struct kernels *const forms[] = FORMS(&kernels);
#if defined(HAS_TILES)
    if (larder_has_matrix_units())
        return &kernels_tiles;
#endif
    return forms[larder_instruction_set()];
}

/* Floats of the room in which rows are packed. */
static size_t packed_size(int64_t rows, int64_t size) {
    return (size_t)((rows + LANES - 1) / LANES * LANES * size);
}

/* The shares that are left when the runtime gives fewer threads are run behind the others. */
static void multiply_as_thread(void *given) {
    struct products *all = given;
    const struct kernels *kernels = choose_kernels();
    for (int64_t share; (share = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->shares;)
        kernels->multiply(all, all->blocks * share / all->shares,
                          all->blocks * (share + 1) / all->shares);
}

/* `scratch` has room for packed_size(num_rows, size) floats. */
static void multiply(struct products *all, const number *rows, float *scratch, int threads) {
    all->rows = choose_kernels()->pack(rows, all->num_rows, all->size, scratch);
    all->blocks = 0;
    for (int w = 0; w < (all->use == GATED ? 1 : all->count); w++)
        all->blocks += all->weights[w].outputs / LANES;
    all->shares = threads < all->blocks ? threads : (int)all->blocks;
    all->next = 0;
    larder_parallel(multiply_as_thread, all, all->shares);
}

struct decoder_layer {
    const number *input_norm, *output_norm; /* before attention, and before the gated layers */
    const number *query, *key, *value, *output, *gate, *up, *down;
    const number *query_bias, *key_bias, *value_bias, *output_bias; /* or NULL */
    const number *query_norm, *key_norm;                            /* of each head, or NULL */
};

struct decoder_rows {
    int64_t rows, hidden, inner, heads, kv_heads, head_dim;
    number *states;               /* [rows, hidden], read and written */
    const number *cosines, *sines; /* [rows, head_dim] */
    number *queries;              /* [heads, rows, head_dim] */
    number *keys, *values;        /* [kv_heads, rows, head_dim] */
    const number *attended;       /* [heads, rows, head_dim] */
    float epsilon;
    int32_t threads;
};

/* [rows, heads, head_dim] to [heads, rows, head_dim], normed and rotated where asked. */
static void place_heads(const struct decoder_rows *call, const number *from, int64_t heads,
                        const number *norm, const number *cosines, number *to) {
    int64_t dim = call->head_dim;
    for (int64_t row = 0; row < call->rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const number *own = from + (row * heads + head) * dim;
            number *out = to + (head * call->rows + row) * dim;
            if (norm)
                choose_kernels()->norm(own, norm, call->epsilon, 1, dim, (number *)own);
            if (cosines)
                choose_kernels()->rotate(own, cosines + row * dim, call->sines + row * dim, dim, out);
            else
                memcpy(out, own, (size_t)dim * sizeof *out);
        }
}

/* Queries, keys and values of a layer from its input. Returns 0, or 1 if memory is short. */
int EXPORTED(larder_attention_inputs)(const struct decoder_layer *layer, const struct decoder_rows *call) {
    int64_t rows = call->rows, size = call->hidden;
    int64_t wide = call->heads * call->head_dim, narrow = call->kv_heads * call->head_dim;
    size_t packed = packed_size(rows, size);
    float *scratch = malloc(packed * sizeof(float) +
                            (size_t)(rows * (size + wide + 2 * narrow)) * sizeof(number));
    if (!scratch)
        return 1;
    number *normed = (number *)(scratch + packed), *queries = normed + rows * size;
    number *keys = queries + rows * wide, *values = keys + rows * narrow;
    choose_kernels()->norm(call->states, layer->input_norm, call->epsilon, rows, size, normed);
    struct products all = {.weights = {{layer->query, layer->query_bias, wide, queries},
                                       {layer->key, layer->key_bias, narrow, keys},
                                       {layer->value, layer->value_bias, narrow, values}},
                           .count = 3, .use = STORED, .num_rows = rows, .size = size};
    multiply(&all, normed, scratch, call->threads);
    place_heads(call, queries, call->heads, layer->query_norm, call->cosines, call->queries);
    place_heads(call, keys, call->kv_heads, layer->key_norm, call->cosines, call->keys);
    place_heads(call, values, call->kv_heads, NULL, NULL, call->values);
    free(scratch);
    return 0;
}

/* States behind a layer from its input and the output of attention. Returns 0, or 1 if memory is
 * short. */
int EXPORTED(larder_layer_output)(const struct decoder_layer *layer, const struct decoder_rows *call) {
    int64_t rows = call->rows, size = call->hidden, dim = call->head_dim;
    int64_t wide = call->heads * dim, most = wide > size ? wide : size;
    most = most > call->inner ? most : call->inner;
    size_t packed = packed_size(rows, most);
    float *scratch = malloc(packed * sizeof(float) +
                            (size_t)(rows * (most + (wide > size ? wide : size))) * sizeof(number));
    if (!scratch)
        return 1;
    number *inner = (number *)(scratch + packed), *given = inner + rows * most;
    for (int64_t head = 0; head < call->heads; head++)
        for (int64_t row = 0; row < rows; row++)
            memcpy(given + (row * call->heads + head) * dim,
                   call->attended + (head * rows + row) * dim, (size_t)dim * sizeof *given);
    struct products output = {.weights = {{layer->output, layer->output_bias, size, call->states}},
                              .count = 1, .use = ADDED, .num_rows = rows, .size = wide};
    multiply(&output, given, scratch, call->threads);
    choose_kernels()->norm(call->states, layer->output_norm, call->epsilon, rows, size, given);
    struct products gated = {.weights = {{layer->gate, NULL, call->inner, inner},
                                         {layer->up, NULL, call->inner, inner}},
                             .count = 2, .use = GATED, .num_rows = rows, .size = size};
    multiply(&gated, given, scratch, call->threads);
    struct products down = {.weights = {{layer->down, NULL, size, call->states}},
                            .count = 1, .use = ADDED, .num_rows = rows, .size = call->inner};
    multiply(&down, inner, scratch, call->threads);
    free(scratch);
    return 0;
}

/* Decode step of several sequences through all layers; fields of DecoderStep in decoder_layer.py. */
struct decoder_step {
    const struct decoder_layer *layers;
    const struct decoder_rows *rows;  /* queries, keys and values of all layers, written here */
    const struct step_row *storages;  /* [count, rows] */
    const float *scalings;            /* of the logits of each layer */
    int64_t count;
    int64_t attention_threads;
    const struct transform_attention *const *coded; /* as `storages`, NULL for none of them; or NULL */
    const struct eviction *eviction;  /* behind the attention of each layer, or NULL */
    struct evicted *const *evicted;   /* as `storages`, NULL for none */
    const struct step_columns *const *columns; /* of each, or NULL for accumulated attention */
};

/* [heads, rows, head_dim] to float32 [rows, heads, head_dim]. */
static void widen_heads(const struct decoder_rows *call, const number *from, float *to) {
    int64_t dim = call->head_dim;
    for (int64_t head = 0; head < call->heads; head++)
        for (int64_t row = 0; row < call->rows; row++)
            for (int64_t d = 0; d < dim; d++)
                to[(row * call->heads + head) * dim + d] =
                    from_number(from[(head * call->rows + row) * dim + d]);
}

/* float32 [rows, heads, head_dim] to [heads, rows, head_dim]. */
static void round_heads(const struct decoder_rows *call, const float *from, number *to) {
    int64_t dim = call->head_dim;
    for (int64_t head = 0; head < call->heads; head++)
        for (int64_t row = 0; row < call->rows; row++)
            for (int64_t d = 0; d < dim; d++)
                to[(head * call->rows + row) * dim + d] =
                    to_number(from[(row * call->heads + head) * dim + d]);
}

/* Count the entries that a step appended to a layer, and evict while its entries are in a cache. */
static void evict_behind(const struct decoder_step *step, const struct decoder_rows *rows, int64_t layer) {
    int64_t first = layer * rows->rows;
    larder_count_steps(step->storages + first, rows->rows, rows->kv_heads);
    larder_evict_sequences(step->eviction, step->evicted + first,
                           step->columns ? step->columns + first : NULL, rows->rows);
}

/* Append a token to the storages of every layer, and pass its states through all of them. With an
 * eviction, entries are counted as well. Returns 0, or 1 if memory is short. */
int EXPORTED(larder_decoder_step)(const struct decoder_step *step) {
    struct decoder_rows rows = *step->rows;
    int64_t heads = rows.rows * rows.kv_heads, narrow = heads * rows.head_dim;
    int64_t wide = rows.rows * rows.heads * rows.head_dim;
    int64_t *starts = malloc(2 * (size_t)heads * sizeof *starts);
    float *queries = malloc((size_t)(2 * wide + rows.rows * rows.heads) * sizeof *queries);
    number *attended = malloc((size_t)wide * sizeof *attended);
    int failed = !starts || !queries || !attended;
    for (int64_t l = 0; l < step->count && !failed; l++) {
        struct attention call = {.queries = queries, .starts = starts, .lengths = starts + heads,
                                 .outs = queries + wide, .lses = queries + 2 * wide,
                                 .heads = heads, .num_queries = rows.heads / rows.kv_heads,
                                 .head_dim = rows.head_dim, .item_bytes = sizeof(number),
                                 .scaling = step->scalings[l],
                                 .threads = (int32_t)step->attention_threads,
                                 .step = step->storages + l * rows.rows,
                                 .kv_heads = rows.kv_heads};
        rows.attended = attended;
        failed = EXPORTED(larder_attention_inputs)(step->layers + l, &rows);
        if (!failed) {
            widen_heads(&rows, rows.queries, queries);
            failed = larder_decode_step(&call, starts, starts + heads);
        }
        if (!failed && step->coded)
            failed = larder_attend_coded(step->coded + l * rows.rows, rows.rows, &call, rows.threads);
        if (!failed && step->eviction)
            evict_behind(step, &rows, l);
        if (!failed) {
            round_heads(&rows, call.outs, attended);
            failed = EXPORTED(larder_layer_output)(step->layers + l, &rows);
        }
        rows.queries += wide;
        rows.keys += narrow;
        rows.values += narrow;
    }
    free(starts);
    free(queries);
    free(attended);
    return failed;
}

/* out = rows @ matrix.T + bias. Returns 0, or 1 if memory is short. */
int EXPORTED(larder_linear)(const number *rows, const number *matrix, const number *bias,
                  int64_t num_rows, int64_t size, int64_t outputs, number *out, int32_t threads) {
    float *scratch = malloc(packed_size(num_rows, size) * sizeof(float));
    if (!scratch)
        return 1;
    struct products all = {.weights = {{matrix, bias, outputs, out}},
                           .count = 1, .use = STORED, .num_rows = num_rows, .size = size};
    multiply(&all, rows, scratch, threads);
    free(scratch);
    return 0;
}

/* Most rows for which these products can be the fastest: as many as a block of a prompt has. */
int64_t EXPORTED(larder_most_rows)(void) { return 512; }
