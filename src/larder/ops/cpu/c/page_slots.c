/* Loading of pages into slots; cache/offload/page_pool.py has the readable form. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "page_slots.h"

#define NO_PAGE -1
#define CACHE_LINE 64 /* bytes */
#define PAGES_AHEAD 4 /* pages of which those that move are fetched before they are copied */

/* Slot of each requested page: its present one, or the first that is not requested. */
static void choose_slots(const struct page_load *call, int64_t set, int64_t *into, char *taken) {
    const int64_t *pages = call->pages + set * call->width;
    const int64_t *versions = call->versions + set * call->width;
    const int64_t *held = call->slot_versions + set * call->slots;
    const int32_t *table = call->table + set * call->table_width;
    memset(taken, 0, (size_t)call->slots);
    for (int64_t r = 0; r < call->width; r++) {
        int64_t at = pages[r] < 0 ? NO_PAGE : table[pages[r]];
        into[r] = at >= 0 && held[at] == versions[r] ? at : NO_PAGE;
        if (into[r] >= 0)
            taken[into[r]] = 1;
    }
    int64_t free_slot = 0;
    for (int64_t r = 0; r < call->width; r++)
        if (pages[r] >= 0 && into[r] < 0) {
            while (taken[free_slot])
                free_slot++;
            into[r] = free_slot++;
        }
}

static void copy_page(const struct page_load *call, int64_t set, int64_t r, int64_t slot) {
    const int64_t *numbers = call->numbers + (set * call->width + r) * call->page;
    int64_t start = call->starts[set / (call->sets / call->kv_heads)], bytes = call->row_bytes;
    for (int64_t s = 0; s < call->page; s++) {
        if (numbers[s] < 0)
            continue;
        int64_t from = (start + numbers[s]) * bytes;
        int64_t to = ((set * call->slots + slot) * call->page + s) * bytes;
        memcpy(call->slot_keys + to, call->keys + from, (size_t)bytes);
        memcpy(call->slot_values + to, call->values + from, (size_t)bytes);
    }
}

/* Have the entries of a page on their way to the processor's cache. */
static void fetch_entries(const struct page_load *call, int64_t set, int64_t r) {
    const int64_t *numbers = call->numbers + (set * call->width + r) * call->page;
    int64_t start = call->starts[set / (call->sets / call->kv_heads)], bytes = call->row_bytes;
    for (int64_t s = 0; s < call->page; s++)
        for (int64_t byte = 0; numbers[s] >= 0 && byte < bytes; byte += CACHE_LINE) {
            __builtin_prefetch(call->keys + (start + numbers[s]) * bytes + byte, 0, 2);
            __builtin_prefetch(call->values + (start + numbers[s]) * bytes + byte, 0, 2);
        }
}

/* Move the requested pages that are not in their slots, and record where they are. */
static void move_pages(struct page_load *call, int64_t set, const int64_t *into, char *moves) {
    const int64_t *pages = call->pages + set * call->width;
    const int64_t *versions = call->versions + set * call->width;
    int64_t *held = call->slot_pages + set * call->slots;
    int64_t *held_versions = call->slot_versions + set * call->slots;
    int32_t *table = call->table + set * call->table_width;
    for (int64_t r = 0; r < call->width; r++) {
        moves[r] = pages[r] >= 0 &&
                   (held[into[r]] != pages[r] || held_versions[into[r]] != versions[r]);
        if (moves[r] && held[into[r]] >= 0)
            table[held[into[r]]] = NO_PAGE;
    }
    int64_t ahead = 0; /* page whose entries are fetched next */
    for (int64_t r = 0; r < call->width; r++) {
        if (!moves[r])
            continue;
        for (; ahead < call->width && ahead <= r + PAGES_AHEAD; ahead++)
            if (moves[ahead])
                fetch_entries(call, set, ahead);
        copy_page(call, set, r, into[r]);
        int64_t stale = table[pages[r]]; /* former slot of a page whose contents changed */
        if (stale >= 0 && stale != into[r])
            held[stale] = NO_PAGE;
        table[pages[r]] = (int32_t)into[r];
        held[into[r]] = pages[r];
        held_versions[into[r]] = versions[r];
        call->moved++;
    }
}

static void mark_entries(const struct page_load *call, int64_t set, const int64_t *into) {
    int64_t rows = call->slots * call->page, seen = 0;
    float *biases = call->biases + set * rows;
    for (int64_t row = 0; row < rows; row++)
        biases[row] = call->masked;
    for (int64_t r = 0; r < call->width; r++)
        for (int64_t s = 0; s < call->page && call->pages[set * call->width + r] >= 0; s++)
            if (call->numbers[(set * call->width + r) * call->page + s] >= 0) {
                biases[into[r] * call->page + s] = 0;
                seen = 1;
            }
    call->counts[set] = seen * rows;
}

void larder_load_set(struct page_load *call, int64_t set, int64_t *into, char *taken) {
    choose_slots(call, set, into, taken + call->width);
    move_pages(call, set, into, taken);
    mark_entries(call, set, into);
}

/* Returns 0, or 1 if memory is short. */
int larder_load_pages(struct page_load *call) {
    int64_t *into = malloc((size_t)(call->width + 1) * sizeof *into +
                           (size_t)(call->width + call->slots));
    if (!into)
        return 1;
    call->moved = 0;
    for (int64_t set = 0; set < call->sets; set++)
        larder_load_set(call, set, into, (char *)(into + call->width));
    free(into);
    return 0;
}
