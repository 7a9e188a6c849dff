/* Dequantization of rows for one instruction set; included by decode_attention_body.h. */

/* Numbers of float16; exponents are biased by 15 there and by 127 in float32. */
TARGET INLINE float NAME(half)(uint16_t half) {
    uint32_t bits = (uint32_t)(half & 0x7FFF) << 13 | (uint32_t)(half & 0x8000) << 16;
    float number;
    memcpy(&number, &bits, sizeof number);
    return number * 0x1p112f;
}

/* Codes of one row as float32, plane by plane from the highest bits on. */
TARGET INLINE void NAME(unpack)(const struct coded_side *side, int64_t row, float *numbers) {
    const uint8_t *codes = side->codes + row * side->row_bytes;
    int64_t width = side->width, left = side->bits;
    for (int64_t i = 0; i < width; i++)
        numbers[i] = 0;
    for (int field = 8; field; field /= 2) {
        if (!(side->bits & field))
            continue;
        left -= field;
        int64_t planes = 8 / field, size = (width + planes - 1) / planes;
        int32_t mask = (1 << field) - 1;
        float factor = (float)(1 << left);
        for (int64_t plane = 0; plane < planes; plane++) {
            int shift = (int)(field * plane);
            float *restrict own = numbers + plane * size;
            int64_t count = width - plane * size < size ? width - plane * size : size;
            for (int64_t i = 0; i < count; i++)
                own[i] += (float)((int32_t)codes[i] >> shift & mask) * factor;
        }
        codes += size;
    }
}

/* First outlier at or behind a place. */
static inline int64_t NAME(first_outlier)(const struct coded_side *side, int64_t place) {
    int64_t low = 0, high = side->num_outliers;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (side->outlier_places[middle] < place)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

TARGET INLINE void NAME(load_tables)(const struct coded_side *side, int64_t group, float *tables,
                                     int64_t dim) {
    if (side->is_by_row)
        return;
    for (int64_t i = 0; i < side->width; i++) {
        tables[i] = NAME(half)(side->offsets[group * side->width + i]);
        tables[dim + i] = NAME(half)(side->scales[group * side->width + i]);
    }
}

/* One row of a group, dequantized into a whole head. */
TARGET INLINE void NAME(decode_row)(const struct coded_side *side, int64_t group, int64_t row,
                                    const float *tables, float *numbers, float *out, int64_t dim) {
    int64_t width = side->width;
    float *own = side->channels ? numbers : out;
    NAME(unpack)(side, row, own);
    if (side->is_by_row) {
        int64_t pieces = (width + side->piece - 1) / side->piece;
        for (int64_t p = 0; p < pieces; p++) {
            float offset = NAME(half)(side->offsets[row * pieces + p]);
            float scale = NAME(half)(side->scales[row * pieces + p]);
            int64_t stop = (p + 1) * side->piece < width ? (p + 1) * side->piece : width;
            for (int64_t i = p * side->piece; i < stop; i++)
                own[i] = offset + scale * own[i];
        }
    } else {
        for (int64_t i = 0; i < width; i++)
            own[i] = tables[i] + tables[dim + i] * own[i];
    }
    if (side->num_outliers)
        for (int64_t at = NAME(first_outlier)(side, row * width);
             at < side->num_outliers && side->outlier_places[at] < (row + 1) * width; at++)
            own[side->outlier_places[at] - row * width] = NAME(half)(side->outliers[at]);
    if (side->factors)
        for (int64_t i = 0; i < width; i++)
            own[i] *= NAME(half)(side->factors[group * width + i]);
    if (side->channels) {
        memset(out, 0, (size_t)dim * sizeof(float));
        for (int64_t i = 0; i < width; i++)
            out[side->channels[group * width + i]] = own[i];
    }
}

/* Dequantize the entries [first, first + count) of a head, and point a call at them. */
TARGET INLINE void NAME(decode_rows)(struct attention *call, int64_t first, int64_t count,
                                     int64_t dim) {
    struct coded_cursor *cursor = call->coded;
    const struct coded_entries *entries = cursor->entries;
    float *keys = cursor->buffer, *values = keys + LANES * dim, *biases = values + LANES * dim;
    for (int64_t b = 0; b < count; b++) {
        while (first + b >= cursor->first + cursor->group->count) {
            cursor->first += cursor->group->count;
            cursor->group++;
        }
        const struct coded_group *group = cursor->group;
        int64_t row = group->first + first + b - cursor->first;
        if (cursor->loaded != group) {
            NAME(load_tables)(&entries->keys, group->number, cursor->tables, dim);
            NAME(load_tables)(&entries->values, group->number, cursor->tables + 2 * dim, dim);
            cursor->loaded = group;
        }
        NAME(decode_row)(&entries->keys, group->number, row, cursor->tables, cursor->numbers,
                         keys + b * dim, dim);
        NAME(decode_row)(&entries->values, group->number, row, cursor->tables + 2 * dim,
                         cursor->numbers, values + b * dim, dim);
        if (call->bias)
            biases[b] = call->bias[row];
    }
    call->keys = keys;
    call->values = values;
    call->item_bytes = sizeof(float);
    call->bias = call->bias ? biases : NULL;
}
