/* Search of query heads in trees of keys (DCI); ops/cpu/dci_kernels.py describes the arrays.
 *
 * Each query descends from the top; on every level the members of the best cells are compared. A
 * query's result depends on nothing but its own tree.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "tree_search.h"

#define CACHE_LINE 64 /* bytes */
#define KEYS_AHEAD 4     /* pages whose keys are fetched before they are compared */
#define MEMBERS_AHEAD 16 /* the same of the numbers of their entries */

/* List of numbers, the highest value first, ties to the lower number. */
struct ranking {
    float *values;
    int64_t *numbers;
    int64_t held, room;
};

static int precedes(float value, int64_t number, float other, int64_t other_number) {
    return value > other || (value == other && number < other_number);
}

static void insert_below(struct ranking *list, float value, int64_t number) {
    int64_t at = list->held;
    if (at == list->room)
        at--;
    else
        list->held++;
    for (; at > 0 && precedes(value, number, list->values[at - 1], list->numbers[at - 1]); at--) {
        list->values[at] = list->values[at - 1];
        list->numbers[at] = list->numbers[at - 1];
    }
    list->values[at] = value;
    list->numbers[at] = number;
}

/* Key of a member of a page: an entry on level 0, the center of a cell above. */
static const char *row_of_member(const struct tree_search *call, int64_t tree, int64_t number,
                                 int64_t level) {
    int64_t entry = level ? call->centers[call->cell_bases[tree] + number] : number;
    return (const char *)call->keys +
           (call->starts[tree] + entry) * call->head_dim * call->item_bytes;
}

/* Have the keys of a page, and the means of its cells, on their way to the processor's cache. */
INLINE void fetch_page(const struct tree_search *call, int64_t tree, int64_t page, int64_t level) {
    page += call->page_bases[tree];
    for (int64_t b = 0; b < call->fills[page]; b++) {
        int64_t member = call->members[page * call->page + b];
        const char *row = row_of_member(call, tree, member, level);
        for (int64_t byte = 0; byte < call->head_dim * call->item_bytes; byte += CACHE_LINE)
            __builtin_prefetch(row + byte, 0, 2);
        const int8_t *mean = call->means + (call->cell_bases[tree] + member) * call->head_dim;
        for (int64_t byte = 0; level && call->means && byte < call->head_dim; byte += CACHE_LINE)
            __builtin_prefetch(mean + byte, 0, 2);
    }
}

/* The same of the numbers of its entries. */
INLINE void fetch_members(const struct tree_search *call, int64_t tree, int64_t page) {
    page += call->page_bases[tree];
    __builtin_prefetch(call->fills + page);
    __builtin_prefetch(call->members + page * call->page);
}

/* Pages of the cells that a search visits on a level, in order; returns their number. */
INLINE int64_t list_pages(const struct tree_search *call, int64_t tree, const int64_t *cells,
                          int64_t count, int32_t *listed) {
    const int32_t *firsts = call->firsts + call->cell_bases[tree];
    const int32_t *nexts = call->nexts + call->page_bases[tree];
    int64_t held = 0;
    for (int64_t c = 0; c < count; c++)
        for (int32_t page = firsts[cells[c]]; page >= 0; page = nexts[page])
            listed[held++] = page;
    return held;
}

INLINE void insert_ranked(struct ranking *list, float value, int64_t number) {
    int64_t last = list->room - 1;
    if (list->held <= last ||
        (last >= 0 && precedes(value, number, list->values[last], list->numbers[last])))
        insert_below(list, value, number);
}

typedef int (*search_function)(const struct tree_search *, int64_t);

#define BODY "tree_search_body.h"
#include "instruction_sets.h"

static const search_function search_forms[] = FORMS(search);

struct heads {
    const struct tree_search *call;
    int next; /* head that no thread has taken */
    int failed;
};

static void search_as_thread(void *given) {
    struct heads *heads = given;
    search_function search = search_forms[larder_instruction_set()];
    for (int64_t h; (h = __atomic_fetch_add(&heads->next, 1, __ATOMIC_RELAXED)) < heads->call->heads;)
        if (search(heads->call, h))
            __atomic_store_n(&heads->failed, 1, __ATOMIC_RELAXED);
}

/* Returns 0, or 1 if memory is short. */
int larder_tree_search(const struct tree_search *call) {
    struct heads heads = {.call = call};
    larder_parallel(search_as_thread, &heads, (int)call->threads);
    return heads.failed;
}
