/* Call of `larder_weights_from_logits`, for the kernels that build on it. */

#ifndef LARDER_ATTENTION_WEIGHTS_H
#define LARDER_ATTENTION_WEIGHTS_H

#include <stdint.h>

enum { MAX, SUM, MEAN }; /* REDUCTION_CODES */

struct weighing {
    const float *logits; /* [heads' rows, logits_stride] */
    const int64_t *starts;
    const int64_t *lengths;
    float *weights; /* [stored rows], zeros */
    int64_t logits_stride;
    int64_t heads;
    int64_t group_len; /* query heads of a kv head */
    int64_t query_len;
    int64_t join;
};

/* Returns 0, or 1 if memory is short. */
int larder_weights_from_logits(const struct weighing *call);

#endif
