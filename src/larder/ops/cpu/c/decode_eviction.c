/* Eviction behind a decode step: accumulated attention, choice of the rejected entries, their merges
 * and the removal of their rows, for all layers in one call. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_weights.h"
#include "c_library.h"
#include "entry_merge.h"
#include "removal.h"

enum { DONE, LEFT, FAILED };

/* One layer of one sequence; fields of EvictedLayer in decode_eviction.py. */
struct evicted {
    char *keys; /* [stored_rows, row_bytes] */
    char *values;
    int32_t *positions;
    float *columns; /* [num_columns, stored_rows] */
    const float *logits;
    int64_t *starts;
    int64_t *lengths;
    const int64_t *edges;
    float *mass;       /* the column that attention is added to */
    float *log_counts; /* NULL: nothing is merged */
    float *thresholds; /* [heads] */
    int64_t row_bytes;
    int64_t item_bytes;
    int64_t num_columns;
    int64_t stored_rows;
    int64_t logits_stride;
    int64_t heads;
    int64_t group_len;
    int64_t count;  /* entries that each head keeps; negative: all, and nothing is rejected */
    int64_t first;  /* entries at earlier positions than `first` are spared, */
    int64_t stop;   /* and those from `stop` on */
    int64_t room;   /* slack behind the fullest head, written here */
    int64_t status; /* DONE, LEFT if nothing has changed, FAILED for lack of memory */
};

struct eviction {
    struct evicted *layers;
    int64_t count;
    int64_t roomy; /* least slack at which the front of a head may move */
    float rate;
    float rest; /* 1 - rate */
    float slack;
    int32_t threads;
    int64_t next; /* layer that no thread has taken */
};

/* Rejected entries of one layer. */
struct rejected {
    int64_t (*worst)[MOST_REJECTED]; /* [heads], ascending indices in the head */
    int64_t *found;                  /* [heads] */
    int64_t count;
};

/* Scores after this step; returns 1 if one is not a number or a head has too many to reject. */
static int add_attention(const struct evicted *layer, float *scores) {
    struct weighing call = {layer->logits,        layer->starts, layer->lengths,   scores,
                            layer->logits_stride, layer->heads,  layer->group_len, 1,
                            SUM};
    if (larder_weights_from_logits(&call))
        return 1;
    int64_t astray = 0;
    for (int64_t h = 0; h < layer->heads; h++) {
        const float *mass = layer->mass + layer->starts[h];
        float *own = scores + layer->starts[h];
        for (int64_t s = 0; s < layer->lengths[h]; s++) {
            own[s] += mass[s];
            astray += own[s] != own[s];
        }
        astray += layer->count >= 0 && layer->lengths[h] - layer->count > MOST_REJECTED;
    }
    return astray != 0;
}

/* Write the scores of each head to its column, then rank spared entries above all others. */
static void reject_lowest(const struct evicted *layer, float *scores, struct rejected *gone) {
    gone->count = 0;
    for (int64_t h = 0; h < layer->heads; h++) {
        int64_t start = layer->starts[h], length = layer->lengths[h];
        const int32_t *positions = layer->positions + start;
        float *own = scores + start;
        memcpy(layer->mass + start, own, (size_t)length * sizeof(float));
        gone->found[h] = 0;
        if (layer->count < 0 || length <= layer->count)
            continue;
        for (int64_t s = 0; s < length; s++)
            own[s] = positions[s] < layer->first || positions[s] >= layer->stop ? INFINITY : own[s];
        gone->found[h] =
            larder_find_lowest(own, NULL, length, length - layer->count, gone->worst[h]);
        gone->count += gone->found[h];
    }
}

/* Attention that an entry has received per query that could see it; above 0. */
static float rate_of(const struct evicted *layer, int64_t row, int32_t newest) {
    float rate = layer->mass[row] / (float)(newest + 1 - layer->positions[row]);
    return rate < 1.17549435e-38f ? 1.17549435e-38f : rate;
}

/* Storage row of a packed entry. */
static int64_t row_of(const struct evicted *layer, int64_t place) {
    int64_t h = 0;
    while (place >= layer->lengths[h])
        place -= layer->lengths[h++];
    return layer->starts[h] + place;
}

static void write_row(const struct evicted *layer, int64_t row, const float *sums) {
    int64_t dim = layer->row_bytes / layer->item_bytes;
    char *into = layer->values + row * layer->row_bytes;
    if (layer->item_bytes == 4) {
        memcpy(into, sums, (size_t)layer->row_bytes);
        return;
    }
    uint16_t *halves = (uint16_t *)into;
    for (int64_t d = 0; d < dim; d++) {
        uint32_t bits;
        memcpy(&bits, sums + d, sizeof bits);
        halves[d] = sums[d] != sums[d] ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* Merged values and counts of the targets of `count` folds. */
static void merge_folds(const struct evicted *layer, const struct folding *folds, int64_t count,
                        int64_t *into, float *sums) {
    int64_t dim = layer->row_bytes / layer->item_bytes;
    struct summing call = {layer->values, layer->starts, layer->lengths,    folds->froms,
                           folds->intos,  folds->weights, into,             sums,
                           dim,           layer->item_bytes, count};
    int64_t merged = larder_sum_rows(&call);
    for (int64_t n = 0; n < merged; n++)
        write_row(layer, row_of(layer, into[n]), sums + n * dim);
    for (int64_t f = 0; f < count; f++)
        if (folds->froms[f] == folds->intos[f])
            layer->log_counts[row_of(layer, folds->intos[f])] -= (float)log(folds->weights[f]);
}

/* List the rejected entries, packed, with the threshold group of each; unmark them. */
static int32_t list_rejected(const struct evicted *layer, const struct rejected *gone,
                             uint8_t *stays, int64_t *sources, int64_t *heads) {
    int32_t newest = 0;
    for (int64_t h = 0, first = 0, f = 0; h < layer->heads; first += layer->lengths[h++]) {
        int64_t length = layer->lengths[h];
        if (length && layer->positions[layer->starts[h] + length - 1] > newest)
            newest = layer->positions[layer->starts[h] + length - 1];
        memset(stays + first, 1, (size_t)length);
        for (int64_t i = 0; i < gone->found[h]; i++, f++) {
            sources[f] = first + gone->worst[h][i];
            heads[f] = h;
            stays[sources[f]] = 0;
        }
    }
    return newest;
}

/* Merge rejected entries into their nearest kept ones; returns 1 if memory is short. */
static int merge_rejected(const struct eviction *call, const struct evicted *layer,
                          const struct rejected *gone) {
    int64_t count = gone->count, dim = layer->row_bytes / layer->item_bytes;
    int64_t *whole = malloc((size_t)count * 9 * sizeof *whole);
    float *parts = malloc((size_t)(count * (4 + 2 * dim) + layer->heads) * sizeof *parts);
    uint8_t *stays = malloc((size_t)layer->stored_rows);
    int short_of_memory = !whole || !parts || !stays;
    if (!short_of_memory) {
        int64_t *sources = whole, *heads = whole + count, *targets = heads + count;
        float *likeness = parts, *given = parts + count, *moved = given + count;
        float *weights = moved + layer->heads, *sums = weights + 2 * count;
        int32_t newest = list_rejected(layer, gone, stays, sources, heads);
        struct nearest near = {layer->keys, layer->starts, layer->lengths,    stays, sources,
                               likeness,    targets,       dim, layer->item_bytes, count, 0};
        larder_nearest_rows(&near, 1);
        for (int64_t f = 0; f < count; f++)
            given[f] = targets[f] < 0 ? 0
                                      : rate_of(layer, row_of(layer, sources[f]), newest) /
                                            rate_of(layer, row_of(layer, targets[f]), newest);
        struct folding folds = {sources, targets, heads, likeness, given, layer->thresholds,
                                moved, targets + count, targets + 3 * count, weights, count,
                                layer->heads, call->rate, call->rest, call->slack, 1};
        int64_t folded = larder_threshold_folds(&folds);
        short_of_memory = folded < 0;
        if (!short_of_memory) {
            memcpy(layer->thresholds, moved, (size_t)layer->heads * sizeof(float));
            merge_folds(layer, &folds, folded, targets + 5 * count, sums);
        }
    }
    free(whole);
    free(parts);
    free(stays);
    return short_of_memory;
}

static void move_run(const struct evicted *layer, int64_t to, int64_t from, int64_t rows) {
    size_t bytes = (size_t)(rows * layer->row_bytes);
    memmove(layer->keys + to * layer->row_bytes, layer->keys + from * layer->row_bytes, bytes);
    memmove(layer->values + to * layer->row_bytes, layer->values + from * layer->row_bytes, bytes);
    memmove(layer->positions + to, layer->positions + from, (size_t)rows * sizeof(int32_t));
    for (int64_t c = 0; c < layer->num_columns; c++) {
        float *column = layer->columns + c * layer->stored_rows;
        memmove(column + to, column + from, (size_t)rows * sizeof(float));
    }
}

/* Close the gaps of a head: by moving the entries before them down where there is slack and fewer
 * of them, else those behind them up. As `larder_plan_removal` and `larder_move_rows`. */
static void remove_worst(struct evicted *layer, int64_t h, const int64_t *worst, int64_t gone,
                         int64_t roomy) {
    int64_t start = layer->starts[h], length = layer->lengths[h], held = length - gone;
    int64_t region = layer->edges[h + 1] - layer->edges[h];
    int64_t behind = gone ? length - worst[gone - 1] - 1 : 0;
    if (gone && region - held >= roomy && behind > worst[0]) {
        for (int64_t i = gone - 1; i >= 0; i--) {
            int64_t from = i ? worst[i - 1] + 1 : 0;
            move_run(layer, start + from + gone - i, start + from, worst[i] - from);
        }
        layer->starts[h] = start + gone;
    } else
        for (int64_t i = 0; i < gone; i++) {
            int64_t from = worst[i] + 1, end = i + 1 < gone ? worst[i + 1] : length;
            move_run(layer, start + from - i - 1, start + from, end - from);
        }
    layer->lengths[h] = held;
    int64_t slack = layer->edges[h + 1] - layer->starts[h] - held;
    layer->room = slack < layer->room ? slack : layer->room;
}

static void evict_layer(const struct eviction *call, struct evicted *layer) {
    float *scores = calloc((size_t)layer->stored_rows + 1, sizeof *scores);
    struct rejected gone = {malloc((size_t)layer->heads * sizeof *gone.worst),
                            malloc((size_t)layer->heads * sizeof *gone.found), 0};
    layer->status = LEFT;
    if (scores && gone.worst && gone.found && !add_attention(layer, scores)) {
        layer->status = DONE;
        reject_lowest(layer, scores, &gone);
        if (layer->log_counts && gone.count && merge_rejected(call, layer, &gone))
            layer->status = FAILED;
        layer->room = layer->edges[layer->heads];
        for (int64_t h = 0; h < layer->heads; h++)
            remove_worst(layer, h, gone.worst[h], gone.found[h], call->roomy);
    }
    free(scores);
    free(gone.worst);
    free(gone.found);
}

static void evict_as_thread(void *given) {
    struct eviction *call = given;
    for (int64_t l; (l = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED)) < call->count;)
        evict_layer(call, call->layers + l);
}

void larder_evict_step(struct eviction *call) {
    call->next = 0;
    larder_parallel(evict_as_thread, call, call->threads);
}
