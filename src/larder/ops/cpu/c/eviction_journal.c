/* Journal of an eviction behind a decode step, in a buffer of each layer: numbers as they were, and
 * the rows that are overwritten. Moved rows are not among them: they are moved back. */

#include <stdint.h>
#include <string.h>

#include "eviction_journal.h"

/* Parts of the buffer of a layer, in their order. */
struct journal {
    int64_t *num_merged;
    int64_t *starts, *lengths;       /* [heads] */
    int64_t *found;                  /* [heads] rejected entries */
    int64_t (*worst)[MOST_REJECTED]; /* [heads], ascending indices in the head */
    int64_t *merged;                 /* [heads * MOST_REJECTED] rows whose values were replaced */
    float *thresholds;               /* [heads] */
    int32_t *positions;              /* [heads * MOST_REJECTED], of rejected entries */
    float *columns;                  /* [num_columns, stored_rows] */
    char *keys, *values;             /* [heads * MOST_REJECTED, row_bytes], of rejected entries */
    char *merged_values;
};

static struct journal journal_of(const struct evicted *layer) {
    struct journal parts;
    int64_t heads = layer->heads, most = heads * MOST_REJECTED;
    parts.num_merged = (int64_t *)layer->journal;
    parts.starts = parts.num_merged + 1;
    parts.lengths = parts.starts + heads;
    parts.found = parts.lengths + heads;
    parts.worst = (int64_t (*)[MOST_REJECTED])(parts.found + heads);
    parts.merged = (int64_t *)(parts.worst + heads);
    parts.thresholds = (float *)(parts.merged + most);
    parts.positions = (int32_t *)(parts.thresholds + heads);
    parts.columns = (float *)(parts.positions + most);
    parts.keys = (char *)(parts.columns + layer->num_columns * layer->stored_rows);
    parts.values = parts.keys + most * layer->row_bytes;
    parts.merged_values = parts.values + most * layer->row_bytes;
    return parts;
}

int64_t larder_journal_bytes(const struct evicted *layer) {
    int64_t heads = layer->heads, most = heads * MOST_REJECTED;
    int64_t whole = 1 + 3 * heads + 2 * most;
    int64_t halves = heads + most + layer->num_columns * layer->stored_rows;
    return (8 * whole + 4 * halves + 3 * most * layer->row_bytes + 63) / 64 * 64;
}

/* Copy the numbers of the entries of each head between a column and its copy. */
static void copy_columns(const struct evicted *layer, const struct journal *parts, float *to,
                         const float *from) {
    for (int64_t c = 0; c < layer->num_columns; c++)
        for (int64_t h = 0; h < layer->heads; h++) {
            int64_t first = c * layer->stored_rows + parts->starts[h];
            memcpy(to + first, from + first, (size_t)parts->lengths[h] * sizeof *to);
        }
}

void larder_note_numbers(const struct evicted *layer) {
    if (!layer->journal)
        return;
    struct journal parts = journal_of(layer);
    size_t heads = (size_t)layer->heads;
    *parts.num_merged = 0;
    memcpy(parts.starts, layer->starts, heads * sizeof *parts.starts);
    memcpy(parts.lengths, layer->lengths, heads * sizeof *parts.lengths);
    memset(parts.found, 0, heads * sizeof *parts.found);
    if (layer->thresholds)
        memcpy(parts.thresholds, layer->thresholds, heads * sizeof *parts.thresholds);
    copy_columns(layer, &parts, parts.columns, layer->columns);
}

/* Copy the rejected rows of a head to the journal, or back. */
static void copy_rejected(const struct evicted *layer, const struct journal *parts, int64_t h,
                          int is_noted) {
    size_t bytes = (size_t)layer->row_bytes;
    for (int64_t i = 0; i < parts->found[h]; i++) {
        int64_t row = parts->starts[h] + parts->worst[h][i], own = h * MOST_REJECTED + i;
        char *key = layer->keys + row * layer->row_bytes;
        char *value = layer->values + row * layer->row_bytes;
        char *noted_key = parts->keys + own * layer->row_bytes;
        char *noted_value = parts->values + own * layer->row_bytes;
        memcpy(is_noted ? noted_key : key, is_noted ? key : noted_key, bytes);
        memcpy(is_noted ? noted_value : value, is_noted ? value : noted_value, bytes);
        if (is_noted)
            parts->positions[own] = layer->positions[row];
        else
            layer->positions[row] = parts->positions[own];
    }
}

void larder_note_rejected(const struct evicted *layer, const struct rejected *gone) {
    if (!layer->journal)
        return;
    struct journal parts = journal_of(layer);
    for (int64_t h = 0; h < layer->heads; h++) {
        parts.found[h] = gone->found[h];
        memcpy(parts.worst[h], gone->worst[h], sizeof *parts.worst);
        copy_rejected(layer, &parts, h, 1);
    }
}

void larder_note_merged(const struct evicted *layer, int64_t row) {
    if (!layer->journal)
        return;
    struct journal parts = journal_of(layer);
    int64_t own = (*parts.num_merged)++;
    parts.merged[own] = row;
    memcpy(parts.merged_values + own * layer->row_bytes, layer->values + row * layer->row_bytes,
           (size_t)layer->row_bytes);
}

/* Move the rows of a head back to where they were: the moves of `remove_worst`, from the last. */
static void move_back(const struct evicted *layer, const struct journal *parts, int64_t h) {
    int64_t start = parts->starts[h], gone = parts->found[h];
    const int64_t *worst = parts->worst[h];
    if (layer->starts[h] != start)
        for (int64_t i = 0; i < gone; i++) {
            int64_t from = i ? worst[i - 1] + 1 : 0;
            larder_move_run(layer, start + from, start + from + gone - i, worst[i] - from);
        }
    else
        for (int64_t i = gone - 1; i >= 0; i--) {
            int64_t from = worst[i] + 1, end = i + 1 < gone ? worst[i + 1] : parts->lengths[h];
            larder_move_run(layer, start + from, start + from - i - 1, end - from);
        }
}

static void undo_eviction(struct evicted *layer) {
    struct journal parts = journal_of(layer);
    for (int64_t h = 0; h < layer->heads; h++) {
        move_back(layer, &parts, h);
        copy_rejected(layer, &parts, h, 0);
    }
    for (int64_t n = 0; n < *parts.num_merged; n++)
        memcpy(layer->values + parts.merged[n] * layer->row_bytes,
               parts.merged_values + n * layer->row_bytes, (size_t)layer->row_bytes);
    copy_columns(layer, &parts, layer->columns, parts.columns);
    if (layer->thresholds)
        memcpy(layer->thresholds, parts.thresholds, (size_t)layer->heads * sizeof(float));
    memcpy(layer->starts, parts.starts, (size_t)layer->heads * sizeof *parts.starts);
    memcpy(layer->lengths, parts.lengths, (size_t)layer->heads * sizeof *parts.lengths);
    layer->status = LEFT;
}

void larder_undo_evictions(struct evicted *layers, int64_t count) {
    for (int64_t l = 0; l < count; l++)
        if (layers[l].journal && layers[l].status != LEFT)
            undo_eviction(layers + l);
}
