/* Attention of a block of queries to the entries of a cache and causally among themselves, and the
 * sum or the largest of the weights that each entry receives.
 *
 * The logits of a few queries with all entries are held at a time, so that weights are known before
 * they are summed: no second pass over the keys. Keys and values of one head at a time are packed
 * for the products. The sums are those of a fixed number of shares of the queries, added in order:
 * they do not depend on the number of threads.
 *
 * Several blocks, and the decode steps of other sequences, are attended to in one call: threads take
 * tickets in order, for panels of a head to pack, then for shares of its queries, head by head, and
 * for shares of the decode steps at the end.
 */

#include <math.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "block_attention.h"
#include "c_library.h"
#include "decode_attention.h"

#define GROUP_ROWS 8           /* query rows of a product */
#define TILE_LOGITS (96 << 10) /* of one tile, if it has more than the fewest rows */
#define MOST_SHARES 64
#define MOST_TILE 64 /* queries */
#define SLOTS 2      /* heads whose keys and values are packed at a time */
#define STEP_SHARES 4 /* of the decode steps, for each thread */

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

/* One head of one block. */
struct head_work {
    const struct block_call *call;
    struct block_head head;
    enum instruction_set form;
    char *keys; /* panels */
    char *values;
    float *sums; /* [shares, width], or NULL */
    float *into; /* sums of the entries, or NULL */
    int64_t most; /* queries of a tile */
    int64_t tiles;
    int64_t panels;
    int64_t shares;
    int64_t first;    /* ticket of the first panel; those of the shares follow */
    int64_t packed;   /* panels so far */
    int64_t attended; /* shares so far */
    int64_t is_done;
};

struct segment_work {
    struct head_work *heads;
    int64_t count;
    int64_t slots;
    char *scratch; /* of each thread */
    size_t scratch_bytes;
    struct parts *step; /* NULL for none */
    int64_t tickets;    /* of all heads; those of the step follow */
    int64_t next;       /* ticket that no thread has taken */
    int64_t next_thread;
};

/* Wait for other threads. Tickets are taken in order, so that those waited for are being worked
 * on. */
static void wait_until(const int64_t *count, int64_t least) {
    while (__atomic_load_n(count, __ATOMIC_ACQUIRE) < least)
        sched_yield();
}

static int64_t whole_panels(int64_t count) {
    return (count + 2 * LANES - 1) / (2 * LANES) * (2 * LANES);
}

static void copy_bias(const struct head_work *work) {
    const struct block_call *call = work->call;
    int64_t head = work->head.head, length = call->lengths[head];
    if (!work->head.bias)
        return;
    memset(work->head.bias, 0, (size_t)work->head.width * sizeof(float));
    memcpy(work->head.bias, call->bias + call->starts[head], (size_t)length * sizeof(float));
}

static void pack_panel(struct segment_work *all, int64_t head, int64_t panel) {
    struct head_work *work = all->heads + head;
    if (head >= all->slots) /* the storage is that of an earlier head */
        wait_until(&all->heads[head - all->slots].is_done, 1);
    if (!panel)
        copy_bias(work);
    pack_forms[work->form](work->call, &work->head, panel, work->keys, work->values);
    __atomic_fetch_add(&work->packed, 1, __ATOMIC_RELEASE);
}

/* Tile of a thread's scratch, without its queries. */
static struct block_tile tile_of(const struct head_work *work, char *scratch) {
    struct block_tile tile = {.most = work->most, .rows = work->call->group_len * work->most,
                              .stride = work->head.width + LANES};
    tile.logits = (float *)scratch;
    tile.weights = tile.logits + tile.rows * tile.stride;
    tile.queries = (float *)tile.weights + GROUP_ROWS * tile.stride;
    tile.factors = (float *)tile.queries + tile.rows * work->call->head_dim;
    return tile;
}

/* The larger of two numbers, NaN if one is. */
static float larger(float left, float right) {
    return right <= left || left != left ? left : right;
}

static void add_shares(const struct head_work *work) {
    for (int64_t s = 0; work->into && s < work->head.entries; s++) {
        float sum = 0;
        for (int64_t share = 0; share < work->shares; share++) {
            float own = work->sums[share * work->head.width + s];
            sum = work->call->is_largest ? larger(sum, own) : sum + own;
        }
        work->into[s] = sum;
    }
}

static void attend_share(struct head_work *work, char *scratch, int64_t share) {
    const struct block_call *call = work->call;
    const int64_t *limits = call->limits + work->head.head * call->query_len;
    struct block_tile tile = tile_of(work, scratch);
    float *sums = work->sums ? work->sums + share * work->head.width : NULL;
    wait_until(&work->packed, work->panels);
    if (sums)
        memset(sums, 0, (size_t)work->head.width * sizeof(float));
    for (int64_t n = work->tiles * share / work->shares;
         n < work->tiles * (share + 1) / work->shares; n++) {
        int64_t widest = 0;
        tile.first = n * tile.most;
        tile.count = call->query_len - tile.first;
        tile.count = tile.count < tile.most ? tile.count : tile.most;
        for (int64_t t = 0; t < tile.count; t++)
            widest = limits[tile.first + t] > widest ? limits[tile.first + t] : widest;
        tile.width = whole_panels(widest);
        tile_forms[work->form](call, &work->head, &tile, work->keys, work->values, sums);
    }
    if (__atomic_add_fetch(&work->attended, 1, __ATOMIC_ACQ_REL) == work->shares) {
        add_shares(work);
        __atomic_store_n(&work->is_done, 1, __ATOMIC_RELEASE);
    }
}

static void attend_as_thread(void *given) {
    struct segment_work *all = given;
    int64_t thread = __atomic_fetch_add(&all->next_thread, 1, __ATOMIC_RELAXED), head = 0;
    char *scratch = all->scratch + (size_t)thread * all->scratch_bytes;
    for (int64_t t; (t = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->tickets;) {
        while (head + 1 < all->count && t >= all->heads[head + 1].first)
            head++;
        struct head_work *work = all->heads + head;
        if (t < work->first + work->panels)
            pack_panel(all, head, t - work->first);
        else
            attend_share(work, scratch, t - work->first - work->panels);
    }
    if (all->step)
        larder_attend_shares(all->step);
}

/* Sizes of the work on one head; returns its bytes of scratch. */
static size_t size_head(struct head_work *work, const struct block_call *call, int64_t head) {
    int64_t entries = call->lengths[head] + call->new_len, group_len = call->group_len;
    work->call = call;
    work->form = larder_instruction_set();
    if (work->form == AVX512_BF16 && call->item_bytes == 4)
        work->form = AVX512;
    work->head.head = head;
    work->head.entries = entries;
    work->head.width = whole_panels(entries ? entries : 1);
    work->head.vectors = whole_panels(call->head_dim) / LANES;
    work->panels = work->head.width / LANES;
    int64_t most = TILE_LOGITS / (group_len * work->head.width) / GROUP_ROWS * GROUP_ROWS;
    most = most < GROUP_ROWS ? GROUP_ROWS : most > MOST_TILE ? MOST_TILE : most;
    work->most = most;
    work->tiles = (call->query_len + most - 1) / most;
    work->shares = work->tiles < MOST_SHARES ? work->tiles : MOST_SHARES;
    work->shares = work->shares < 1 ? 1 : work->shares; /* the last one ends the work on a head */
    int64_t rows = group_len * most, stride = work->head.width + LANES;
    size_t floats_of = (size_t)(rows * (stride + call->head_dim + 1) + GROUP_ROWS * stride);
    return (floats_of * sizeof(float) + 63) / 64 * 64;
}

/* Bytes of what is packed of a head, and of its sums; sets where they are, unless NULL is given. */
static size_t place_head(struct head_work *work, char *memory) {
    const struct block_call *call = work->call;
    size_t row = (size_t)work->head.width * sizeof(float), keys = row * (size_t)call->head_dim;
    size_t values = call->outs ? row * (size_t)(work->head.vectors * LANES) : 0;
    size_t sums = call->sums ? row * (size_t)work->shares : 0;
    if (memory) {
        work->keys = memory;
        work->values = work->keys + keys;
        work->sums = call->sums ? (float *)(work->values + values) : NULL;
        work->head.bias = call->bias ? (float *)(work->values + values + sums) : NULL;
    }
    return (keys + values + sums + row + 63) / 64 * 64;
}

/* Size all heads, with their tickets; returns the most bytes of what is packed of one. */
static size_t size_heads(struct segment_work *all, const struct segment_call *call) {
    size_t most = 0;
    struct head_work *work = all->heads;
    for (int64_t n = 0; n < call->count; n++) {
        float *sums = call->blocks[n]->sums;
        for (int64_t head = 0; head < call->blocks[n]->heads; head++, work++) {
            size_t scratch = size_head(work, call->blocks[n], head), packed = place_head(work, NULL);
            work->first = all->tickets;
            work->into = sums;
            sums = sums ? sums + work->head.entries : NULL;
            all->tickets += work->panels + work->shares;
            all->scratch_bytes = scratch > all->scratch_bytes ? scratch : all->scratch_bytes;
            most = packed > most ? packed : most;
        }
    }
    return most;
}

/* Attend to all blocks of a pass, and to its decode steps, whose entries are appended first. Every
 * block and step has the bits that it has alone. Returns 0, or 1 if memory is short: only the
 * entries behind the step's lengths have changed then. */
int larder_attend_segments(const struct segment_call *call) {
    struct segment_work all = {.slots = call->threads > 1 ? SLOTS : 1};
    int failed = 1, threads = call->threads < 1 ? 1 : (int)call->threads;
    char *memory = NULL;
    for (int64_t n = 0; n < call->count; n++)
        all.count += call->blocks[n]->heads;
    all.heads = calloc((size_t)all.count + 1, sizeof *all.heads);
    if (!all.heads)
        return 1;
    size_t packed = size_heads(&all, call);
    memory = aligned_alloc(64, (size_t)threads * all.scratch_bytes + (size_t)all.slots * packed + 64);
    if (!memory)
        goto end;
    if (call->step) {
        larder_append_step(call->step, call->starts, call->lengths);
        all.step = larder_start_attention(call->step, threads * STEP_SHARES);
        if (!all.step)
            goto end;
    }
    all.scratch = memory;
    for (int64_t head = 0; head < all.count; head++)
        place_head(all.heads + head, memory + (size_t)threads * all.scratch_bytes +
                                         (size_t)(head % all.slots) * packed);
    larder_parallel(attend_as_thread, &all, threads);
    if (all.step)
        larder_finish_attention(all.step);
    failed = 0;
end:
    free(memory);
    free(all.heads);
    return failed;
}

/* Returns 0, or 1 if memory is short. */
int larder_block_attention(const struct block_call *call) {
    struct segment_call alone = {.blocks = &call, .count = 1, .threads = call->threads};
    return larder_attend_segments(&alone);
}
