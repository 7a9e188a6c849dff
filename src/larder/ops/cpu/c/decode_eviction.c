/* Eviction behind a decode step: accumulated attention, choice of the rejected entries, their merges
 * and the removal of their rows, for all layers in one call. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_weights.h"
#include "c_library.h"
#include "decode_eviction.h"
#include "eviction_journal.h"

/* Accumulated attention after this step; returns 1 if one is not a number. */
static int add_attention(const struct evicted *layer, float *scores) {
    struct weighing call = {layer->logits,        layer->starts, layer->lengths,   scores,
                            layer->logits_stride, layer->heads,  layer->group_len, 1,
                            SUM};
    if (larder_weights_from_logits(&call))
        return 1;
    int32_t astray = 0;
    for (int64_t h = 0; h < layer->heads; h++) {
        const float *mass = layer->mass + layer->starts[h];
        float *own = scores + layer->starts[h];
        for (int64_t s = 0; s < layer->lengths[h]; s++) {
            own[s] += mass[s];
            astray += own[s] != own[s];
        }
    }
    return astray != 0;
}

static int are_too_many(const struct evicted *layer) {
    for (int64_t h = 0; layer->count >= 0 && h < layer->heads; h++)
        if (layer->lengths[h] - layer->count > MOST_REJECTED)
            return 1;
    return 0;
}

/* Write new numbers of the entries to a column, if there is one. */
static void write_column(const struct evicted *layer, float *column, const float *numbers) {
    for (int64_t h = 0; column && h < layer->heads; h++) {
        int64_t start = layer->starts[h];
        memcpy(column + start, numbers + start, (size_t)layer->lengths[h] * sizeof(float));
    }
}

/* Find the lowest scores of each head; spared entries rank above all others. */
static void reject_lowest(const struct evicted *layer, float *scores, struct rejected *gone) {
    gone->count = 0;
    for (int64_t h = 0; h < layer->heads; h++) {
        int64_t start = layer->starts[h], length = layer->lengths[h];
        const int32_t *positions = layer->positions + start;
        float *own = scores + start;
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

void larder_move_run(const struct evicted *layer, int64_t to, int64_t from, int64_t rows) {
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
            larder_move_run(layer, start + from + gone - i, start + from, worst[i] - from);
        }
        layer->starts[h] = start + gone;
    } else
        for (int64_t i = 0; i < gone; i++) {
            int64_t from = worst[i] + 1, end = i + 1 < gone ? worst[i + 1] : length;
            larder_move_run(layer, start + from - i - 1, start + from, end - from);
        }
    layer->lengths[h] = held;
    int64_t slack = layer->edges[h + 1] - layer->starts[h] - held;
    layer->room = slack < layer->room ? slack : layer->room;
}

/* Carry out the eviction of a layer, with its new columns written. */
static void reject_and_remove(const struct eviction *call, struct evicted *layer,
                              const struct step_columns *columns, float *scores,
                              struct rejected *gone) {
    layer->status = DONE;
    reject_lowest(layer, scores, gone);
    larder_note_rejected(layer, gone);
    if (layer->log_counts && gone->count && larder_merge_rejected(call, layer, gone))
        layer->status = FAILED;
    if (columns && call->window && gone->count && larder_spread_rejected(call, layer, columns, gone))
        layer->status = FAILED;
    layer->room = layer->edges[layer->heads];
    for (int64_t h = 0; h < layer->heads; h++)
        remove_worst(layer, h, gone->worst[h], gone->found[h], call->roomy);
}

static void evict_layer(const struct eviction *call, struct evicted *layer,
                        const struct step_columns *columns) {
    int64_t rows = layer->stored_rows;
    float *fresh = calloc((size_t)((columns ? 7 : 1) * rows + 1), sizeof *fresh);
    struct step_scores found = {fresh,            fresh + rows,     fresh + 2 * rows,
                                fresh + 3 * rows, fresh + 4 * rows, fresh + 5 * rows,
                                fresh + 6 * rows};
    struct rejected gone = {malloc((size_t)layer->heads * sizeof *gone.worst),
                            malloc((size_t)layer->heads * sizeof *gone.found), 0};
    layer->status = LEFT;
    if (fresh && gone.worst && gone.found && !are_too_many(layer) &&
        !(columns ? larder_score_step(call, layer, columns, &found)
                  : add_attention(layer, fresh))) {
        larder_note_numbers(layer);
        write_column(layer, layer->mass, columns ? found.mass : fresh);
        if (columns) {
            write_column(layer, columns->newest, found.newest);
            write_column(layer, columns->counts, found.counts);
            write_column(layer, columns->means, found.means);
            write_column(layer, columns->spreads, found.spreads);
        }
        reject_and_remove(call, layer, columns, fresh, &gone);
    }
    free(fresh);
    free(gone.worst);
    free(gone.found);
}

/* Next layer, from the last one on: its entries were read latest. Negative behind the first. */
static int64_t take_layer(struct eviction *call) {
    return call->count - 1 - __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED);
}

static void evict_as_thread(void *given) {
    struct eviction *call = given;
    for (int64_t l; (l = take_layer(call)) >= 0;)
        evict_layer(call, call->layers + l, NULL);
}

/* Eviction by accumulated attention. */
void larder_evict_step(struct eviction *call) {
    call->next = 0;
    larder_parallel(evict_as_thread, call, call->threads);
}

static void evict_by_rule_as_thread(void *given) {
    struct eviction *call = given;
    for (int64_t l; (l = take_layer(call)) >= 0;)
        evict_layer(call, call->layers + l, call->columns + l);
}

/* Eviction by any score and with any columns. */
void larder_evict_by_rule(struct eviction *call) {
    call->next = 0;
    larder_parallel(evict_by_rule_as_thread, call, call->threads);
}

/* Layers of several sequences, taken by threads. */
struct shared_eviction {
    const struct eviction *call;
    struct evicted *const *layers;
    const struct step_columns *const *columns;
    int64_t count;
    int64_t next; /* sequence that no thread has taken */
};

static void evict_sequences_as_thread(void *given) {
    struct shared_eviction *shared = given;
    for (int64_t n; (n = __atomic_fetch_add(&shared->next, 1, __ATOMIC_RELAXED)) < shared->count;)
        if (shared->layers[n])
            evict_layer(shared->call, shared->layers[n],
                        shared->columns ? shared->columns[n] : NULL);
}

void larder_evict_sequences(const struct eviction *call, struct evicted *const *layers,
                            const struct step_columns *const *columns, int64_t count) {
    struct shared_eviction shared = {call, layers, columns, count, 0};
    larder_parallel(evict_sequences_as_thread, &shared,
                    call->threads < count ? call->threads : (int)count);
}
