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

#define MIN_NORM 1e-12f /* as in ops/search.py */

INLINE float load(const void *rows, int64_t at, int64_t item_bytes) {
    if (item_bytes == 4)
        return ((const float *)rows)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)rows)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Product with `row` and squared norm of a stored row, in lanes. */
INLINE void dot_and_square(const float *row, const void *rows, int64_t at, int64_t dim,
                           int64_t item_bytes, float *dot, float *square) {
    float dots[LANES] = {0}, squares[LANES] = {0};
    int64_t whole = dim - dim % LANES;
    for (int64_t d = 0; d < whole; d += LANES)
        for (int l = 0; l < LANES; l++) {
            float number = load(rows, at + d + l, item_bytes);
            dots[l] += row[d + l] * number;
            squares[l] += number * number;
        }
    for (int64_t d = whole; d < dim; d++) {
        float number = load(rows, at + d, item_bytes);
        dots[0] += row[d] * number;
        squares[0] += number * number;
    }
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) {
            dots[l] += dots[l + half];
            squares[l] += squares[l + half];
        }
    *dot = dots[0];
    *square = squares[0];
}

INLINE float norm(float square) { return sqrtf(square) > MIN_NORM ? sqrtf(square) : MIN_NORM; }

/* Cosine and packed index of the nearest marked entry of the head for one of its entries. */
INLINE void find_nearest(const struct nearest *call, int64_t f, int64_t item_bytes) {
    int64_t h = 0, first = 0, dim = call->head_dim, place = -1;
    while (call->asked[f] >= first + call->lengths[h])
        first += call->lengths[h++];
    float row[LANES * MAX_VECTORS], dot, square = 0, best = -INFINITY;
    int64_t own = (call->starts[h] + call->asked[f] - first) * dim;
    for (int64_t d = 0; d < dim; d++) {
        row[d] = load(call->rows, own + d, item_bytes);
        square += row[d] * row[d];
    }
    float length = norm(square);
    for (int64_t d = 0; d < dim; d++)
        row[d] /= length;
    for (int64_t s = 0; s < call->lengths[h]; s++) {
        if (!call->marked[first + s])
            continue;
        dot_and_square(row, call->rows, (call->starts[h] + s) * dim, dim, item_bytes, &dot,
                       &square);
        float cosine = dot / norm(square);
        if (cosine > best) {
            best = cosine;
            place = first + s;
        }
    }
    call->cosines[f] = best;
    call->places[f] = place;
}

INLINE void find_by_type(const struct nearest *call, int64_t f) {
    if (call->item_bytes == 4)
        find_nearest(call, f, 4);
    else
        find_nearest(call, f, 2);
}

static void find_baseline(const struct nearest *call, int64_t f) { find_by_type(call, f); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void find_avx2(const struct nearest *call, int64_t f) {
    find_by_type(call, f);
}

__attribute__((target("avx512f,avx512bw,avx512vl"))) static void
find_avx512(const struct nearest *call, int64_t f) {
    find_by_type(call, f);
}
#endif

static void find_dispatched(const struct nearest *call, int64_t f) {
#if defined(__x86_64__)
    enum instruction_set own = larder_instruction_set();
    if (own >= AVX512)
        return find_avx512(call, f);
    if (own == AVX2)
        return find_avx2(call, f);
#endif
    find_baseline(call, f);
}

static void find_as_thread(void *given) {
    struct nearest *call = given;
    for (int64_t f; (f = __atomic_fetch_add(&call->next, 1, __ATOMIC_RELAXED)) < call->count;)
        find_dispatched(call, f);
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

/* Update the thresholds, and write the folds of the sources whose similarity is above them, those of
 * the targets themselves last. Returns their number, or -1 if memory is short. */
int64_t larder_threshold_folds(const struct folding *call) {
    int64_t folds = 0, size = call->count + 1;
    int64_t *into = malloc((size_t)size * (sizeof *into + sizeof(float)));
    if (!into)
        return -1;
    float *totals = (float *)(into + size);
    update_means(call);
    for (int64_t f = 0; f < call->count; f++)
        if (call->targets[f] >= 0 && call->likeness[f] >= call->moved[call->heads[f]] - call->slack) {
            call->froms[folds] = call->sources[f];
            into[folds] = call->intos[folds] = call->targets[f];
            call->weights[folds++] = call->given[f];
        }
    int64_t count = make_distinct(into, folds);
    for (int64_t n = 0; n < count; n++)
        totals[n] = call->own;
    for (int64_t f = 0; f < folds; f++)
        totals[place_of(call->intos[f], into, count)] += call->weights[f];
    for (int64_t f = 0; f < folds; f++)
        call->weights[f] /= totals[place_of(call->intos[f], into, count)];
    for (int64_t n = 0; n < count; n++) {
        call->froms[folds + n] = call->intos[folds + n] = into[n];
        call->weights[folds + n] = call->own / totals[n];
    }
    free(into);
    return folds + count;
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
