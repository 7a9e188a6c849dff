/* Removal of rows from ragged storage: which entries stay, how rows move, and the moves. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "c_library.h"
#include "removal.h"

/* Index of the lowest of `count` scores, the last of equals. */
static int64_t find_last_lowest(const float *scores, int64_t count) {
    float lanes[LANES], low = INFINITY;
    int64_t whole = count - count % LANES, found = count - 1;
    for (int l = 0; l < LANES; l++)
        lanes[l] = INFINITY;
    for (int64_t s = 0; s < whole; s += LANES)
        for (int l = 0; l < LANES; l++)
            lanes[l] = scores[s + l] < lanes[l] ? scores[s + l] : lanes[l];
    for (int l = 0; l < LANES; l++)
        low = lanes[l] < low ? lanes[l] : low;
    for (int64_t s = whole; s < count; s++)
        low = scores[s] < low ? scores[s] : low;
    while (scores[found] != low)
        found--;
    return found;
}

/* Find the `gone` lowest of `count` scores, ascending by index; returns how many there are. Of equals
 * the later one is lower; scores of spared entries count as infinite. */
int64_t larder_find_lowest(const float *scores, const uint8_t *spared, int64_t count, int64_t gone,
                           int64_t *worst) {
    int64_t found = 0;
    float values[MOST_REJECTED];
    if (gone == 1 && !spared && count > 0) {
        worst[0] = find_last_lowest(scores, count);
        return 1;
    }
    for (int64_t s = 0; gone > 0 && s < count; s++) {
        float score = spared && spared[s] ? INFINITY : scores[s];
        if (found == gone && score > values[found - 1])
            continue;
        int64_t i = found < gone ? found++ : found - 1;
        for (; i > 0 && score <= values[i - 1]; i--) {
            values[i] = values[i - 1];
            worst[i] = worst[i - 1];
        }
        values[i] = score;
        worst[i] = s;
    }
    for (int64_t i = 1; i < found; i++)
        for (int64_t j = i; j > 0 && worst[j] < worst[j - 1]; j--) {
            int64_t other = worst[j];
            worst[j] = worst[j - 1];
            worst[j - 1] = other;
        }
    return found;
}

/* Write the packed indices of all but the lowest scores of every head, at most MOST_REJECTED of
 * which go. */
void larder_keep_highest(const float *scores, const uint8_t *spared, const int64_t *lengths,
                         int64_t heads, int64_t count, int64_t *kept) {
    for (int64_t h = 0, first = 0; h < heads; first += lengths[h++]) {
        int64_t worst[MOST_REJECTED];
        int64_t found = larder_find_lowest(scores + first, spared ? spared + first : NULL,
                                           lengths[h], lengths[h] - count, worst);
        for (int64_t w = 0, s = 0; w <= found; w++, s++)
            for (int64_t end = w < found ? worst[w] : lengths[h]; s < end; s++)
                *kept++ = first + s;
    }
}

/* True if entries do not ascend within [offset, offset + length). */
static int are_misplaced(const int64_t *own, int64_t size, int64_t offset, int64_t length) {
    int64_t astray = 0;
    for (int64_t i = 1; i < size; i++)
        astray += own[i] <= own[i - 1];
    return astray || (size && (own[0] < offset || own[size - 1] >= offset + length));
}

/* First head with invalid kept entries, or -1; `rows` is set to the number of rows to move. */
int64_t larder_check_kept(const int64_t *kept, const int64_t *starts, const int64_t *new_starts,
                          const int64_t *lengths, const int64_t *new_lengths, int64_t heads,
                          int64_t *rows) {
    *rows = 0;
    for (int64_t h = 0, offset = 0; h < heads; h++) {
        int64_t still = 0, shift = offset + new_starts[h] - starts[h];
        if (are_misplaced(kept, new_lengths[h], offset, lengths[h]))
            return h;
        for (int64_t i = 0; i < new_lengths[h]; i++)
            still += kept[i] == i + shift;
        *rows += new_lengths[h] - still;
        kept += new_lengths[h];
        offset += lengths[h];
    }
    return -1;
}

/* Number of a head's kept entries that lie less than `shift` rows behind their new places. */
static int64_t count_shifted_below(const int64_t *own, int64_t size, int64_t offset,
                                   int64_t shift) {
    int64_t low = 0, high = size;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (own[middle] - offset - middle < shift)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Plan that moves the front of a head down where that moves fewer rows than its end. Returns the
 * first head with invalid kept entries, or -1; `least` and `moved` are set to the least slack
 * behind a head and the number of rows to move. */
int64_t larder_plan_removal(const int64_t *kept, const int64_t *starts, const int64_t *lengths,
                            const int64_t *new_lengths, const int64_t *edges, int64_t heads,
                            int64_t roomy, int64_t *new_starts, int64_t *least, int64_t *moved) {
    *least = edges[heads];
    *moved = 0;
    for (int64_t h = 0, offset = 0; h < heads; h++) {
        int64_t held = new_lengths[h], gone = lengths[h] - held;
        if (are_misplaced(kept, held, offset, lengths[h]))
            return h;
        /* The distance of an entry to its place among the kept ones never decreases. */
        int64_t front = count_shifted_below(kept, held, offset, 1); /* if the end moves up */
        int64_t still = held - count_shifted_below(kept, held, offset, gone); /* if the front goes */
        new_starts[h] = starts[h];
        if (edges[h + 1] - edges[h] - held >= roomy && still > front) {
            new_starts[h] += gone;
            front = still;
        }
        *moved += held - front;
        int64_t slack = edges[h + 1] - new_starts[h] - held;
        *least = slack < *least ? slack : *least;
        kept += held;
        offset += lengths[h];
    }
    return -1;
}

struct move {
    char *const *storages;
    const int64_t *row_bytes;
    int64_t count; /* of storages */
    const int64_t *kept;
    const int64_t *starts;
    const int64_t *new_starts;
    const int64_t *lengths;
    const int64_t *new_lengths;
    int64_t heads;
    int64_t shares;
    int64_t next; /* share that no thread has taken */
};

static void move_run(const struct move *move, int64_t target, int64_t source, int64_t rows) {
    for (int64_t m = 0; m < move->count; m++) {
        int64_t size = move->row_bytes[m];
        memmove(move->storages[m] + target * size, move->storages[m] + source * size,
                (size_t)(rows * size));
    }
}

/* Move each run of kept rows: first those that move down, in reverse; then those that move up. The
 * shift grows along the rows with the number of removed rows before them, so all rows that move
 * down come before all that move up. */
static void move_head(const struct move *move, int64_t h, const int64_t *own, int64_t offset) {
    int64_t size = move->new_lengths[h], to = move->new_starts[h], split = 0, i;
    int64_t ahead = move->starts[h] - offset - to; /* row i comes from own[i] + ahead, from `to` on */
    while (split < size && own[split] + ahead < split)
        split++;
    for (int64_t stop = split; stop > 0; stop = i) {
        i = stop - 1;
        int64_t shift = own[i] + ahead - i;
        while (i > 0 && own[i - 1] + ahead - (i - 1) == shift)
            i--;
        move_run(move, to + i, to + i + shift, stop - i);
    }
    for (int64_t stop = i = split; i < size; i = stop) {
        int64_t shift = own[i] + ahead - i;
        while (stop < size && own[stop] + ahead - stop == shift)
            stop++;
        if (shift > 0)
            move_run(move, to + i, to + i + shift, stop - i);
    }
}

/* Every `shares`-th head of each share that this thread takes; regions of heads do not overlap. */
static void move_as_thread(void *given) {
    struct move *move = given;
    for (int64_t s; (s = __atomic_fetch_add(&move->next, 1, __ATOMIC_RELAXED)) < move->shares;) {
        const int64_t *own = move->kept;
        for (int64_t h = 0, offset = 0; h < move->heads; h++) {
            if (h % move->shares == s)
                move_head(move, h, own, offset);
            own += move->new_lengths[h];
            offset += move->lengths[h];
        }
    }
}

void larder_move_rows(struct move *move) {
    move->next = 0;
    larder_parallel(move_as_thread, move, (int)move->shares);
}

/* Removal of rows from the storage of one layer, whose starts and lengths change in place; filled by
 * `RemovalTable` of removal.py. */
struct removal {
    char *const *storages;
    const int64_t *row_bytes;
    const int64_t *kept;
    const int64_t *new_lengths;
    const int64_t *edges;
    int64_t *new_starts;
    int64_t *starts;
    int64_t *lengths;
    int64_t count; /* of storages */
    int64_t heads;
    int64_t room; /* least slack behind a head after the removal */
    int64_t bad;  /* first head with invalid kept entries, or -1 */
};

/* Plan removals as `larder_plan_removal` does; nothing moves. Returns the number of rows to move. */
int64_t larder_plan_removals(struct removal *layers, int64_t count, int64_t roomy) {
    int64_t rows = 0, moved;
    for (struct removal *own = layers; own < layers + count; own++) {
        own->bad = larder_plan_removal(own->kept, own->starts, own->lengths, own->new_lengths,
                                       own->edges, own->heads, roomy, own->new_starts, &own->room,
                                       &moved);
        rows += moved;
    }
    return rows;
}

struct removals {
    struct removal *layers;
    int64_t count;
    int64_t next; /* layer that no thread has taken */
};

static void remove_as_thread(void *given) {
    struct removals *all = given;
    for (int64_t n; (n = __atomic_fetch_add(&all->next, 1, __ATOMIC_RELAXED)) < all->count;) {
        const struct removal *own = all->layers + n;
        struct move move = {.storages = own->storages,
                            .row_bytes = own->row_bytes,
                            .count = own->count,
                            .kept = own->kept,
                            .starts = own->starts,
                            .new_starts = own->new_starts,
                            .lengths = own->lengths,
                            .new_lengths = own->new_lengths,
                            .heads = own->heads,
                            .shares = 1};
        move_as_thread(&move);
        memcpy(own->starts, own->new_starts, (size_t)own->heads * sizeof *own->starts);
        memcpy(own->lengths, own->new_lengths, (size_t)own->heads * sizeof *own->lengths);
    }
}

/* Carry out planned removals of layers with storage of their own. */
void larder_remove_planned(struct removal *layers, int64_t count, int64_t threads) {
    struct removals all = {.layers = layers, .count = count};
    larder_parallel(remove_as_thread, &all, (int)threads);
}
