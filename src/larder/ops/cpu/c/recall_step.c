/* Decode step of a layer over recalled entries: search, loading of pages and attention.
 *
 * cache/offload/page_fetch.py has the readable form: a call for each of the three, with the same
 * pages, slots and bits.
 */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "decode_attention.h"
#include "page_slots.h"
#include "tree_search.h"

enum outcome { DONE, NO_MEMORY, NO_ROOM };

struct recall_step {
    const struct tree_search *search; /* what it finds is kept here */
    struct page_load *slots;          /* of one set for each tree; what to load is found here */
    const int32_t *versions;          /* of each page of the trees */
    const int8_t *tiers;
    int64_t *pages; /* out: of each tree [trees, count], -1 behind the last */
    const struct attention *attention; /* calls, behind the loading */
    int64_t count;
    int64_t requested; /* out: pages of all sets, 0 where none were loaded */
    int64_t width;     /* out: most pages of a set */
    int64_t most;      /* out: highest number of a page, and 1 */
};

/* Pages found for each tree, and the sets that threads load. */
struct found {
    struct recall_step *step;
    int64_t *held; /* pages of each tree */
    char *scratch;
    size_t scratch_bytes; /* of a thread */
    int next;             /* set that no thread has taken */
    int threads;          /* that have scratch */
};

/* Pages of a group of query heads, the best of each in turn, each once. Returns their number.
 *
 * taken: a zero for each page, as it is left. */
static int64_t interleave(const int64_t *ranked, int64_t group, int64_t count, int64_t *pages,
                          char *taken) {
    int64_t held = 0;
    for (int64_t rank = 0; rank < count; rank++)
        for (int64_t head = 0; head < group && held < count; head++) {
            int64_t page = ranked[head * count + rank];
            if (page < 0 || taken[page])
                continue;
            taken[page] = 1;
            pages[held++] = page;
        }
    for (int64_t p = 0; p < held; p++)
        taken[pages[p]] = 0;
    return held;
}

static void choose_pages(struct found *found, const int64_t *ranked, char *taken) {
    struct recall_step *step = found->step;
    const struct tree_search *search = step->search;
    int64_t group = search->heads / search->trees, count = search->count;
    for (int64_t tree = 0; tree < search->trees; tree++) {
        int64_t *pages = step->pages + tree * count;
        found->held[tree] = interleave(ranked + tree * group * count, group, count, pages, taken);
        step->width = found->held[tree] > step->width ? found->held[tree] : step->width;
        for (int64_t p = 0; p < found->held[tree]; p++)
            step->most = pages[p] >= step->most ? pages[p] + 1 : step->most;
    }
}

/* Entries of a page, -1 behind the last. */
static void read_page(const struct recall_step *step, int64_t tree, int64_t page, int64_t *numbers) {
    const struct tree_search *search = step->search;
    const int32_t *centers = search->centers + search->cell_bases[tree];
    const int32_t *members = search->members + (search->page_bases[tree] + page) * search->page;
    int is_upper = step->tiers[search->page_bases[tree] + page] > 0;
    for (int64_t s = 0; s < search->page; s++)
        numbers[s] = is_upper && members[s] >= 0 ? centers[members[s]] : members[s];
}

static void load_tree(const struct found *found, int64_t tree, char *scratch) {
    const struct recall_step *step = found->step;
    const struct tree_search *search = step->search;
    const struct page_load *slots = step->slots;
    int64_t held = found->held[tree], rows = slots->slots * slots->page;
    int64_t *into = (int64_t *)scratch, *versions = into + search->count;
    int64_t *numbers = versions + search->count;
    struct page_load own = *slots;
    own.pages = step->pages + tree * search->count;
    own.versions = versions;
    own.numbers = numbers;
    own.starts += tree;
    own.slot_keys += tree * rows * slots->row_bytes;
    own.slot_values += tree * rows * slots->row_bytes;
    own.biases += tree * rows;
    own.counts += tree;
    own.slot_pages += tree * slots->slots;
    own.slot_versions += tree * slots->slots;
    own.table += tree * slots->table_width;
    own.sets = own.kv_heads = 1;
    own.width = held;
    own.moved = 0;
    for (int64_t p = 0; p < held; p++) {
        versions[p] = step->versions[search->page_bases[tree] + own.pages[p]];
        read_page(step, tree, own.pages[p], numbers + p * search->page);
    }
    larder_load_set(&own, 0, into, (char *)(numbers + search->count * search->page));
    __atomic_fetch_add(&step->slots->moved, own.moved, __ATOMIC_RELAXED);
}

static void load_as_thread(void *given) {
    struct found *found = given;
    int thread = __atomic_fetch_add(&found->threads, 1, __ATOMIC_RELAXED);
    char *scratch = found->scratch + (size_t)thread * found->scratch_bytes;
    for (int64_t t; (t = __atomic_fetch_add(&found->next, 1, __ATOMIC_RELAXED)) <
                    found->step->search->trees;)
        load_tree(found, t, scratch);
}

/* Search and load. Returns an outcome. */
static int recall(struct recall_step *step) {
    struct tree_search search = *step->search;
    size_t count = (size_t)search.count, heads = (size_t)search.heads, trees = (size_t)search.trees;
    size_t most = 0, slots = (size_t)step->slots->slots;
    for (size_t tree = 0; tree < trees; tree++) {
        size_t pages = (size_t)(search.page_bases[tree + 1] - search.page_bases[tree]);
        most = pages > most ? pages : most;
    }
    struct found found = {.step = step};
    found.scratch_bytes = (count * (2 + (size_t)search.page) * sizeof(int64_t) + count + slots + 7) /
                          8 * 8;
    size_t numbers = heads * count + heads + trees;
    int64_t *ranked = malloc(numbers * sizeof(int64_t) +
                             (size_t)search.threads * found.scratch_bytes);
    char *taken = calloc(most + 1, 1);
    int failed = !ranked || !taken ? NO_MEMORY : DONE;
    if (!failed) {
        search.ranked = ranked;
        search.seen = ranked + heads * count;
        found.held = search.seen + heads;
        found.scratch = (char *)(found.held + trees);
        memset(ranked, -1, heads * count * sizeof *ranked);
        memset(step->pages, -1, trees * count * sizeof *step->pages);
        failed = larder_tree_search(&search) ? NO_MEMORY : DONE;
    }
    if (!failed) {
        choose_pages(&found, ranked, taken);
        if (step->width > step->slots->slots || step->most > step->slots->table_width)
            failed = NO_ROOM;
    }
    if (!failed) {
        larder_parallel(load_as_thread, &found, (int)search.threads);
        for (size_t tree = 0; tree < trees; tree++)
            step->requested += found.held[tree];
    }
    free(ranked);
    free(taken);
    return failed;
}

/* Search, load what was found, and attend. Returns DONE, NO_MEMORY, or NO_ROOM if `slots` have no
 * room for what was found; nothing is changed then. Pages stay loaded where attention fails. */
int larder_recall_step(struct recall_step *step) {
    step->requested = step->width = step->most = 0;
    step->slots->moved = 0;
    int failed = recall(step);
    for (int64_t call = 0; call < step->count && !failed; call++)
        failed = larder_decode_attention(step->attention + call) ? NO_MEMORY : DONE;
    return failed;
}
