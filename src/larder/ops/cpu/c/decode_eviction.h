/* Eviction behind a decode step: what its kernels share. */

#ifndef LARDER_DECODE_EVICTION_H
#define LARDER_DECODE_EVICTION_H

#include <stdint.h>

#include "removal.h"

enum { DONE, LEFT, FAILED };

/* One layer of one sequence; fields of EvictedLayer in decode_eviction.py. */
struct evicted {
    char *keys; /* [stored_rows, row_bytes] */
    char *values;
    int32_t *positions;
    float *columns; /* [num_columns, stored_rows] */
    const float *logits;
    int64_t *starts;
    int64_t *lengths;
    const int64_t *edges;
    float *mass;       /* the column that attention is added to, or NULL */
    float *log_counts; /* NULL: nothing is merged */
    float *thresholds; /* [heads] */
    char *journal;     /* room for what undoes the eviction; NULL: it cannot be undone */
    int64_t row_bytes;
    int64_t item_bytes;
    int64_t num_columns;
    int64_t stored_rows;
    int64_t logits_stride;
    int64_t heads;
    int64_t group_len;
    int64_t count;  /* entries that each head keeps; negative: all, and nothing is rejected */
    int64_t first;  /* entries at earlier positions than `first` are spared, */
    int64_t stop;   /* and those from `stop` on */
    int64_t room;   /* slack behind the fullest head, written here */
    int64_t status; /* DONE, LEFT if nothing has changed, FAILED for lack of memory */
};

/* Score of an entry; STEP_SCORES of decode_eviction.py. */
enum { BY_MASS, LAYER_MEAN, RAISED_MEAN, BY_POSITION };

/* Further columns of one layer, or NULL; in the order of StepColumn. */
struct step_columns {
    float *newest; /* attention of the newest query */
    float *counts; /* moments of the attention of each query */
    float *means;
    float *spreads;
    float *joined; /* total weight of the values merged into an entry */
};

struct eviction {
    struct evicted *layers;
    int64_t count;
    int64_t roomy; /* least slack at which the front of a head may move */
    float rate;
    float rest; /* 1 - rate */
    float slack;
    int32_t threads;
    int64_t next; /* layer that no thread has taken */
    /* What follows is read by `larder_evict_by_rule` alone. */
    const struct step_columns *columns; /* of each layer */
    int64_t scoring;
    int64_t sinks;   /* BY_POSITION: entries at earlier positions are never rejected */
    double spared;   /* RAISED_MEAN: share of a head's entries that are raised */
    int64_t window;  /* kept entries that a rejected value is spread over; 0: none */
    int64_t sampled; /* whether values are spread by chance, drawn from `seed` */
    int64_t seed;
};

/* Rejected entries of one layer. */
struct rejected {
    int64_t (*worst)[MOST_REJECTED]; /* [heads], ascending indices in the head */
    int64_t *found;                  /* [heads] */
    int64_t count;
};

/* Rows of columns after this step, in the order of the storage. */
struct step_scores {
    float *scores;
    float *mass;
    float *newest;
    float *counts;
    float *means;
    float *spreads;
    float *scratch;
};

/* Scores and columns after this step. Returns 1 if a score is not a number, the heads cannot be
 * scored together, or memory is short. */
int larder_score_step(const struct eviction *call, const struct evicted *layer,
                      const struct step_columns *columns, struct step_scores *found);

/* Merge rejected entries into their nearest kept ones; returns 1 if memory is short. */
int larder_merge_rejected(const struct eviction *call, const struct evicted *layer,
                          const struct rejected *gone);

/* Spread the values of rejected entries over the kept ones behind them; returns 1 if memory is
 * short. */
int larder_spread_rejected(const struct eviction *call, const struct evicted *layer,
                           const struct step_columns *columns, const struct rejected *gone);

/* Move rows of a layer with all that is stored beside them. */
void larder_move_run(const struct evicted *layer, int64_t to, int64_t from, int64_t rows);

/* Evict from one layer of several sequences, in the parallel region of no caller.
 *
 * layers: of each sequence; NULL to evict nothing from it.
 * columns: of each, as `larder_evict_by_rule` takes them, or NULL for accumulated attention. */
void larder_evict_sequences(const struct eviction *call, struct evicted *const *layers,
                            const struct step_columns *const *columns, int64_t count);

#endif
