/* Decode attention on a CPU: few queries over a long ragged cache.
 *
 * The entries of each kv head are cut into parts of PART rows, whatever the number of threads and
 * of other heads, and the parts are merged by log-sum-exp in order: a head's result depends on
 * nothing but its own entries.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "c_library.h"

#define PART 512       /* rows of a head that one thread reads at a time */

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
};

typedef void (*attend_function)(const struct attention *, const float *, int64_t, int64_t, float *,
                                float *, float *, void *);

#define BODY "decode_attention_body.h"
#include "instruction_sets.h"

static const attend_function attend_forms[] = FORMS(attend);

struct parts {
    const struct attention *call;
    attend_function attend;
    int64_t count;
    int64_t *head;  /* of each part */
    int64_t *first; /* entry of its head */
    float *peaks;   /* [count, num_queries] */
    float *masses;
    float *outs; /* [count, num_queries, head_dim] */
    char *scratch;
    size_t scratch_bytes; /* of one share */
    int shares;
    int next; /* share that no thread has taken */
};

static void attend_share(const struct parts *parts, int share, int shares) {
    const struct attention *call = parts->call;
    int64_t rows = call->num_queries, size = rows * call->head_dim;
    void *scratch = parts->scratch + (size_t)share * parts->scratch_bytes;
    for (int64_t p = parts->count * share / shares; p < parts->count * (share + 1) / shares; p++) {
        int64_t head = parts->head[p], first = parts->first[p];
        int64_t rest = call->lengths[head] - first, count = rest < PART ? rest : PART;
        int64_t start = call->starts[head] + first;
        struct attention own = *call;
        if (call->step) {
            const struct step_row *row = call->step + head / call->kv_heads;
            own.keys = row->keys;
            own.values = row->values;
            own.bias = row->bias;
            own.logits = row->logits;
            own.logits_stride = row->stored_rows;
        }
        parts->attend(&own, call->queries + head * size, start, start + count,
                      parts->peaks + p * rows, parts->masses + p * rows, parts->outs + p * size,
                      scratch);
    }
}

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads are
 * used, because those of a second runtime would compete with them. NULL where there is none. */
static void (*run_parallel)(void (*)(void *), void *, unsigned, unsigned);
static pid_t process; /* threads of a runtime do not survive a fork */

void larder_set_openmp(void *parallel) {
    run_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))parallel;
    process = getpid();
}

void larder_parallel(void (*task)(void *), void *given, int threads) {
    if (threads > 1 && run_parallel && process == getpid())
        run_parallel(task, given, (unsigned)threads, 0);
    else
        task(given);
}

/* The shares that are left when the runtime gives fewer threads are run behind the others. */
static void attend_as_thread(void *given) {
    struct parts *parts = given;
    for (int share; (share = __atomic_fetch_add(&parts->next, 1, __ATOMIC_RELAXED)) < parts->shares;)
        attend_share(parts, share, parts->shares);
}

/* Merge the parts of every head; a head without entries gives 0 and -inf. */
static void merge_parts(const struct parts *parts) {
    const struct attention *call = parts->call;
    int64_t rows = call->num_queries, dim = call->head_dim, p = 0;
    for (int64_t head = 0; head < call->heads; head++) {
        int64_t first = p;
        while (p < parts->count && parts->head[p] == head)
            p++;
        for (int64_t n = 0; n < rows; n++) {
            float *out = call->outs + (head * rows + n) * dim, peak = -INFINITY, mass = 0;
            memset(out, 0, (size_t)dim * sizeof(float));
            for (int64_t q = first; q < p; q++)
                peak = parts->peaks[q * rows + n] > peak ? parts->peaks[q * rows + n] : peak;
            for (int64_t q = first; q < p; q++) {
                float share = expf(parts->peaks[q * rows + n] - peak);
                const float *part = parts->outs + (q * rows + n) * dim;
                mass += share * parts->masses[q * rows + n];
                for (int64_t d = 0; d < dim; d++)
                    out[d] += share * part[d];
            }
            call->lses[head * rows + n] = p > first ? peak + logf(mass) : -INFINITY;
            for (int64_t d = 0; p > first && d < dim; d++)
                out[d] /= mass;
        }
    }
}

/* Returns 0, or 1 if memory is short. */
int larder_decode_attention(const struct attention *call) {
    int64_t rows = call->num_queries, dim = call->head_dim, vectors = (dim + LANES - 1) / LANES;
    struct parts parts = {.call = call, .attend = attend_forms[larder_instruction_set()]};
    for (int64_t head = 0; head < call->heads; head++)
        parts.count += (call->lengths[head] + PART - 1) / PART;
    int threads = call->threads < parts.count ? call->threads : (int)parts.count;
    threads = threads < 1 ? 1 : threads;
    size_t scratch_vectors = (size_t)(2 * rows * vectors + rows + rows * LANES + LANES * vectors);
    parts.scratch_bytes = scratch_vectors * LANES * sizeof(float);
    size_t sums = (size_t)(parts.count * rows) * (size_t)(dim + 2) * sizeof(float);
    size_t places = 2 * (size_t)parts.count * sizeof(int64_t);
    size_t bytes = (size_t)threads * parts.scratch_bytes + places + sums;
    parts.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!parts.scratch)
        return 1;
    parts.head = (int64_t *)(parts.scratch + (size_t)threads * parts.scratch_bytes);
    parts.first = parts.head + parts.count;
    parts.peaks = (float *)(parts.first + parts.count);
    parts.masses = parts.peaks + parts.count * rows;
    parts.outs = parts.masses + parts.count * rows;
    for (int64_t head = 0, p = 0; head < call->heads; head++)
        for (int64_t first = 0; first < call->lengths[head]; first += PART, p++) {
            parts.head[p] = head;
            parts.first[p] = first;
        }
    parts.shares = threads;
    larder_parallel(attend_as_thread, &parts, threads);
    merge_parts(&parts);
    free(parts.scratch);
    return 0;
}

/* Append the new entry of every row of a batch, with columns of 0, and attend with it.
 *
 * `starts` and `lengths` of the call are filled here. Returns as `larder_decode_attention`. */
int larder_decode_step(const struct attention *call, int64_t *starts, int64_t *lengths) {
    size_t bytes = (size_t)(call->head_dim * call->item_bytes);
    for (int64_t head = 0; head < call->heads; head++) {
        const struct step_row *row = call->step + head / call->kv_heads;
        int64_t own = head % call->kv_heads, place = row->starts[own] + row->lengths[own];
        memcpy(row->keys + (size_t)place * bytes, row->new_keys + own * row->keys_stride, bytes);
        memcpy(row->values + (size_t)place * bytes, row->new_values + own * row->values_stride,
               bytes);
        if (row->positions)
            row->positions[place] = (int32_t)row->position;
        for (int64_t column = 0; column < row->num_columns; column++)
            row->columns[column * row->stored_rows + place] = 0;
        starts[head] = row->starts[own];
        lengths[head] = row->lengths[own] + 1;
    }
    return larder_decode_attention(call);
}
