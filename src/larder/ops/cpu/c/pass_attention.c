/* Attention of a whole pass in one layer: tokens of several sequences, decode steps and blocks, which
 * are appended to storages whose addresses are known. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "block_attention.h"
#include "decode_attention.h"

/* Tokens of a pass that are appended to the storages of one layer, a row of the batch after the other;
 * PassCall of segment_attention.py. */
struct pass_call {
    const struct step_row *rows; /* without new entries; positions are written by the caller */
    const int64_t *firsts;       /* [count + 1], first token of each row */
    const void *queries;         /* [heads, tokens, head_dim], float32 or bfloat16 */
    const void *keys;            /* [kv_heads, tokens, head_dim] */
    const void *values;
    void *outs; /* [heads, tokens, head_dim], of the type of the queries */
    int64_t count;
    int64_t tokens;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t item_bytes;
    float scaling;
    int32_t threads;
};

/* Memory of a pass, given out in pieces. With `bytes` alone, pieces are counted. */
struct pass_memory {
    char *start;
    size_t bytes;
};

static void *take_memory(struct pass_memory *memory, int64_t count, size_t item_bytes) {
    char *piece = memory->start ? memory->start + memory->bytes : NULL;
    memory->bytes += ((size_t)count * item_bytes + 63) / 64 * 64;
    return piece;
}

/* Copy the tokens [first, first + count) of each head of [heads, tokens, head_dim]. */
static void copy_tokens(const struct pass_call *call, const void *packed, int64_t heads, int64_t first,
                        int64_t count, char *own) {
    size_t row = (size_t)(call->head_dim * call->item_bytes);
    for (int64_t head = 0; head < heads; head++)
        memcpy(own + (size_t)(head * count) * row,
               (const char *)packed + (size_t)(head * call->tokens + first) * row, (size_t)count * row);
}

static int64_t stored_len(const struct step_row *row) {
    int64_t length = row->lengths[0];
    for (int64_t segment = 0; segment < row->num_segments; segment++)
        length += row->segments[segment].lengths[0];
    return length;
}

/* Copy the entries of a row that stand in several storages, one behind the other. */
static void join_storages(const struct pass_call *call, const struct step_row *row, char *keys,
                          char *values) {
    size_t bytes = (size_t)(call->head_dim * call->item_bytes);
    for (int64_t head = 0; head < call->kv_heads; head++)
        for (int64_t n = 0; n <= row->num_segments; n++) {
            const struct segment *part = row->segments + n;
            int is_own = n == row->num_segments;
            int64_t start = is_own ? row->starts[head] : part->starts[head];
            size_t size = (size_t)(is_own ? row->lengths[head] : part->lengths[head]) * bytes;
            memcpy(keys, (is_own ? row->keys : part->keys) + (size_t)start * bytes, size);
            memcpy(values, (is_own ? row->values : part->values) + (size_t)start * bytes, size);
            keys += size;
            values += size;
        }
}

/* Block of the tokens of a row, with copies of what stands apart; sizes alone while `memory` counts. */
static void start_block(const struct pass_call *call, int64_t n, struct pass_memory *memory,
                        struct block_call *block) {
    const struct step_row *row = call->rows + n;
    int64_t first = call->firsts[n], count = call->firsts[n + 1] - first, dim = call->head_dim;
    int64_t kv_heads = call->kv_heads, stored = stored_len(row), joined = row->num_segments ? stored : 0;
    size_t bytes = (size_t)(dim * call->item_bytes);
    char *queries = take_memory(memory, call->heads * count, bytes);
    char *keys = take_memory(memory, kv_heads * count, bytes);
    char *values = take_memory(memory, kv_heads * count, bytes);
    char *joined_keys = take_memory(memory, kv_heads * joined, bytes);
    char *joined_values = take_memory(memory, kv_heads * joined, bytes);
    int64_t *layout = take_memory(memory, kv_heads * (2 + count), sizeof *layout);
    *block = (struct block_call){.queries = queries, .new_keys = keys, .new_values = values,
                                 .keys = row->num_segments ? joined_keys : row->keys,
                                 .values = row->num_segments ? joined_values : row->values,
                                 .starts = layout, .lengths = layout + kv_heads,
                                 .limits = layout + 2 * kv_heads,
                                 .outs = take_memory(memory, call->heads * count * dim, sizeof(float)),
                                 .lses = take_memory(memory, call->heads * count, sizeof(float)),
                                 .heads = kv_heads, .group_len = call->heads / kv_heads,
                                 .query_len = count, .new_len = count, .head_dim = dim,
                                 .item_bytes = call->item_bytes, .scaling = call->scaling,
                                 .threads = call->threads};
    if (!memory->start)
        return;
    copy_tokens(call, call->queries, call->heads, first, count, queries);
    copy_tokens(call, call->keys, kv_heads, first, count, keys);
    copy_tokens(call, call->values, kv_heads, first, count, values);
    if (row->num_segments)
        join_storages(call, row, joined_keys, joined_values);
    for (int64_t head = 0; head < kv_heads; head++) {
        layout[head] = row->num_segments ? head * stored : row->starts[head];
        layout[kv_heads + head] = stored;
        for (int64_t t = 0; t < count; t++)
            layout[2 * kv_heads + head * count + t] = stored + t + 1;
    }
}

static float number_at(const struct pass_call *call, const void *numbers, int64_t at) {
    if (call->item_bytes == 4)
        return ((const float *)numbers)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)numbers)[at] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Write float32 numbers as those of the call, rounded to the nearest, ties to even. */
static void write_numbers(const struct pass_call *call, const float *from, int64_t count, int64_t at) {
    if (call->item_bytes == 4) {
        memcpy((float *)call->outs + at, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *out = (uint16_t *)call->outs + at;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

/* Append the tokens of a block behind the entries of its row, and write its output. */
static void finish_block(const struct pass_call *call, int64_t n, const struct block_call *block) {
    const struct step_row *row = call->rows + n;
    int64_t first = call->firsts[n], count = block->query_len, dim = call->head_dim;
    size_t bytes = (size_t)(dim * call->item_bytes);
    for (int64_t head = 0; head < call->kv_heads; head++) {
        size_t place = (size_t)(row->starts[head] + row->lengths[head]) * bytes;
        size_t from = (size_t)(head * count) * bytes, size = (size_t)count * bytes;
        memcpy(row->keys + place, (const char *)block->new_keys + from, size);
        memcpy(row->values + place, (const char *)block->new_values + from, size);
    }
    for (int64_t head = 0; head < call->heads; head++)
        write_numbers(call, block->outs + head * count * dim, count * dim,
                      (head * call->tokens + first) * dim);
}

/* Rows of one token each as a decode step, from `steps` of them; sizes alone while `memory` counts. */
static void start_step(const struct pass_call *call, int64_t steps, struct pass_memory *memory,
                       struct attention *step, int64_t **layout) {
    int64_t dim = call->head_dim, wide = call->heads * dim, bytes = call->item_bytes, at = 0;
    float *queries = take_memory(memory, steps * wide, sizeof *queries);
    struct step_row *rows = take_memory(memory, steps, sizeof *rows);
    *layout = take_memory(memory, 2 * steps * call->kv_heads, sizeof **layout);
    *step = (struct attention){.queries = queries, .starts = *layout,
                               .lengths = *layout + steps * call->kv_heads,
                               .outs = take_memory(memory, steps * wide, sizeof(float)),
                               .lses = take_memory(memory, steps * call->heads, sizeof(float)),
                               .heads = steps * call->kv_heads,
                               .num_queries = call->heads / call->kv_heads, .head_dim = dim,
                               .item_bytes = bytes, .scaling = call->scaling,
                               .threads = call->threads, .step = rows, .kv_heads = call->kv_heads};
    for (int64_t n = 0; memory->start && n < call->count; n++) {
        int64_t first = call->firsts[n];
        if (call->firsts[n + 1] - first > 1)
            continue;
        rows[at] = call->rows[n];
        rows[at].new_keys = (const char *)call->keys + first * dim * bytes;
        rows[at].new_values = (const char *)call->values + first * dim * bytes;
        rows[at].keys_stride = rows[at].values_stride = call->tokens * dim * bytes;
        for (int64_t head = 0; head < call->heads; head++)
            for (int64_t d = 0; d < dim; d++)
                queries[at * wide + head * dim + d] =
                    number_at(call, call->queries, (head * call->tokens + first) * dim + d);
        at++;
    }
}

static void finish_step(const struct pass_call *call, const struct attention *step) {
    int64_t dim = call->head_dim, at = 0;
    for (int64_t n = 0; n < call->count; n++) {
        int64_t first = call->firsts[n];
        if (call->firsts[n + 1] - first > 1)
            continue;
        for (int64_t head = 0; head < call->heads; head++)
            write_numbers(call, step->outs + (at * call->heads + head) * dim, dim,
                          (head * call->tokens + first) * dim);
        at++;
    }
}

/* Append the tokens of a pass to the storages of a layer, and attend: blocks of several tokens
 * causally, others as decode steps, with the bits of `larder_attend_segments`. Lengths are the
 * caller's to change. Returns 0, or 1 if memory is short: no entry within the lengths has changed. */
int larder_attend_pass(const struct pass_call *call) {
    struct pass_memory memory = {0};
    struct segment_call all = {.threads = call->threads};
    struct attention step;
    int64_t *layout, steps = 0;
    int failed = 1;
    struct block_call *blocks = malloc((size_t)call->count * sizeof *blocks);
    const struct block_call **listed = malloc((size_t)call->count * sizeof *listed);
    if (!blocks || !listed)
        goto end;
    for (int round = 0; round < 2; round++) {
        size_t bytes = memory.bytes;
        memory = (struct pass_memory){.start = round ? aligned_alloc(64, bytes + 64) : NULL};
        if (round && !memory.start)
            goto end;
        all.count = steps = 0;
        for (int64_t n = 0; n < call->count; n++) {
            int is_step = call->firsts[n + 1] - call->firsts[n] == 1;
            steps += is_step;
            if (!is_step) {
                start_block(call, n, &memory, blocks + n);
                listed[all.count++] = blocks + n;
            }
        }
        start_step(call, steps, &memory, &step, &layout);
    }
    all.blocks = listed;
    if (steps) {
        all.step = &step;
        all.starts = layout;
        all.lengths = layout + steps * call->kv_heads;
    }
    failed = larder_attend_segments(&all);
    for (int64_t n = 0; n < call->count && !failed; n++)
        if (call->firsts[n + 1] - call->firsts[n] > 1)
            finish_block(call, n, blocks + n);
    if (!failed)
        finish_step(call, &step);
end:
    free(memory.start);
    free(blocks);
    free(listed);
    return failed;
}
