/* Attention of a block of queries to the entries of a cache and causally among themselves, and the
 * sum of the weights that each entry receives.
 *
 * The logits of a few queries with all entries are held at a time, so that weights are known before
 * they are summed: no second pass over the keys. Keys and values of one head at a time are packed
 * for the products. The sums are those of a fixed number of shares of the queries, added in order:
 * they do not depend on the number of threads.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"

#define GROUP_ROWS 8           /* query rows of a product */
#define TILE_LOGITS (96 << 10) /* of one tile, if it has more than the fewest rows */
#define MOST_SHARES 64
#define MOST_TILE 64 /* queries */

struct block_call {
    const void *queries; /* [heads * group_len, query_len, head_dim], float32 or bfloat16 */
    const void *keys;    /* [stored rows, head_dim] */
    const void *values;
    const float *bias; /* [stored rows], or NULL */
    const int64_t *starts;
    const int64_t *lengths;
    const void *new_keys; /* [heads, new_len, head_dim], entries behind the stored ones */
    const void *new_values;
    const int64_t *limits; /* [heads, query_len], entries that a query sees: the first ones */
    float *outs;           /* [heads * group_len, query_len, head_dim], or NULL for sums alone */
    float *lses;           /* [heads * group_len, query_len] */
    float *sums;           /* [entries, head by head], or NULL */
    int64_t heads;
    int64_t group_len;
    int64_t query_len;
    int64_t new_len;
    int64_t head_dim;
    int64_t item_bytes;
    float scaling;
    int32_t threads;
};

struct block_head {
    int64_t head;
    int64_t entries; /* stored and new ones */
    int64_t width;   /* entries, in whole pairs of panels */
    int64_t vectors; /* panels of values, in pairs */
    float *bias;     /* [width], or NULL */
};

/* Queries [first, first + count) of a head, with rows for `queries_len` of each query head. */
struct block_tile {
    int64_t first;
    int64_t count;
    int64_t most; /* queries of a tile */
    int64_t rows;
    int64_t width; /* entries that a query of the tile sees, in whole pairs of panels */
    int64_t stride;
    float *logits;  /* [rows, stride] */
    void *weights;  /* [GROUP_ROWS, stride] */
    void *queries;  /* [rows, head_dim] */
    float *factors; /* [rows] */
};

static const char *entry_row(const struct block_call *call, const struct block_head *head,
                             const void *stored, const void *fresh, int64_t entry) {
    int64_t bytes = call->head_dim * call->item_bytes, length = call->lengths[head->head];
    if (entry < length)
        return (const char *)stored + (call->starts[head->head] + entry) * bytes;
    return (const char *)fresh + (head->head * call->new_len + entry - length) * bytes;
}

static const char *key_row(const struct block_call *call, const struct block_head *head,
                           int64_t entry) {
    return entry_row(call, head, call->keys, call->new_keys, entry);
}

static const char *value_row(const struct block_call *call, const struct block_head *head,
                             int64_t entry) {
    return entry_row(call, head, call->values, call->new_values, entry);
}

/* Index of the query of a tile's row among all queries of all query heads; -1 for padding. */
static int64_t query_of(const struct block_call *call, const struct block_head *head,
                        const struct block_tile *tile, int64_t row) {
    int64_t t = row % tile->most, r = row / tile->most;
    if (t >= tile->count || r >= call->group_len)
        return -1;
    return (head->head * call->group_len + r) * call->query_len + tile->first + t;
}

static const char *tile_query(const struct block_call *call, const struct block_head *head,
                              const struct block_tile *tile, int64_t row) {
    int64_t query = query_of(call, head, tile, row);
    return query < 0 ? NULL
                     : (const char *)call->queries + query * call->head_dim * call->item_bytes;
}

static float *tile_out(const struct block_call *call, const struct block_head *head,
                       const struct block_tile *tile, int64_t row) {
    int64_t query = query_of(call, head, tile, row);
    return query < 0 ? NULL : call->outs + query * call->head_dim;
}

static int64_t tile_limit(const struct block_call *call, const struct block_head *head,
                          const struct block_tile *tile, int64_t row) {
    int64_t t = row % tile->most;
    return t < tile->count ? call->limits[head->head * call->query_len + tile->first + t] : 0;
}

static void write_lse(const struct block_call *call, const struct block_head *head,
                      const struct block_tile *tile, int64_t row, float lse) {
    int64_t query = query_of(call, head, tile, row);
    if (query >= 0 && call->outs)
        call->lses[query] = lse;
}

#define BODY "block_attention_body.h"
#define WITH_DOT_PRODUCT
#include "instruction_sets.h"

typedef void (*pack_function)(const struct block_call *, const struct block_head *, int64_t, char *,
                              char *);
typedef void (*tile_function)(const struct block_call *, const struct block_head *,
                              const struct block_tile *, const char *, const char *, float *);
static const pack_function pack_forms[] = FORMS(pack);
static const tile_function tile_forms[] = FORMS(attend_tile);

struct block_work {
    const struct block_call *call;
    struct block_head head;
    enum instruction_set form;
    char *keys; /* panels */
    char *values;
    char *scratch; /* of each thread */
    size_t scratch_bytes;
    float *sums; /* [shares, width], or NULL */
    int64_t most; /* queries of a tile */
    int64_t tiles;
    int64_t shares;
    int64_t next; /* panel or share that no thread has taken */
    int64_t next_thread;
};

static void pack_as_thread(void *given) {
    struct block_work *work = given;
    int64_t panels = work->head.width / LANES;
    for (int64_t p; (p = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < panels;)
        pack_forms[work->form](work->call, &work->head, p, work->keys, work->values);
}

static int64_t whole_panels(int64_t count) {
    return (count + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}

/* Tile of a thread's scratch, without its queries. */
static struct block_tile tile_of(const struct block_work *work, int64_t thread) {
    char *scratch = work->scratch + (size_t)thread * work->scratch_bytes;
    struct block_tile tile = {.most = work->most, .rows = work->call->group_len * work->most,
                              .stride = work->head.width + LANES};
    tile.logits = (float *)scratch;
    tile.weights = tile.logits + tile.rows * tile.stride;
    tile.queries = (float *)tile.weights + GROUP_ROWS * tile.stride;
    tile.factors = (float *)tile.queries + tile.rows * work->call->head_dim;
    return tile;
}

static void attend_share(const struct block_work *work, struct block_tile *tile, int64_t share) {
    const struct block_call *call = work->call;
    const int64_t *limits = call->limits + work->head.head * call->query_len;
    float *sums = work->sums ? work->sums + share * work->head.width : NULL;
    int64_t first = work->tiles * share / work->shares;
    for (int64_t n = first; n < work->tiles * (share + 1) / work->shares; n++) {
        int64_t widest = 0;
        tile->first = n * tile->most;
        tile->count = call->query_len - tile->first;
        tile->count = tile->count < tile->most ? tile->count : tile->most;
        for (int64_t t = 0; t < tile->count; t++)
            widest = limits[tile->first + t] > widest ? limits[tile->first + t] : widest;
        tile->width = whole_panels(widest);
        tile_forms[work->form](call, &work->head, tile, work->keys, work->values, sums);
    }
}

static void attend_as_thread(void *given) {
    struct block_work *work = given;
    int64_t thread = __atomic_fetch_add(&work->next_thread, 1, __ATOMIC_RELAXED);
    struct block_tile tile = tile_of(work, thread);
    for (int64_t s; (s = __atomic_fetch_add(&work->next, 1, __ATOMIC_RELAXED)) < work->shares;)
        attend_share(work, &tile, s);
}

/* Sizes of the work on one head; returns its bytes of scratch. */
static size_t size_head(struct block_work *work, int64_t head) {
    const struct block_call *call = work->call;
    int64_t entries = call->lengths[head] + call->new_len, group_len = call->group_len;
    work->head.head = head;
    work->head.entries = entries;
    work->head.width = whole_panels(entries ? entries : 1);
    work->head.vectors = whole_panels(call->head_dim) / LANES;
    int64_t most = TILE_LOGITS / (group_len * work->head.width) / GROUP_ROWS * GROUP_ROWS;
    most = most < GROUP_ROWS ? GROUP_ROWS : most > MOST_TILE ? MOST_TILE : most;
    work->most = most;
    work->tiles = (call->query_len + most - 1) / most;
    work->shares = work->tiles < MOST_SHARES ? work->tiles : MOST_SHARES;
    int64_t rows = group_len * most, stride = work->head.width + LANES;
    size_t floats_of = (size_t)(rows * (stride + call->head_dim + 1) + GROUP_ROWS * stride);
    return (floats_of * sizeof(float) + 63) / 64 * 64;
}

static void copy_bias(const struct block_work *work) {
    const struct block_call *call = work->call;
    int64_t head = work->head.head, length = call->lengths[head];
    if (!work->head.bias)
        return;
    memset(work->head.bias, 0, (size_t)work->head.width * sizeof(float));
    memcpy(work->head.bias, call->bias + call->starts[head], (size_t)length * sizeof(float));
}

/* Attend with one head; `sums` are those of its entries, or NULL. */
static void attend_head(struct block_work *work, int threads, float *sums) {
    int64_t width = work->head.width;
    copy_bias(work);
    if (work->sums)
        memset(work->sums, 0, (size_t)(work->shares * width) * sizeof(float));
    work->next = 0;
    larder_parallel(pack_as_thread, work, threads);
    work->next = work->next_thread = 0;
    larder_parallel(attend_as_thread, work, threads);
    for (int64_t s = 0; sums && s < work->head.entries; s++) {
        float sum = 0;
        for (int64_t share = 0; share < work->shares; share++)
            sum += work->sums[share * width + s];
        sums[s] = sum;
    }
}

/* Returns 0, or 1 if memory is short. */
int larder_block_attention(const struct block_call *call) {
    struct block_work work = {.call = call, .form = larder_instruction_set()};
    size_t scratch = 0, threads = call->threads < 1 ? 1 : (size_t)call->threads;
    int64_t width = 0, vectors = 0;
    if (work.form == AVX512_BF16 && call->item_bytes == 4)
        work.form = AVX512;
    for (int64_t head = 0; head < call->heads; head++) {
        size_t bytes = size_head(&work, head);
        scratch = bytes > scratch ? bytes : scratch;
        width = work.head.width > width ? work.head.width : width;
        vectors = work.head.vectors;
    }
    size_t row = (size_t)width * sizeof(float), keys = row * (size_t)call->head_dim;
    size_t values = call->outs ? row * (size_t)(vectors * LANES) : 0;
    size_t sums = call->sums ? row * MOST_SHARES : 0;
    char *memory = aligned_alloc(64, threads * scratch + keys + values + sums + row);
    if (!memory)
        return 1;
    work.scratch_bytes = scratch;
    work.scratch = memory;
    work.keys = memory + threads * scratch;
    work.values = work.keys + keys;
    work.sums = call->sums ? (float *)(work.values + values) : NULL;
    work.head.bias = call->bias ? (float *)(work.values + values + sums) : NULL;
    float *own = call->sums;
    for (int64_t head = 0; head < call->heads; head++) {
        size_head(&work, head);
        attend_head(&work, (int)threads, own);
        own = own ? own + work.head.entries : NULL;
    }
    free(memory);
    return 0;
}
