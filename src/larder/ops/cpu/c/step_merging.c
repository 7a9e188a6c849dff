/* Fate of the entries that a decode step rejects: merged into the nearest kept entry, or spread over
 * the kept ones behind it. Rounded as in torch: no product is contracted with a sum. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "decode_eviction.h"
#include "entry_merge.h"
#include "eviction_journal.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

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
    for (int64_t n = 0; n < merged; n++) {
        int64_t row = row_of(layer, into[n]);
        larder_note_merged(layer, row);
        write_row(layer, row, sums + n * dim);
    }
    for (int64_t f = 0; layer->log_counts && f < count; f++)
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

int larder_merge_rejected(const struct eviction *call, const struct evicted *layer,
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


/* Number in [0, 1) from a position, a head and a seed, the same on every machine. */
static double draw(int64_t position, int64_t head, int64_t seed) {
    const uint64_t bits = 0xFFFFFFFF;
    uint64_t mixed = ((uint64_t)(position + 1) * 0x9E3779B9 + (uint64_t)head * 0x94D049BB) & bits;
    mixed = (mixed + ((uint64_t)seed * 0x7F4A7C15 & bits)) & bits;
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & bits;
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & bits;
    mixed = mixed ^ mixed >> 16;
    return (double)mixed / 4294967296.0;
}

/* Weight of an entry over the mean weight of those behind it, in [0, 1]; of zero over zero 0. */
static float merge_probability(float weight, float around) {
    if (!(around > 0))
        return weight > 0;
    float share = weight / around;
    return share < 0 ? 0 : share < 1 ? share : 1;
}

/* Folds of one rejected entry into the next kept ones of its head; returns how many. */
static int64_t spread_entry(const struct eviction *call, const struct evicted *layer,
                            const struct step_columns *columns, int64_t h, int64_t first,
                            const uint8_t *stays, int64_t source, struct folding *folds) {
    const float *newest = columns->newest + layer->starts[h] - first;
    int64_t stop = first + layer->lengths[h], behind = 0, taken = 0;
    double sum = 0;
    for (int64_t s = source + 1; s < stop; s++)
        if (stays[s]) {
            sum += newest[s];
            behind++;
        }
    int64_t spread = behind < call->window ? behind : call->window;
    float share = merge_probability(newest[source], (float)(sum / (double)(behind ? behind : 1)));
    if (call->sampled) {
        int64_t row = layer->starts[h] + source - first;
        share = draw(layer->positions[row], h, call->seed) < share;
    }
    for (int64_t s = source + 1; share > 0 && taken < spread; s++)
        if (stays[s]) {
            int64_t f = folds->count + taken++;
            folds->froms[f] = source;
            folds->intos[f] = s;
            folds->weights[f] = share / (float)spread;
        }
    return taken;
}

/* Weights by which every source counts as a single value; the targets count what joins them. */
static void count_once(const struct evicted *layer, const struct step_columns *columns,
                       const struct folding *folds) {
    for (int64_t f = 0; f < folds->count; f++) {
        float weight = folds->weights[f];
        float before = columns->joined[row_of(layer, folds->froms[f])];
        columns->joined[row_of(layer, folds->intos[f])] += weight;
        folds->weights[f] = weight / (1 + before);
    }
}

int larder_spread_rejected(const struct eviction *call, const struct evicted *layer,
                           const struct step_columns *columns, const struct rejected *gone) {
    int64_t size = gone->count * call->window, dim = layer->row_bytes / layer->item_bytes;
    int64_t *whole = malloc((size_t)(6 * size + 2 * gone->count) * sizeof *whole);
    float *parts = malloc((size_t)(2 * size + 2 * size * dim) * sizeof *parts);
    uint8_t *stays = malloc((size_t)layer->stored_rows + 1);
    int short_of_memory = !whole || !parts || !stays;
    if (!short_of_memory) {
        int64_t *sources = whole, *heads = whole + gone->count, *into = heads + gone->count;
        struct folding folds = {.froms = into + 2 * size, .intos = into + 4 * size,
                                .weights = parts};
        list_rejected(layer, gone, stays, sources, heads);
        for (int64_t h = 0, first = 0, f = 0; h < layer->heads; first += layer->lengths[h++])
            for (int64_t i = 0; i < gone->found[h]; i++, f++)
                folds.count +=
                    spread_entry(call, layer, columns, h, first, stays, sources[f], &folds);
        count_once(layer, columns, &folds);
        int64_t count = folds.count;
        for (int64_t f = 0; f < folds.count; f++) { /* each target keeps itself, once */
            int64_t g = folds.count;
            while (g < count && folds.intos[g] != folds.intos[f])
                g++;
            folds.froms[g] = folds.intos[g] = folds.intos[f];
            folds.weights[g] = 1;
            count += g == count;
        }
        merge_folds(layer, &folds, count, into, parts + 2 * size);
    }
    free(whole);
    free(parts);
    free(stays);
    return short_of_memory;
}
