/* Search in a tree of keys for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

#include "vectors.h"

typedef int8_t NAME(bytes) __attribute__((vector_size(LANES)));
typedef int16_t NAME(shorts) __attribute__((vector_size(2 * LANES)));

/* Products of a query with the keys of at most LANES rows. */
TARGET INLINE floats NAME(key_products)(const floats *query, const char **rows, int64_t count,
                                        int64_t item_bytes, int64_t dim) {
    floats sums[LANES] = {{0}};
    for (int64_t b = 0; b < count; b++) {
        sums[b] = query[0] * NAME(load)(rows[b], 0, dim, item_bytes == 2);
        for (int64_t v = 1; v < (dim + LANES - 1) / LANES; v++)
            sums[b] += query[v] * NAME(load)(rows[b], v * LANES, dim, item_bytes == 2);
    }
    return NAME(sum_each)(sums);
}

/* Products of a query with the coded means of at most LANES cells, without their scales. */
TARGET INLINE floats NAME(mean_products)(const floats *query, const int8_t **means, int64_t count,
                                         int64_t dim) {
    floats sums[LANES] = {{0}};
    for (int64_t b = 0; b < count; b++) {
        for (int64_t v = 0; v < (dim + LANES - 1) / LANES; v++) {
            NAME(bytes) codes = {0};
            int64_t rest = dim - v * LANES;
            memcpy(&codes, means[b] + v * LANES, rest < LANES ? (size_t)rest : sizeof codes);
            /* in steps that have an instruction each */
            NAME(shorts) wide = __builtin_convertvector(codes, NAME(shorts));
            sums[b] += query[v] * __builtin_convertvector(__builtin_convertvector(wide, ints), floats);
        }
    }
    return NAME(sum_each)(sums);
}

/* Compare the members of a page: the page is ranked by the best, cells by their means. */
TARGET INLINE void NAME(compare_page)(const struct tree_search *call, const floats *query,
                                      int64_t tree, int64_t page, int64_t level,
                                      struct ranking *pages, struct ranking *cells, int64_t dim) {
    const int32_t *members = call->members + (call->page_bases[tree] + page) * call->page;
    int64_t fill = call->fills[call->page_bases[tree] + page], cell_base = call->cell_bases[tree];
    int is_by_means = level && call->means;
    float best = -INFINITY;
    for (int64_t first = 0; first < fill; first += LANES) {
        int64_t count = fill - first < LANES ? fill - first : LANES;
        const char *rows[LANES];
        const int8_t *means[LANES];
        for (int64_t b = 0; b < count; b++) {
            rows[b] = row_of_member(call, tree, members[first + b], level);
            if (is_by_means)
                means[b] = call->means + (cell_base + members[first + b]) * dim;
        }
        floats dots = NAME(key_products)(query, rows, count, call->item_bytes, dim), scores = dots;
        if (is_by_means)
            scores = NAME(mean_products)(query, means, count, dim);
        for (int64_t b = 0; b < count; b++) {
            int64_t cell = cell_base + members[first + b];
            best = dots[b] > best ? dots[b] : best;
            if (level)
                insert_ranked(cells, is_by_means ? scores[b] * call->scales[cell] : scores[b],
                              members[first + b]);
        }
    }
    insert_ranked(pages, best, page);
}

TARGET INLINE void NAME(descend)(const struct tree_search *call, int64_t tree, const floats *query,
                                 struct ranking *pages, struct ranking *cells, int64_t *chosen,
                                 int32_t *listed, int64_t *seen, int64_t dim) {
    int64_t wide = 1;
    chosen[0] = 0;
    for (int64_t level = call->levels[tree] - 1; level >= 0; level--) {
        cells->held = 0;
        int64_t count = list_pages(call, tree, chosen, wide, listed);
        for (int64_t p = -MEMBERS_AHEAD; p < count; p++) {
            if (p + MEMBERS_AHEAD < count)
                fetch_members(call, tree, listed[p + MEMBERS_AHEAD]);
            if (p + KEYS_AHEAD >= 0 && p + KEYS_AHEAD < count)
                fetch_page(call, tree, listed[p + KEYS_AHEAD], level, call->means);
            if (p < 0)
                continue;
            NAME(compare_page)(call, query, tree, listed[p], level, pages, cells, dim);
            *seen += call->fills[call->page_bases[tree] + listed[p]];
        }
        wide = cells->held;
        memcpy(chosen, cells->numbers, (size_t)wide * sizeof *chosen);
    }
}

/* Search of one query head. Returns 0, or 1 if memory is short. */
TARGET static int NAME(search)(const struct tree_search *call, int64_t head) {
    int64_t tree = head * call->trees / call->heads, dim = call->head_dim, seen = 0;
    int64_t cells_there = call->cell_bases[tree + 1] - call->cell_bases[tree];
    int64_t width = call->beams[tree] < cells_there ? call->beams[tree] : cells_there;
    width = width > 1 ? width : 1;
    int64_t pages_there = call->page_bases[tree + 1] - call->page_bases[tree];
    int64_t *chosen = malloc((size_t)width * (2 * sizeof(int64_t) + sizeof(float)) +
                             (size_t)call->count * sizeof(float) +
                             (size_t)pages_there * sizeof(int32_t));
    if (!chosen)
        return 1;
    floats query[MAX_VECTORS];
    for (int64_t v = 0; v < (dim + LANES - 1) / LANES; v++)
        query[v] = NAME(load)(call->queries + head * dim, v * LANES, dim, 0);
    struct ranking cells = {(float *)(chosen + 2 * width), chosen + width, 0, width};
    struct ranking pages = {cells.values + width, call->ranked + head * call->count, 0, call->count};
    int32_t *listed = (int32_t *)(pages.values + call->count);
#define DESCEND(dim) NAME(descend)(call, tree, query, &pages, &cells, chosen, listed, &seen, dim)
    switch (dim) {
    case 64: DESCEND(64); break;
    case 128: DESCEND(128); break;
    default: DESCEND(dim);
    }
#undef DESCEND
    call->seen[head] = seen;
    free(chosen);
    return 0;
}

#include "vectors_end.h"
