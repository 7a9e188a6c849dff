/* Nearest entries among lifted keys for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

#include "vectors.h"

/* Products of a lifted key with the lifted keys of at most LANES rows. The sphere has squared radius
 * `square`; a key outside of it is lifted by 0, and is farther away by what it is longer. */
TARGET INLINE void NAME(lifted_products)(const floats *key, float tail, float square,
                                         const char **rows, int64_t count, int64_t item_bytes,
                                         int64_t dim, float *products) {
    floats dots[LANES] = {{0}}, norms[LANES] = {{0}};
    for (int64_t b = 0; b < count; b++)
        for (int64_t v = 0; v < (dim + LANES - 1) / LANES; v++) {
            floats row = NAME(load)(rows[b], v * LANES, dim, item_bytes == 2);
            dots[b] += key[v] * row;
            norms[b] += row * row;
        }
    floats dot = NAME(sum_each)(dots), rest = square - NAME(sum_each)(norms);
    for (int64_t b = 0; b < count; b++)
        products[b] = dot[b] + (rest[b] > 0 ? tail * sqrtf(rest[b]) : rest[b] / 2);
}

/* Products of a stored key with another row of numbers, and with itself. */
TARGET INLINE void NAME(own_products)(const char *key, const float *other, int64_t item_bytes,
                                      int64_t dim, float *dot, float *norm) {
    floats dots = {0}, norms = {0};
    for (int64_t v = 0; v < (dim + LANES - 1) / LANES; v++) {
        floats row = NAME(load)(key, v * LANES, dim, item_bytes == 2);
        dots += other ? row * NAME(load)(other, v * LANES, dim, 0) : (floats){0};
        norms += row * row;
    }
    *dot = *norm = 0;
    for (int i = 0; i < LANES; i++) {
        *dot += dots[i];
        *norm += norms[i];
    }
}

/* Projection of a lifted key on a direction of dim + 1 numbers. */
TARGET static float NAME(project)(const struct tree_search *call, const char *key,
                                  const float *direction, float square) {
    float dot, norm;
    NAME(own_products)(key, direction, call->item_bytes, call->head_dim, &dot, &norm);
    return dot + (square > norm ? direction[call->head_dim] * sqrtf(square - norm) : 0);
}

/* Compare the members of a page with a key. */
TARGET INLINE void NAME(rank_members)(const struct tree_search *call, const floats *key, float tail,
                                      float square, int64_t tree, int64_t page, int64_t level,
                                      struct ranking *cells, int64_t dim) {
    const int32_t *members = call->members + (call->page_bases[tree] + page) * call->page;
    int64_t fill = call->fills[call->page_bases[tree] + page];
    for (int64_t first = 0; first < fill; first += LANES) {
        int64_t count = fill - first < LANES ? fill - first : LANES;
        const char *rows[LANES];
        float products[LANES];
        for (int64_t b = 0; b < count; b++)
            rows[b] = row_of_member(call, tree, members[first + b], level);
        NAME(lifted_products)(key, tail, square, rows, count, call->item_bytes, dim, products);
        for (int64_t b = 0; b < count; b++)
            insert_ranked(cells, products[b], members[first + b]);
    }
}

/* Compare all cells of level `target` + 1 below a cell, whose pages are of `level`. */
TARGET static void NAME(rank_level)(const struct tree_search *call, const floats *key, float tail,
                                    float square, int64_t tree, int64_t cell, int64_t level,
                                    int64_t target, struct ranking *cells) {
    const int32_t *firsts = call->firsts + call->cell_bases[tree];
    const int32_t *nexts = call->nexts + call->page_bases[tree];
    for (int32_t page = firsts[cell]; page >= 0; page = nexts[page]) {
        if (level == target + 1) {
            NAME(rank_members)(call, key, tail, square, tree, page, level, cells, call->head_dim);
            continue;
        }
        int64_t at = call->page_bases[tree] + page;
        for (int64_t b = 0; b < call->fills[at]; b++)
            NAME(rank_level)(call, key, tail, square, tree, call->members[at * call->page + b],
                             level - 1, target, cells);
    }
}

TARGET INLINE int64_t NAME(nearest)(const struct tree_search *call, int64_t tree, const char *key,
                                    float square, int64_t target, struct descent *space,
                                    int64_t dim) {
    floats numbers[MAX_VECTORS];
    float dot, norm;
    NAME(own_products)(key, NULL, call->item_bytes, dim, &dot, &norm);
    float tail = square > norm ? sqrtf(square - norm) : 0;
    for (int64_t v = 0; v < (dim + LANES - 1) / LANES; v++)
        numbers[v] = NAME(load)(key, v * LANES, dim, call->item_bytes == 2);
    int64_t wide = 1;
    space->chosen[0] = 0;
    for (int64_t level = call->levels[tree] - 1; level > target; level--) {
        struct ranking *cells = &space->cells;
        cells->held = 0;
        int64_t count = list_pages(call, tree, space->chosen, wide, space->listed);
        if (!count) { /* cells opened since, all of them without entries below */
            NAME(rank_level)(call, numbers, tail, square, tree, 0, call->levels[tree] - 1, target,
                             cells);
            return cells->numbers[0];
        }
        for (int64_t p = -KEYS_AHEAD; p < count; p++) {
            if (p + KEYS_AHEAD < count)
                fetch_page(call, tree, space->listed[p + KEYS_AHEAD], level, NULL);
            if (p >= 0)
                NAME(rank_members)(call, numbers, tail, square, tree, space->listed[p], level, cells,
                                   dim);
        }
        wide = cells->held;
        memcpy(space->chosen, cells->numbers, (size_t)wide * sizeof *space->chosen);
    }
    return space->chosen[0];
}

/* Cell for a key of level `target`: that of the nearest lifted entry one level above. */
TARGET static int64_t NAME(nearest_cell)(const struct tree_search *call, int64_t tree,
                                         const char *key, float square, int64_t target,
                                         struct descent *space) {
#define NEAREST(dim) NAME(nearest)(call, tree, key, square, target, space, dim)
    switch (call->head_dim) {
    case 64: return NEAREST(64);
    case 128: return NEAREST(128);
    default: return NEAREST(call->head_dim);
    }
#undef NEAREST
}

#include "vectors_end.h"
