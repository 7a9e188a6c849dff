/* Attention of few queries to a ragged cache, and decode steps that append to it. */

#ifndef LARDER_DECODE_ATTENTION_H
#define LARDER_DECODE_ATTENTION_H

#include <stdint.h>

struct splice;
struct coded_cursor;

struct attention {
    const float *queries; /* [heads, num_queries, head_dim] */
    const void *keys;     /* [stored rows, head_dim], float32 or bfloat16 by item_bytes */
    const void *values;
    const float *bias; /* [stored rows], or NULL */
    float *logits;     /* [num_queries, logits_stride], or NULL */
    const int64_t *starts;
    const int64_t *lengths;
    float *outs; /* [heads, num_queries, head_dim] */
    float *lses; /* [heads, num_queries] */
    int64_t heads;
    int64_t num_queries;
    int64_t head_dim;
    int64_t item_bytes;
    int64_t logits_stride;
    float scaling;
    int32_t threads;
    const struct step_row *step; /* storages and new entries of a batch, or NULL */
    int64_t kv_heads;            /* of each row of a batch */
    struct splice *splice;       /* rows that stand in several storages; NULL where they do not */
    struct coded_cursor *coded;  /* rows that are dequantized; NULL where they are not */
};

/* Shared storage whose rows come before those of a sequence's own one; fields of StepSegment in
 * decode_attention.py. */
struct segment {
    const char *keys;
    const char *values;
    const float *bias; /* NULL for none */
    const int64_t *starts;
    const int64_t *lengths;
};

/* Row of a batch that appends one entry to each of its kv heads. Its heads are those of the
 * attention call from row * kv_heads on; `starts` and `lengths` there point into its storage. */
struct step_row {
    char *keys;
    char *values;
    int32_t *positions; /* NULL where the caller writes them */
    float *columns; /* [num_columns, columns_stride] */
    float *bias;    /* NULL for none */
    float *logits;  /* NULL for none */
    const int64_t *starts;
    const int64_t *lengths; /* without the new entry */
    const char *new_keys;   /* [kv_heads, head_dim], a head at each stride */
    const char *new_values;
    int64_t keys_stride; /* in bytes */
    int64_t values_stride;
    int64_t num_columns;
    int64_t stored_rows;
    int64_t position;
    const struct segment *segments; /* in order of their entries */
    int64_t num_segments;
};

int larder_decode_attention(const struct attention *call);
int larder_decode_step(const struct attention *call, int64_t *starts, int64_t *lengths);
void larder_append_step(const struct attention *call, int64_t *starts, int64_t *lengths);
void larder_count_steps(const struct step_row *rows, int64_t count, int64_t kv_heads);

/* Attention in the parallel region of a caller: one thread starts it, all of them take shares, and
 * one finishes it. Starting returns NULL if memory is short. */
struct parts;
struct parts *larder_start_attention(const struct attention *call, int shares);
void larder_attend_shares(struct parts *parts);
void larder_finish_attention(struct parts *parts);

#endif
