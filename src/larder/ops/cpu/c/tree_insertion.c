/* Insertion into trees of keys (DCI); ops/cpu/dci_kernels.py describes the arrays, ops/dci.py has the
 * readable form.
 *
 * A tree's result depends on nothing but its own entries.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "tree_nodes.h"
#include "tree_search.h"

#define MAX_LEVELS 16
#define ENTRIES_AT_ONCE 64 /* that a thread looks for the parents of */

struct tree_insertion {
    const struct tree_search *trees; /* without queries, means and results */
    const int64_t *targets;          /* [trees, width]: level of a new entry, -1 behind the last */
    const int64_t *indexed;          /* entries of each tree so far */
    const float *squares;            /* squared radius of the sphere of each tree */
    const float *direction;          /* [head_dim + 1] */
    int32_t *members;
    int16_t *fills;
    int32_t *versions;
    int32_t *nexts;
    float *lows;
    int8_t *tiers;
    int32_t *firsts;
    int32_t *centers;
    float *scales;
    int8_t *means;   /* [cells, mean_dim] */
    int64_t *counts; /* [trees, 2]: pages and cells, updated */
    int64_t width;
    int64_t mean_dim;
};

/* Buffers of a search for the nearest cell. */
struct descent {
    int64_t *chosen;
    struct ranking cells;
    int32_t *listed;
};

typedef int64_t (*nearest_function)(const struct tree_search *, int64_t, const char *, float,
                                    int64_t, struct descent *);
typedef float (*project_function)(const struct tree_search *, const char *, const float *, float);

#define BODY "tree_insertion_body.h"
#include "instruction_sets.h"

static const nearest_function nearest_forms[] = FORMS(nearest_cell);
static const project_function project_forms[] = FORMS(project);

/* Returns 0, or 1 if memory is short; `chosen` is freed by the caller. */
static int start_descent(const struct tree_search *call, int64_t tree, struct descent *space) {
    int64_t cells = call->cell_bases[tree + 1] - call->cell_bases[tree];
    int64_t width = call->beams[tree] < cells ? call->beams[tree] : cells;
    int64_t pages = call->page_bases[tree + 1] - call->page_bases[tree];
    width = width > 1 ? width : 1;
    space->chosen = malloc((size_t)width * (2 * sizeof(int64_t) + sizeof(float)) +
                           (size_t)pages * sizeof(int32_t));
    if (!space->chosen)
        return 1;
    space->cells = (struct ranking){(float *)(space->chosen + 2 * width), space->chosen + width, 0,
                                    width};
    space->listed = (int32_t *)(space->cells.values + width);
    return 0;
}

/* Arrays of one tree. */
struct own_tree {
    const struct tree_insertion *call;
    int64_t number;
    int32_t *members;
    int16_t *fills;
    int32_t *versions;
    int32_t *nexts;
    float *lows;
    int8_t *tiers;
    int32_t *firsts;
    int32_t *centers;
    int64_t *counts;
    project_function project;
};

static struct own_tree tree_of(const struct tree_insertion *call, int64_t number) {
    int64_t page = call->trees->page_bases[number], cell = call->trees->cell_bases[number];
    return (struct own_tree){
        .call = call,
        .number = number,
        .members = call->members + page * call->trees->page,
        .fills = call->fills + page,
        .versions = call->versions + page,
        .nexts = call->nexts + page,
        .lows = call->lows + page,
        .tiers = call->tiers + page,
        .firsts = call->firsts + cell,
        .centers = call->centers + cell,
        .counts = call->counts + 2 * number,
        .project = project_forms[larder_instruction_set()],
    };
}

static float along_direction(const struct own_tree *tree, int64_t member, int64_t level) {
    const struct tree_insertion *call = tree->call;
    const char *key = row_of_member(call->trees, tree->number, member, level);
    return tree->project(call->trees, key, call->direction, call->squares[tree->number]);
}

static float number_at(const struct tree_search *trees, const char *row, int64_t at) {
    if (trees->item_bytes != 2)
        return ((const float *)row)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[at] << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Start a cell below an entry; its mean is the entry. Returns its number. */
static int64_t open_cell(struct own_tree *tree, int64_t entry) {
    const struct tree_insertion *call = tree->call;
    int64_t cell = tree->counts[1]++, row = call->trees->cell_bases[tree->number] + cell;
    tree->firsts[cell] = -1;
    tree->centers[cell] = (int32_t)entry;
    const char *key = row_of_member(call->trees, tree->number, entry, 0);
    float largest = 0;
    for (int64_t d = 0; d < call->mean_dim; d++)
        largest = fmaxf(largest, fabsf(number_at(call->trees, key, d)));
    float scale = largest / 127;
    for (int64_t d = 0; d < call->mean_dim; d++)
        call->means[row * call->mean_dim + d] =
            scale > 0 ? (int8_t)rintf(number_at(call->trees, key, d) / scale) : 0;
    call->scales[row] = scale;
    return cell;
}

/* Page of a cell for a projection, which is opened if the cell has none. */
static int64_t page_for(struct own_tree *tree, int64_t cell, int64_t level, float along) {
    int64_t page = tree->firsts[cell];
    if (page < 0) {
        page = tree->counts[0]++;
        tree->firsts[cell] = (int32_t)page;
        tree->fills[page] = 0;
        tree->nexts[page] = -1;
        tree->lows[page] = along;
        tree->tiers[page] = (int8_t)level;
        return page;
    }
    while (tree->nexts[page] >= 0 && tree->lows[tree->nexts[page]] <= along)
        page = tree->nexts[page];
    return page;
}

/* Split a full page and a new member into two halves by projection. Returns 0, or 1 if memory is
 * short. */
static int split_page(struct own_tree *tree, int64_t page, int64_t number, float along,
                      int64_t level) {
    int64_t size = tree->call->trees->page, other = tree->counts[0];
    int32_t *left = tree->members + page * size, *right = tree->members + other * size;
    float *values = malloc((size_t)(size + 1) * (sizeof(float) + sizeof(int64_t)) + sizeof(int64_t));
    if (!values)
        return 1;
    struct ranking order = {values, (int64_t *)(values + (size + 2) / 2 * 2), 0, size + 1};
    fetch_page(tree->call->trees, tree->number, page, level, NULL);
    for (int64_t slot = 0; slot < size; slot++)
        insert_below(&order, -along_direction(tree, left[slot], level), left[slot]);
    insert_below(&order, -along, number);
    int64_t kept = (size + 2) / 2;
    int changed = kept != size;
    for (int64_t slot = 0; slot < kept; slot++) {
        changed |= left[slot] != order.numbers[slot];
        left[slot] = (int32_t)order.numbers[slot];
    }
    for (int64_t slot = kept; slot < size; slot++)
        left[slot] = -1;
    for (int64_t slot = 0; slot < size + 1 - kept; slot++)
        right[slot] = (int32_t)order.numbers[kept + slot];
    tree->fills[page] = (int16_t)kept;
    tree->fills[other] = (int16_t)(size + 1 - kept);
    tree->lows[page] = -order.values[0];
    tree->lows[other] = -order.values[kept];
    tree->nexts[other] = tree->nexts[page];
    tree->nexts[page] = (int32_t)other;
    tree->tiers[other] = (int8_t)level;
    tree->versions[other]++;
    tree->versions[page] += changed;
    tree->counts[0]++;
    free(values);
    return 0;
}

/* Returns 0, or 1 if memory is short. */
static int insert_entry(struct own_tree *tree, int64_t entry, int64_t target,
                        struct descent *space) {
    const struct tree_insertion *call = tree->call;
    const char *key = row_of_member(call->trees, tree->number, entry, 0);
    nearest_function nearest = nearest_forms[larder_instruction_set()];
    float square = call->squares[tree->number];
    int64_t cell = nearest(call->trees, tree->number, key, square, target, space);
    int64_t number = target > 0 ? open_cell(tree, entry) : entry;
    float along = along_direction(tree, entry, 0);
    int64_t page = page_for(tree, cell, target, along);
    if (tree->fills[page] == call->trees->page)
        return split_page(tree, page, number, along, target);
    tree->members[page * call->trees->page + tree->fills[page]++] = (int32_t)number;
    tree->lows[page] = along < tree->lows[page] ? along : tree->lows[page];
    tree->versions[page]++;
    return 0;
}

static int insert_into(const struct tree_insertion *call, int64_t number) {
    const int64_t *targets = call->targets + number * call->width;
    struct own_tree tree = tree_of(call, number);
    struct descent space;
    if (call->width < 1 || targets[0] < 0)
        return 0;
    if (start_descent(call->trees, number, &space))
        return 1;
    int failed = 0;
    for (int64_t at = 0; at < call->width && targets[at] >= 0 && !failed; at++)
        failed = insert_entry(&tree, call->indexed[number] + at, targets[at], &space);
    free(space.chosen);
    return failed;
}

struct inserted_trees {
    const struct tree_insertion *call;
    int64_t next; /* tree that no thread has taken */
    int failed;
};

static void insert_as_thread(void *given) {
    struct inserted_trees *trees = given;
    for (int64_t t; (t = __atomic_fetch_add(&trees->next, 1, __ATOMIC_RELAXED)) <
                    trees->call->trees->trees;)
        if (insert_into(trees->call, t))
            __atomic_store_n(&trees->failed, 1, __ATOMIC_RELAXED);
}

/* Insert the entries behind the first `indexed` of each tree, which has room for them. Returns 0, or
 * 1 if memory is short; some are inserted then. */
int larder_tree_insert(const struct tree_insertion *call) {
    struct inserted_trees trees = {.call = call};
    larder_parallel(insert_as_thread, &trees, (int)call->trees->threads);
    return trees.failed;
}

/* Entries of a tree under construction whose parents are looked for. */
struct parent_search {
    const struct tree_search *tree; /* one */
    const int64_t *entries;
    int64_t *found; /* out: cell of each */
    int64_t count;
    int64_t target; /* their level */
    int64_t next;   /* entry that no thread has taken */
    int64_t failed;
    float square;
};

static void find_parents_as_thread(void *given) {
    struct parent_search *call = given;
    nearest_function nearest = nearest_forms[larder_instruction_set()];
    struct descent space;
    if (start_descent(call->tree, 0, &space)) {
        __atomic_store_n(&call->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    for (int64_t first; (first = __atomic_fetch_add(&call->next, ENTRIES_AT_ONCE,
                                                    __ATOMIC_RELAXED)) < call->count;)
        for (int64_t at = first; at < first + ENTRIES_AT_ONCE && at < call->count; at++) {
            const char *key = row_of_member(call->tree, 0, call->entries[at], 0);
            call->found[at] = nearest(call->tree, 0, key, call->square, call->target, &space);
        }
    free(space.chosen);
}

/* Returns 0, or 1 if memory is short. */
int larder_tree_parents(struct parent_search *call) {
    call->next = call->failed = 0;
    larder_parallel(find_parents_as_thread, call, (int)call->tree->threads);
    return (int)call->failed;
}

/* Levels of the next entries of each tree, where levels are filled by counting; count_levels of
 * ops/cpu/dci_insert_kernels.py is the readable form.
 *
 * coming: entries of each tree; most, levels: levels that each may have and has, which are updated;
 * sizes: [trees, MAX_LEVELS]; upcoming: level of the next entry; targets: [trees, width], -1 behind
 * the last. */
void larder_tree_levels(int64_t trees, int64_t width, const int64_t *coming, const double *ratios,
                        const int64_t *most, int64_t *levels, int64_t *sizes, int64_t *upcoming,
                        int64_t *targets) {
    for (int64_t tree = 0; tree < trees; tree++, sizes += MAX_LEVELS, targets += width) {
        int64_t next = upcoming[tree];
        for (int64_t at = 0; at < width; at++) {
            targets[at] = -1;
            if (at >= coming[tree])
                continue;
            int64_t target = next < most[tree] - 1 ? next : most[tree] - 1;
            double ratio = ratios[target > 0];
            next = 0;
            if (target == levels[tree])
                levels[tree]++;
            else if (target == levels[tree] - 1)
                next = sizes[target] + 1 == (int64_t)ceil(1 / ratio) ? target + 1 : 0;
            else if ((double)(sizes[target] + 1) >= (double)sizes[target + 1] / ratio)
                next = target + 1;
            sizes[target]++;
            targets[at] = target;
        }
        upcoming[tree] = next;
    }
}
