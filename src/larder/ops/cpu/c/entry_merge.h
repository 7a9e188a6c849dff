/* Calls of the kernels that merge entries, for the kernels that build on them. */

#ifndef LARDER_ENTRY_MERGE_H
#define LARDER_ENTRY_MERGE_H

#include <stdint.h>

struct nearest {
    const void *rows; /* [stored rows, head_dim], float32 or bfloat16 by item_bytes */
    const int64_t *starts;
    const int64_t *lengths;
    const uint8_t *marked; /* of packed entries */
    const int64_t *asked;  /* packed entries, ascending */
    float *cosines;
    int64_t *places;
    int64_t head_dim;
    int64_t item_bytes;
    int64_t count; /* of `asked` */
    int64_t next;  /* asked entry that no thread has taken */
};

void larder_nearest_rows(struct nearest *call, int threads);

struct folding {
    const int64_t *sources; /* [count] */
    const int64_t *targets; /* negative: none */
    const int64_t *heads;
    const float *likeness;
    const float *given;
    const float *before; /* [groups] */
    float *moved;        /* [groups] */
    int64_t *froms;      /* [2 * count] */
    int64_t *intos;
    float *weights;
    int64_t count;
    int64_t groups;
    float rate;
    float rest; /* 1 - rate */
    float slack;
    float own;
};

int64_t larder_threshold_folds(const struct folding *call);

int64_t larder_normalize_folds(int64_t folds, float own, const float *counted, int64_t *froms,
                               int64_t *intos, float *weights);

struct spreading {
    const float *mass; /* of stored rows */
    const int64_t *starts;
    const int64_t *lengths;
    const int64_t *new_lengths;
    const int64_t *kept; /* packed entries, ascending */
    const int64_t *gone; /* [count], ascending */
    const float *drawn;  /* [count], or NULL */
    int64_t *froms;      /* [2 * count * window] */
    int64_t *intos;
    float *key_weights;
    float *value_weights;
    int64_t count;
    int64_t window;
};

int64_t larder_spread_folds(const struct spreading *call);

struct summing {
    const void *stored; /* [stored rows, dim] */
    const int64_t *starts;
    const int64_t *lengths;
    const int64_t *sources; /* packed entries */
    const int64_t *targets;
    const float *weights;
    int64_t *into; /* [count], the distinct targets, ascending */
    float *sums;   /* [count, dim] */
    int64_t dim;
    int64_t item_bytes;
    int64_t count;
};

int64_t larder_sum_rows(const struct summing *call);

#endif
