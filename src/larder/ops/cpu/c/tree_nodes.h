/* Cells and pages of trees of keys, for search and insertion. */

#ifndef LARDER_TREE_NODES_H
#define LARDER_TREE_NODES_H

#include <stdint.h>

#include "c_library.h"
#include "tree_search.h"

#define CACHE_LINE 64    /* bytes */
#define KEYS_AHEAD 4     /* pages whose keys are fetched before they are compared */
#define MEMBERS_AHEAD 16 /* the same of the numbers of their entries */

/* List of numbers, the highest value first, ties to the lower number. */
struct ranking {
    float *values;
    int64_t *numbers;
    int64_t held, room;
};

INLINE int precedes(float value, int64_t number, float other, int64_t other_number) {
    return value > other || (value == other && number < other_number);
}

INLINE void insert_below(struct ranking *list, float value, int64_t number) {
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
INLINE const char *row_of_member(const struct tree_search *call, int64_t tree, int64_t number,
                                 int64_t level) {
    int64_t entry = level ? call->centers[call->cell_bases[tree] + number] : number;
    return (const char *)call->keys +
           (call->starts[tree] + entry) * call->head_dim * call->item_bytes;
}

/* Have the keys of a page, and `means` of its cells unless NULL, on their way to the processor's
 * cache. */
INLINE void fetch_page(const struct tree_search *call, int64_t tree, int64_t page, int64_t level,
                       const int8_t *means) {
    page += call->page_bases[tree];
    for (int64_t b = 0; b < call->fills[page]; b++) {
        int64_t member = call->members[page * call->page + b];
        const char *row = row_of_member(call, tree, member, level);
        for (int64_t byte = 0; byte < call->head_dim * call->item_bytes; byte += CACHE_LINE)
            __builtin_prefetch(row + byte, 0, 2);
        if (!level || !means)
            continue;
        const int8_t *mean = means + (call->cell_bases[tree] + member) * call->head_dim;
        for (int64_t byte = 0; byte < call->head_dim; byte += CACHE_LINE)
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

#endif
