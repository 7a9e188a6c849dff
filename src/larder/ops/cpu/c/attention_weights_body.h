/* Softmax weights of stored rows for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

#include "vectors.h"

/* exp(logit - peak) of `count` logits, zeros up to whole vectors; returns their sum, whose order
 * depends on the count alone. */
TARGET INLINE float NAME(exponentiate)(const float *logits, int64_t count, float *raised) {
    const ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t whole = count / LANES * LANES;
    floats most = NAME(broadcast)(-INFINITY), sum = {0}, own;
    for (int64_t s = 0; s < whole; s += LANES) {
        memcpy(&own, logits + s, sizeof own);
        most = NAME(select)(own > most, own, most);
    }
    float peak = most[0], mass = 0;
    for (int l = 1; l < LANES; l++)
        peak = most[l] > peak ? most[l] : peak;
    for (int64_t s = whole; s < count; s++)
        peak = logits[s] > peak ? logits[s] : peak;
    for (int64_t s = 0; s < count; s += LANES) {
        own = NAME(exponential)(NAME(load)(logits, s, count, 0) - peak);
        if (s >= whole)
            own = NAME(select)(lane < (int32_t)(count - s), own, (floats){0});
        memcpy(raised + s, &own, sizeof own);
        sum += own;
    }
    for (int l = 0; l < LANES; l++)
        mass += sum[l];
    return mass;
}

/* Sum over the queries of each head, then the reduction over the heads of the group. */
TARGET static void NAME(weigh)(const struct weighing *call, float *raised, float *sums) {
    for (int64_t head = 0; head < call->heads; head++) {
        int64_t start = call->starts[head], count = call->lengths[head];
        float *weights = call->weights + start;
        for (int64_t r = 0; r < call->group_len; r++) {
            int apart = call->join == MAX && r > 0;
            float *into = apart ? sums : weights;
            if (apart)
                memset(sums, 0, (size_t)count * sizeof(float));
            for (int64_t n = r * call->query_len; n < (r + 1) * call->query_len; n++) {
                const float *logits = call->logits + n * call->logits_stride + start;
                float factor = 1 / NAME(exponentiate)(logits, count, raised);
                for (int64_t s = 0; s < count; s++)
                    into[s] += factor * raised[s];
            }
            for (int64_t s = 0; apart && s < count; s++)
                weights[s] = weights[s] >= sums[s] ? weights[s] : sums[s];
        }
        for (int64_t s = 0; call->join == MEAN && s < count; s++)
            weights[s] /= (float)call->group_len;
    }
}

#include "vectors_end.h"
