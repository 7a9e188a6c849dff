/* Search of query heads in trees of keys. */

#ifndef LARDER_TREE_SEARCH_H
#define LARDER_TREE_SEARCH_H

#include <stdint.h>

struct tree_search {
    const float *queries; /* [heads, head_dim] */
    const void *keys;     /* [stored rows, head_dim], float32 or bfloat16 by item_bytes */
    const int64_t *starts, *levels, *beams; /* of each tree */
    const int64_t *page_bases, *cell_bases; /* [trees + 1] */
    const int32_t *members;                 /* [pages, page] */
    const int16_t *fills;
    const int32_t *nexts;
    const int32_t *firsts, *centers; /* of each cell */
    const float *scales;
    const int8_t *means; /* [cells, head_dim], or NULL */
    int64_t *ranked;     /* [heads, count], filled with -1 */
    int64_t *seen;       /* [heads] */
    int64_t heads, trees, head_dim, item_bytes, page, count;
    int64_t threads;
};

/* Returns 0, or 1 if memory is short. */
int larder_tree_search(const struct tree_search *call);

#endif
