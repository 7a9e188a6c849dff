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
#include "coded_entries.h"
#include "decode_attention.h"

#define LINE 64        /* bytes that are fetched at once */
#define AHEAD 48       /* rows whose entries are fetched ahead, into the second cache */
#define PART 512       /* rows of a head that one thread reads at a time */
#define HIDDEN_BIAS -1e29f /* below it a row has no weight beside others, and is not read */

/* Entries of one head that stand in several storages, numbered from the first one on. */
struct splice {
    const struct step_row *row;
    int64_t head;    /* of the row */
    int64_t segment; /* that holds the entries [first, stop); num_segments for the own storage */
    int64_t first;
    int64_t stop;
    char *buffer; /* keys, values and biases of LANES rows */
};

typedef void (*attend_function)(const struct attention *, const float *, int64_t, int64_t, float *,
                                float *, float *, void *);

static void enter_segment(struct splice *splice, int64_t segment, int64_t first) {
    const struct step_row *row = splice->row;
    const int64_t *lengths =
        segment < row->num_segments ? row->segments[segment].lengths : row->lengths;
    splice->segment = segment;
    splice->first = first;
    splice->stop = first + lengths[splice->head] + (segment == row->num_segments);
}

/* Point a call at the storage of an entry; returns the storage row. */
static int64_t find_row(struct attention *call, int64_t entry) {
    struct splice *splice = call->splice;
    const struct step_row *row = splice->row;
    while (entry >= splice->stop)
        enter_segment(splice, splice->segment + 1, splice->stop);
    int64_t start = row->starts[splice->head];
    call->keys = row->keys;
    call->values = row->values;
    call->bias = row->bias;
    if (splice->segment < row->num_segments) {
        const struct segment *segment = row->segments + splice->segment;
        start = segment->starts[splice->head];
        call->keys = segment->keys;
        call->values = segment->values;
        call->bias = segment->bias;
    }
    return start + entry - splice->first;
}

/* Point a call at the entries [first, first + count), which are copied where they stand in several
 * storages; returns their first row. Entries are asked for in ascending order. */
static int64_t splice_rows(struct attention *call, int64_t first, int64_t count) {
    struct splice *splice = call->splice;
    int64_t found = find_row(call, first);
    if (first + count <= splice->stop)
        return found;
    size_t bytes = (size_t)(call->head_dim * call->item_bytes);
    char *keys = splice->buffer, *values = keys + LANES * bytes;
    float *biases = (float *)(values + LANES * bytes);
    for (int64_t b = 0; b < count; b++) {
        size_t row = (size_t)find_row(call, first + b);
        memcpy(keys + (size_t)b * bytes, (const char *)call->keys + row * bytes, bytes);
        memcpy(values + (size_t)b * bytes, (const char *)call->values + row * bytes, bytes);
        biases[b] = call->bias ? call->bias[row] : 0;
    }
    call->keys = keys;
    call->values = values;
    call->bias = call->bias ? biases : NULL;
    return 0;
}

#define BODY "decode_attention_body.h"
#include "instruction_sets.h"

static const attend_function attend_forms[] = FORMS(attend);

struct parts {
    const struct attention *call;
    const struct coded_entries *entries; /* NULL where they are not quantized */
    attend_function attend;
    int64_t count;
    int64_t *head;  /* of each part */
    int64_t *first; /* entry of its head */
    float *peaks;   /* [count, num_queries] */
    float *masses;
    float *outs; /* [count, num_queries, head_dim] */
    char *scratch;
    size_t scratch_bytes; /* of one share */
    size_t splice_offset; /* of the buffer of `struct splice` in it */
    int shares;
    int next; /* share that no thread has taken */
};

/* Cursor at an entry of a head. */
static struct coded_cursor cursor_at(const struct parts *parts, int64_t head, int64_t entry,
                                     float *space) {
    int64_t dim = parts->call->head_dim;
    struct coded_cursor cursor = {.entries = parts->entries, .tables = space,
                                  .numbers = space + 4 * dim, .buffer = space + 5 * dim};
    cursor.group = parts->entries->groups + parts->entries->group_starts[head];
    for (; entry >= cursor.first + cursor.group->count; cursor.group++)
        cursor.first += cursor.group->count;
    return cursor;
}

static void attend_share(const struct parts *parts, int share, int shares) {
    const struct attention *call = parts->call;
    int64_t rows = call->num_queries, size = rows * call->head_dim;
    void *scratch = parts->scratch + (size_t)share * parts->scratch_bytes;
    for (int64_t p = parts->count * share / shares; p < parts->count * (share + 1) / shares; p++) {
        int64_t head = parts->head[p], first = parts->first[p];
        int64_t rest = call->lengths[head] - first, count = rest < PART ? rest : PART;
        int64_t start = call->starts[head] + first;
        struct attention own = *call;
        struct splice splice;
        struct coded_cursor cursor;
        if (parts->entries) {
            cursor = cursor_at(parts, head, first, (float *)((char *)scratch + parts->splice_offset));
            own.coded = &cursor;
            start = first;
        } else if (call->step) {
            const struct step_row *row = call->step + head / call->kv_heads;
            own.keys = row->keys;
            own.values = row->values;
            own.bias = row->bias;
            own.logits = row->logits;
            own.logits_stride = row->stored_rows;
            if (row->num_segments) {
                splice = (struct splice){.row = row, .head = head % call->kv_heads,
                                         .buffer = (char *)scratch + parts->splice_offset};
                enter_segment(&splice, 0, 0);
                own.splice = &splice;
                start = first;
            }
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

/* Merge the parts of every head; a head without entries, or with hidden ones alone, gives 0 and
 * -inf (a hidden logit where logits are asked for). */
static void merge_parts(const struct parts *parts) {
    const struct attention *call = parts->call;
    int64_t rows = call->num_queries, dim = call->head_dim, p = 0;
    for (int64_t head = 0; head < call->heads; head++) {
        int64_t first = p;
        while (p < parts->count && parts->head[p] == head)
            p++;
        for (int64_t n = 0; n < rows; n++) {
            float *out = call->outs + (head * rows + n) * dim, peak = -INFINITY, mass = 0, whole = 0;
            memset(out, 0, (size_t)dim * sizeof(float));
            for (int64_t q = first; q < p; q++) {
                peak = parts->peaks[q * rows + n] > peak ? parts->peaks[q * rows + n] : peak;
                whole += parts->masses[q * rows + n];
            }
            int is_seen = p > first && whole != 0; /* of NaN as well */
            for (int64_t q = first; q < p && is_seen; q++) {
                float share = expf(parts->peaks[q * rows + n] - peak);
                const float *part = parts->outs + (q * rows + n) * dim;
                mass += share * parts->masses[q * rows + n];
                for (int64_t d = 0; d < dim; d++)
                    out[d] += share * part[d];
            }
            call->lses[head * rows + n] = is_seen ? peak + logf(mass) : -INFINITY;
            for (int64_t d = 0; is_seen && d < dim; d++)
                out[d] /= mass;
        }
    }
}

/* Parts of the heads of a call, to be attended to in at most `shares`; NULL if memory is short. */
static struct parts *start_parts(const struct attention *call, const struct coded_entries *entries,
                                 int shares) {
    int64_t rows = call->num_queries, dim = call->head_dim, vectors = (dim + LANES - 1) / LANES;
    struct parts parts = {.call = call, .entries = entries};
    parts.attend = attend_forms[larder_instruction_set()];
    for (int64_t head = 0; head < call->heads; head++)
        parts.count += (call->lengths[head] + PART - 1) / PART;
    parts.shares = shares < parts.count ? shares : (int)parts.count;
    parts.shares = parts.shares < 1 ? 1 : parts.shares;
    size_t scratch_vectors = (size_t)(2 * rows * vectors + rows + rows * LANES + LANES * vectors);
    parts.splice_offset = scratch_vectors * LANES * sizeof(float);
    parts.scratch_bytes = parts.splice_offset + (size_t)(2 * dim + 1 + 5 * vectors) * LANES * sizeof(float);
    size_t sums = (size_t)(parts.count * rows) * (size_t)(dim + 2) * sizeof(float);
    size_t places = 2 * (size_t)parts.count * sizeof(int64_t);
    size_t bytes = (size_t)parts.shares * parts.scratch_bytes + places + sums + sizeof parts;
    parts.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!parts.scratch)
        return NULL;
    struct parts *own = (struct parts *)(parts.scratch + (size_t)parts.shares * parts.scratch_bytes);
    parts.head = (int64_t *)(own + 1);
    parts.first = parts.head + parts.count;
    parts.peaks = (float *)(parts.first + parts.count);
    parts.masses = parts.peaks + parts.count * rows;
    parts.outs = parts.masses + parts.count * rows;
    for (int64_t head = 0, p = 0; head < call->heads; head++)
        for (int64_t first = 0; first < call->lengths[head]; first += PART, p++) {
            parts.head[p] = head;
            parts.first[p] = first;
        }
    *own = parts;
    return own;
}

struct parts *larder_start_attention(const struct attention *call, int shares) {
    return start_parts(call, NULL, shares);
}

void larder_attend_shares(struct parts *parts) { attend_as_thread(parts); }

void larder_finish_attention(struct parts *parts) {
    merge_parts(parts);
    free(parts->scratch);
}

static int attend_to(const struct attention *call, const struct coded_entries *entries) {
    struct parts *parts = start_parts(call, entries, call->threads);
    if (!parts)
        return 1;
    larder_parallel(attend_as_thread, parts, parts->shares);
    larder_finish_attention(parts);
    return 0;
}

/* Returns 0, or 1 if memory is short. */
int larder_decode_attention(const struct attention *call) { return attend_to(call, NULL); }

/* Attention to quantized entries; `starts` and what is stored are those of `entries`. Returns as
 * `larder_decode_attention`. */
int larder_coded_attention(const struct attention *call, const struct coded_entries *entries) {
    return attend_to(call, entries);
}

/* Number of the layout of the structs that Python fills, LAYOUT of c_library.py. */
int larder_layout(void) { return 8; }

/* Append the new entry of every row of a batch, with columns of 0. `starts` and `lengths` of the
 * call are filled here. */
void larder_append_step(const struct attention *call, int64_t *starts, int64_t *lengths) {
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
        for (int64_t segment = 0; segment < row->num_segments; segment++)
            lengths[head] += row->segments[segment].lengths[own];
    }
}

/* Append the new entry of every row of a batch, and attend with it. Returns as
 * `larder_decode_attention`. */
int larder_decode_step(const struct attention *call, int64_t *starts, int64_t *lengths) {
    larder_append_step(call, starts, lengths);
    return larder_decode_attention(call);
}

/* Count the entries that a step has written to some rows. */
void larder_count_steps(const struct step_row *rows, int64_t count, int64_t kv_heads) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t head = 0; head < kv_heads; head++)
            ((int64_t *)rows[row].lengths)[head]++;
}

/* Entries of some rows, over their heads. */
void larder_count_entries(const struct step_row *rows, int64_t count, int64_t kv_heads,
                          int64_t *entries) {
    for (int64_t row = 0; row < count; row++) {
        entries[row] = 0;
        for (int64_t head = 0; head < kv_heads; head++)
            entries[row] += rows[row].lengths[head];
    }
}
