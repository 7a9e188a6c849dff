/* Merging of entries: the nearest kept entry of a rejected one, thresholds, weights and sums.
 *
 * Thresholds and sums are rounded as in torch: no product is contracted with a sum.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "entry_merge.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

#define LINE 64  /* bytes that are fetched at once */
#define AHEAD 48 /* rows that are fetched ahead, into the second cache */
#define MIN_NORM 1e-12f /* as in ops/search.py */

INLINE float load(const void *rows, int64_t at, int64_t item_bytes) {
    if (item_bytes == 4)
        return ((const float *)rows)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)rows)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE float norm(float square) { return sqrtf(square) > MIN_NORM ? sqrtf(square) : MIN_NORM; }

#define WITH_DOT_PRODUCT
#define BODY "nearest_rows_body.h"
#include "instruction_sets.h"

typedef void (*find_function)(const struct nearest *, int64_t);
static const find_function find_forms[] = FORMS(find);

/* From the last one on: attention has read the rows of the last head latest. */
static void find_as_thread(void *given) {
    struct nearest *call = given;
    for (int64_t f; (f = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED)) < call->count;)
        find_forms[larder_instruction_set()](call, call->count - 1 - f);
}

void larder_nearest_rows(struct nearest *call, int threads) {
    call->next = 0;
    larder_parallel(find_as_thread, call, threads);
}

static int ascending(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Sort numbers, and drop those that repeat; returns how many are left. */
static int64_t make_distinct(int64_t *numbers, int64_t count) {
    int64_t left = 0;
    qsort(numbers, (size_t)count, sizeof *numbers, ascending);
    for (int64_t i = 0; i < count; i++)
        if (!left || numbers[i] != numbers[left - 1])
            numbers[left++] = numbers[i];
    return left;
}

static int64_t place_of(int64_t number, const int64_t *numbers, int64_t count) {
    const int64_t *found = bsearch(&number, numbers, (size_t)count, sizeof number, ascending);
    return found - numbers;
}

/* Running means moved towards the mean likeness of the sources of each group. */
static void update_means(const struct folding *call) {
    for (int64_t k = 0; k < call->groups; k++) {
        float sum = 0, before = call->before[k];
        int64_t count = 0;
        for (int64_t f = 0; f < call->count; f++)
            if (call->heads[f] == k && call->targets[f] >= 0) {
                sum += call->likeness[f];
                count++;
            }
        float mean = count ? sum / (float)count : before;
        call->moved[k] = isnan(before)           ? mean
                         : !count || isnan(mean) ? before
                                                 : call->rate * mean + call->rest * before;
    }
}

/* Turn given weights into those of means, and write the folds of the targets themselves behind the
 * others; `into` and `totals` are buffers. Returns the number of all folds. */
static int64_t normalize(int64_t folds, float own, const float *counted, int64_t *froms,
                         int64_t *intos, float *weights, int64_t *into, float *totals) {
    memcpy(into, intos, (size_t)folds * sizeof *into);
    int64_t count = make_distinct(into, folds);
    for (int64_t n = 0; n < count; n++)
        totals[n] = own;
    for (int64_t f = 0; f < folds; f++)
        totals[place_of(intos[f], into, count)] += counted[f];
    for (int64_t f = 0; f < folds; f++)
        weights[f] /= totals[place_of(intos[f], into, count)];
    for (int64_t n = 0; n < count; n++) {
        froms[folds + n] = intos[folds + n] = into[n];
        weights[folds + n] = own / totals[n];
    }
    return folds + count;
}

/* Update the thresholds, and write the folds of the sources whose similarity is above them, those of
 * the targets themselves last. Returns their number, or -1 if memory is short. */
int64_t larder_threshold_folds(const struct folding *call) {
    int64_t folds = 0, size = call->count + 1;
    int64_t *into = malloc((size_t)size * (sizeof *into + sizeof(float)));
    if (!into)
        return -1;
    update_means(call);
    for (int64_t f = 0; f < call->count; f++)
        if (call->targets[f] >= 0 && call->likeness[f] >= call->moved[call->heads[f]] - call->slack) {
            call->froms[folds] = call->sources[f];
            call->intos[folds] = call->targets[f];
            call->weights[folds++] = call->given[f];
        }
    folds = normalize(folds, call->own, call->weights, call->froms, call->intos, call->weights,
                      into, (float *)(into + size));
    free(into);
    return folds;
}

/* `normalize` of folds that are in the buffers, [2 * folds]. Returns their number, or -1 if memory
 * is short. */
int64_t larder_normalize_folds(int64_t folds, float own, const float *counted, int64_t *froms,
                               int64_t *intos, float *weights) {
    int64_t size = folds + 1, *into = malloc((size_t)size * (sizeof *into + sizeof(float)));
    if (!into)
        return -1;
    folds = normalize(folds, own, counted, froms, intos, weights, into, (float *)(into + size));
    free(into);
    return folds;
}

/* Ratio of a mass to the mean mass around it, in [0, 1]; of zero over zero 0. */
static float merge_probability(float mass, float around) {
    if (!(around > 0))
        return mass > 0;
    float ratio = mass / around;
    return ratio < 0 ? 0 : ratio > 1 ? 1 : ratio;
}

/* Write the folds of each rejected entry into the kept ones behind it, those of the targets
 * themselves last. Returns their number, or -1 if memory is short. */
int64_t larder_spread_folds(const struct spreading *call) {
    int64_t folds = 0, most = call->count * call->window, h = 0, end = call->lengths[0];
    int64_t stop = call->new_lengths[0], first = 0, *into = malloc((size_t)(most + 1) * sizeof *into);
    if (!into)
        return -1;
    for (int64_t f = 0; f < call->count; f++) {
        int64_t gone = call->gone[f];
        while (gone >= end) {
            end += call->lengths[++h];
            first = stop;
            stop += call->new_lengths[h];
        }
        while (first < stop && call->kept[first] < gone)
            first++;
        const float *mass = call->mass + call->starts[h] - (end - call->lengths[h]);
        double around = 0;
        for (int64_t i = first; i < stop; i++)
            around += mass[call->kept[i]];
        float share = merge_probability(
            mass[gone], (float)(around / (double)(stop > first ? stop - first : 1)));
        if (call->drawn)
            share = call->drawn[f] < share;
        int64_t last = first + call->window < stop ? first + call->window : stop;
        for (int64_t i = first; share > 0 && i < last; i++) {
            call->froms[folds] = gone;
            into[folds] = call->intos[folds] = call->kept[i];
            call->key_weights[folds] = 0;
            call->value_weights[folds++] = share / (float)(last - first);
        }
    }
    int64_t count = make_distinct(into, folds);
    for (int64_t n = 0; n < count; n++, folds++) {
        call->froms[folds] = call->intos[folds] = into[n];
        call->key_weights[folds] = call->value_weights[folds] = 1;
    }
    free(into);
    return folds;
}

/* Sums of the weighted rows of each target; a row of weight 0 is not read. Returns their number. */
int64_t larder_sum_rows(const struct summing *call) {
    int64_t dim = call->dim;
    memcpy(call->into, call->targets, (size_t)call->count * sizeof(int64_t));
    int64_t count = make_distinct(call->into, call->count);
    memset(call->sums, 0, (size_t)(count * dim) * sizeof(float));
    for (int64_t f = 0; f < call->count; f++) {
        int64_t h = 0, first = 0;
        while (call->sources[f] >= first + call->lengths[h])
            first += call->lengths[h++];
        int64_t at = (call->starts[h] + call->sources[f] - first) * dim;
        float weight = call->weights[f];
        float *sums = call->sums + place_of(call->targets[f], call->into, count) * dim;
        for (int64_t d = 0; weight != 0 && d < dim; d++)
            sums[d] += weight * load(call->stored, at + d, call->item_bytes);
    }
    return count;
}
