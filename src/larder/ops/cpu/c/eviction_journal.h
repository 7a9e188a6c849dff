/* Journal of an eviction behind a decode step: what it overwrites in a layer, so that it can be
 * undone while the step has not ended. */

#ifndef LARDER_EVICTION_JOURNAL_H
#define LARDER_EVICTION_JOURNAL_H

#include <stdint.h>

#include "decode_eviction.h"

/* Bytes of the journal of a layer. */
int64_t larder_journal_bytes(const struct evicted *layer);

/* Each does nothing for a layer without a journal. */
void larder_note_numbers(const struct evicted *layer); /* before columns and thresholds change */
void larder_note_rejected(const struct evicted *layer, const struct rejected *gone);
void larder_note_merged(const struct evicted *layer, int64_t row); /* before its value changes */

/* Give layers the entries and numbers from before their eviction. */
void larder_undo_evictions(struct evicted *layers, int64_t count);

#endif
