/* Loading of pages into slots. */

#ifndef LARDER_PAGE_SLOTS_H
#define LARDER_PAGE_SLOTS_H

#include <stdint.h>

struct page_load {
    const int64_t *pages, *versions; /* [sets, width], -1 behind the last page of a set */
    const int64_t *numbers;          /* [sets, width, page], -1 behind the last entry of a page */
    const int64_t *starts;           /* row of the first entry of each kv head */
    const char *keys, *values;       /* stored rows */
    char *slot_keys, *slot_values;   /* [sets, slots, page] rows */
    float *biases;                   /* [sets, slots, page] */
    int64_t *counts;                 /* [sets]: rows that attention reads */
    int64_t *slot_pages, *slot_versions; /* [sets, slots] */
    int32_t *table;                      /* [sets, table_width]: the slot of each page */
    int64_t sets, width, slots, page, kv_heads, table_width, row_bytes;
    float masked;
    int32_t moved; /* out: pages copied */
};

int larder_load_pages(struct page_load *call);

/* Load the pages of one set, and count those that were copied.
 *
 * into: for a number for each page; taken: for a byte for each page and each slot. */
void larder_load_set(struct page_load *call, int64_t set, int64_t *into, char *taken);

#endif
