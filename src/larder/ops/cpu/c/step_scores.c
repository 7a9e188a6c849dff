/* Scores of entries after a decode step, and the columns that they are made of. Rounded as in torch:
 * no product is contracted with a sum. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_weights.h"
#include "decode_eviction.h"
#include "topk.h"

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC optimize("fp-contract=off")
#endif

/* Attention of the new query, joined over the heads of each group, into `weights`. */
static int weigh_groups(const struct evicted *layer, int join, float *weights) {
    struct weighing call = {layer->logits,        layer->starts, layer->lengths,   weights,
                            layer->logits_stride, layer->heads,  layer->group_len, 1,
                            join};
    memset(weights, 0, (size_t)layer->stored_rows * sizeof(float));
    return larder_weights_from_logits(&call);
}

/* Attention of one query head, into `weights`. */
static int weigh_head(const struct evicted *layer, int64_t h, int64_t r, float *weights) {
    struct weighing call = {layer->logits + r * layer->logits_stride,
                            layer->starts + h, layer->lengths + h, weights,
                            layer->logits_stride, 1, 1, 1, SUM};
    memset(weights + layer->starts[h], 0, (size_t)layer->lengths[h] * sizeof(float));
    return larder_weights_from_logits(&call);
}

/* Whether all heads hold the same positions. */
static int are_alike(const struct evicted *layer) {
    const int32_t *first = layer->positions + layer->starts[0];
    size_t bytes = (size_t)layer->lengths[0] * sizeof *first;
    for (int64_t h = 1; h < layer->heads; h++)
        if (layer->lengths[h] != layer->lengths[0] ||
            memcmp(layer->positions + layer->starts[h], first, bytes))
            return 0;
    return 1;
}

/* Mean attention of all query heads of the layer, entry by entry. */
static int score_by_layer(const struct evicted *layer, struct step_scores *found) {
    if (!are_alike(layer))
        return 1;
    int64_t length = layer->lengths[0];
    float *mean = found->scores + layer->starts[0];
    float count = (float)(layer->heads * layer->group_len);
    memset(mean, 0, (size_t)length * sizeof(float));
    for (int64_t h = 0; h < layer->heads; h++)
        for (int64_t r = 0; r < layer->group_len; r++) {
            if (weigh_head(layer, h, r, found->scratch))
                return 1;
            const float *own = found->scratch + layer->starts[h];
            for (int64_t s = 0; s < length; s++)
                mean[s] += own[s];
        }
    for (int64_t s = 0; s < length; s++)
        mean[s] /= count;
    for (int64_t h = 1; h < layer->heads; h++)
        memcpy(found->scores + layer->starts[h], mean, (size_t)length * sizeof(float));
    return 0;
}

/* Add one more number, the attention of the new query, to the moments of every entry. */
static int add_moments(const struct evicted *layer, const struct step_columns *columns,
                       struct step_scores *found) {
    if (weigh_groups(layer, MEAN, found->scratch))
        return 1;
    for (int64_t h = 0; h < layer->heads; h++)
        for (int64_t s = layer->starts[h]; s < layer->starts[h] + layer->lengths[h]; s++) {
            float count = columns->counts[s], total = count + 1.0f;
            float shift = found->scratch[s] - columns->means[s];
            float share = 1.0f / (total > 1.0f ? total : 1.0f);
            found->counts[s] = total;
            found->means[s] = columns->means[s] + shift * share;
            found->spreads[s] = columns->spreads[s] + shift * shift * count * share;
        }
    return 0;
}

/* Mean attention of each entry, and 1 more for the share of a head's entries that vary most. */
static int score_by_moments(const struct eviction *call, const struct evicted *layer,
                            struct step_scores *found) {
    for (int64_t h = 0; h < layer->heads; h++) {
        int64_t start = layer->starts[h], length = layer->lengths[h];
        int64_t raised = (int64_t)(call->spared * (double)length);
        float *variances = found->scratch + start, *scores = found->scores + start;
        for (int64_t s = 0; s < length; s++) {
            float count = found->counts[start + s];
            variances[s] = count > 0 ? found->spreads[start + s] / count : 0;
            scores[s] = found->means[start + s] + (raised >= length);
        }
        if (raised <= 0 || raised >= length)
            continue;
        uint8_t *marks = malloc((size_t)length);
        if (!marks || larder_top_masks(variances, 1, length, raised, marks)) {
            free(marks);
            return 1;
        }
        for (int64_t s = 0; s < length; s++)
            scores[s] += (float)marks[s];
        free(marks);
    }
    return 0;
}

static void score_by_position(const struct eviction *call, const struct evicted *layer,
                              struct step_scores *found) {
    for (int64_t h = 0; h < layer->heads; h++)
        for (int64_t s = layer->starts[h]; s < layer->starts[h] + layer->lengths[h]; s++)
            found->scores[s] =
                layer->positions[s] < call->sinks ? INFINITY : (float)layer->positions[s];
}

/* Attention of the new query, and what it adds up to, where there are columns for them. */
static int add_attention(const struct evicted *layer, const struct step_columns *columns,
                         struct step_scores *found) {
    if (!layer->mass && !columns->newest)
        return 0;
    if (weigh_groups(layer, SUM, found->newest))
        return 1;
    for (int64_t s = 0; layer->mass && s < layer->stored_rows; s++)
        found->mass[s] = found->newest[s] + layer->mass[s];
    return 0;
}

int larder_score_step(const struct eviction *call, const struct evicted *layer,
                      const struct step_columns *columns, struct step_scores *found) {
    if (add_attention(layer, columns, found) ||
        (columns->counts && add_moments(layer, columns, found)))
        return 1;
    if (layer->count < 0)
        return 0;
    if (call->scoring == BY_MASS)
        memcpy(found->scores, found->mass, (size_t)layer->stored_rows * sizeof(float));
    else if (call->scoring == BY_POSITION)
        score_by_position(call, layer, found);
    else if (call->scoring == LAYER_MEAN ? score_by_layer(layer, found)
                                         : score_by_moments(call, layer, found))
        return 1;
    int64_t astray = 0;
    for (int64_t h = 0; h < layer->heads; h++)
        for (int64_t s = layer->starts[h]; s < layer->starts[h] + layer->lengths[h]; s++)
            astray += found->scores[s] != found->scores[s];
    return astray != 0;
}
