/* Marks of the highest scores of each row. The threshold is found by a radix search over the bits
 * of the scores, from the highest down: four counts, each over the candidates that are left.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "topk.h"

#define COUNTS 4
#define MOST_BUCKETS (1 << 11)

static const int LOWEST_BIT[COUNTS] = {21, 14, 7, 0};
static const int BITS[COUNTS] = {11, 7, 7, 7};

/* Unsigned integers in the order of the scores; both zeros are equal. */
static void rank_scores(const float *scores, int64_t size, uint32_t *ranks) {
    for (int64_t s = 0; s < size; s++) {
        float score = scores[s] + 0.0f;
        uint32_t bits;
        memcpy(&bits, &score, sizeof bits);
        ranks[s] = bits >> 31 ? ~bits : bits | (uint32_t)1 << 31;
    }
}

/* Lowest of the `count` highest ranks; `*equals` is set to the number of its equals among these.
 * `left` is overwritten. */
static uint32_t find_threshold(uint32_t *left, int64_t size, int64_t count, int64_t *equals) {
    uint32_t edge = 0;
    for (int step = 0; step < COUNTS; step++) {
        int low = LOWEST_BIT[step];
        uint32_t mask = ((uint32_t)1 << BITS[step]) - 1, bucket = mask;
        int64_t counts[MOST_BUCKETS] = {0}, found = 0;
        for (int64_t s = 0; s < size; s++)
            counts[left[s] >> low & mask]++;
        for (; counts[bucket] < count; bucket--)
            count -= counts[bucket];
        edge |= bucket << low;
        for (int64_t s = 0; s < size; s++)
            if ((left[s] >> low & mask) == bucket)
                left[found++] = left[s];
        size = found;
    }
    *equals = count;
    return edge;
}

/* Mark the `count` highest of `size` scores in each row, ties to the first; 0 < count < size.
 * Returns 0, or 1 if memory is short. */
int larder_top_masks(const float *scores, int64_t rows, int64_t size, int64_t count,
                     uint8_t *marks) {
    uint32_t *ranks = malloc(2 * (size_t)size * sizeof *ranks);
    if (!ranks)
        return 1;
    uint32_t *left = ranks + size;
    for (int64_t row = 0; row < rows; row++, scores += size, marks += size) {
        int64_t equals;
        rank_scores(scores, size, ranks);
        memcpy(left, ranks, (size_t)size * sizeof *ranks);
        uint32_t edge = find_threshold(left, size, count, &equals);
        for (int64_t s = 0; s < size; s++)
            marks[s] = ranks[s] > edge || (ranks[s] == edge && equals-- > 0);
    }
    free(ranks);
    return 0;
}
