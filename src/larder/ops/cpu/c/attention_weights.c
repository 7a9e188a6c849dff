/* Softmax weights of stored rows from the logits of attention, joined over the heads of a group. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_weights.h"
#include "c_library.h"

/* exp(x) for x <= 0: 2^whole by exponent bits, the rest by a series; a NaN stays one. */
INLINE float exponential(float x) {
    float power = x * LOG2_E;
    power = power < MIN_EXPONENT ? MIN_EXPONENT : power;
    float bounded = power >= MIN_EXPONENT ? power : MIN_EXPONENT; /* no NaN becomes an integer */
    int32_t whole = (int32_t)(bounded - 0.5f), bits = (whole + 127) << 23;
    float scale, rest = (power - (float)whole) * LN_2;
    memcpy(&scale, &bits, sizeof scale);
    float series = 1.0f / 720 + rest * (1.0f / 5040);
    series = 1.0f / 24 + rest * (1.0f / 120 + rest * series);
    series = 0.5f + rest * (1.0f / 6 + rest * series);
    return scale * (1.0f + rest * (1.0f + rest * series));
}

/* exp(logit - peak) of `count` logits; returns their sum, whose order depends on the count alone. */
INLINE float exponentiate(const float *logits, int64_t count, float *raised) {
    float lanes[LANES], peak = -INFINITY, mass = 0;
    int64_t whole = count - count % LANES;
    for (int l = 0; l < LANES; l++)
        lanes[l] = -INFINITY;
    for (int64_t s = 0; s < whole; s += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] = logits[s + l] > lanes[l] ? logits[s + l] : lanes[l];
    for (int l = 0; l < LANES; l++)
        peak = lanes[l] > peak ? lanes[l] : peak;
    for (int64_t s = whole; s < count; s++)
        peak = logits[s] > peak ? logits[s] : peak;
    for (int64_t s = 0; s < count; s++)
        raised[s] = exponential(logits[s] - peak);
    memset(lanes, 0, sizeof lanes);
    for (int64_t s = 0; s < whole; s += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] += raised[s + l];
    for (int l = 0; l < LANES; l++)
        mass += lanes[l];
    for (int64_t s = whole; s < count; s++)
        mass += raised[s];
    return mass;
}

/* Sum over the queries of each head, then the reduction over the heads of the group. */
INLINE void weigh(const struct weighing *call, float *raised, float *sums) {
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
                float factor = 1 / exponentiate(logits, count, raised);
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

static void weigh_baseline(const struct weighing *call, float *raised, float *sums) {
    weigh(call, raised, sums);
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void weigh_avx2(const struct weighing *call,
                                                           float *raised, float *sums) {
    weigh(call, raised, sums);
}

__attribute__((target("avx512f,avx512dq,avx512vl,avx2,fma"))) static void
weigh_avx512(const struct weighing *call, float *raised, float *sums) {
    weigh(call, raised, sums);
}
#endif

static void weigh_dispatched(const struct weighing *call, float *raised, float *sums) {
#if defined(__x86_64__)
    enum instruction_set own = larder_instruction_set();
    if (own >= AVX512)
        return weigh_avx512(call, raised, sums);
    if (own == AVX2)
        return weigh_avx2(call, raised, sums);
#endif
    weigh_baseline(call, raised, sums);
}

int larder_weights_from_logits(const struct weighing *call) {
    int64_t most = 1;
    for (int64_t head = 0; head < call->heads; head++)
        most = call->lengths[head] > most ? call->lengths[head] : most;
    float *raised = malloc(2 * (size_t)most * sizeof(float));
    if (!raised)
        return 1;
    weigh_dispatched(call, raised, raised + most);
    free(raised);
    return 0;
}
