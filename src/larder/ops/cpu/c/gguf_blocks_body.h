/* Dequantization for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

/* A float16 as float32. */
TARGET INLINE float NAME(half)(const uint8_t *stored) {
    uint16_t bits;
    memcpy(&bits, stored, sizeof bits);
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, rest = bits & 1023;
    if (!exponent) {
        float small = (float)rest * 0x1p-24f;
        return sign ? -small : small;
    }
    uint32_t wide = sign | (exponent == 31 ? 255 : exponent + 112) << 23 | rest << 13;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round `count` numbers to bfloat16. */
TARGET INLINE void NAME(round_values)(const float *numbers, int count, uint16_t *values) {
    for (int n = 0; n < count; n++) {
        uint32_t bits;
        memcpy(&bits, numbers + n, sizeof bits);
        uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        values[n] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
    }
}

/* Numbers from 0 to 15 or, with a plane of fifth bits, to 31: the low halves of bytes first. */
TARGET INLINE void NAME(halves)(const uint8_t *bytes, const uint8_t *plane, float base,
                                float *numbers) {
    uint32_t fifth = 0;
    if (plane)
        memcpy(&fifth, plane, sizeof fifth);
    for (int n = 0; n < SMALL / 2; n++) {
        numbers[n] = (float)((bytes[n] & 15) | (fifth >> n & 1) << 4) - base;
        numbers[n + 16] = (float)(bytes[n] >> 4 | (fifth >> (n + 16) & 1) << 4) - base;
    }
}

/* Numbers by one scale and one offset. */
TARGET INLINE void NAME(scale)(float *numbers, int count, float factor, float offset) {
    for (int n = 0; n < count; n++)
        numbers[n] = factor * numbers[n] + offset;
}

/* Blocks of 32 with a scale: `size` bytes each, numbers above `base` from byte `start` on. */
TARGET INLINE void NAME(symmetric)(const uint8_t *blocks, int64_t count, uint16_t *values, int size,
                                   int plane, float base) {
    float numbers[SMALL];
    for (; count--; blocks += size, values += SMALL) {
        NAME(halves)(blocks + size - 16, plane ? blocks + plane : 0, base, numbers);
        float factor = NAME(half)(blocks);
        for (int n = 0; n < SMALL; n++)
            numbers[n] *= factor;
        NAME(round_values)(numbers, SMALL, values);
    }
}

/* Blocks of 32 with a scale and a minimum. */
TARGET INLINE void NAME(asymmetric)(const uint8_t *blocks, int64_t count, uint16_t *values,
                                    int size, int plane) {
    float numbers[SMALL];
    for (; count--; blocks += size, values += SMALL) {
        NAME(halves)(blocks + size - 16, plane ? blocks + plane : 0, 0, numbers);
        NAME(scale)(numbers, SMALL, NAME(half)(blocks), NAME(half)(blocks + 2));
        NAME(round_values)(numbers, SMALL, values);
    }
}

TARGET INLINE void NAME(bytes)(const uint8_t *blocks, int64_t count, uint16_t *values) {
    float numbers[SMALL];
    for (; count--; blocks += 34, values += SMALL) {
        float factor = NAME(half)(blocks);
        const int8_t *stored = (const int8_t *)blocks + 2;
        for (int n = 0; n < SMALL; n++)
            numbers[n] = factor * (float)stored[n];
        NAME(round_values)(numbers, SMALL, values);
    }
}

/* Two bits of each value: 16 scales and minimums of four bits, the bits, their common factors. */
TARGET INLINE void NAME(two_bits)(const uint8_t *blocks, int64_t count, uint16_t *values) {
    float numbers[LARGE];
    for (; count--; blocks += 84, values += LARGE) {
        const uint8_t *bits = blocks + 16;
        float factor = NAME(half)(blocks + 80), lowest = NAME(half)(blocks + 82);
        for (int row = 0; row < 8; row++)
            for (int n = 0; n < 32; n++)
                numbers[row * 32 + n] = (float)(bits[row / 4 * 32 + n] >> row % 4 * 2 & 3);
        for (int group = 0; group < 16; group++) {
            float minimum = lowest * (float)(blocks[group] >> 4);
            NAME(scale)(numbers + group * 16, 16, factor * (float)(blocks[group] & 15), -minimum);
        }
        NAME(round_values)(numbers, LARGE, values);
    }
}

/* Three bits: the highest in a plane, where 0 stands for -4; 16 scales of six bits. */
TARGET INLINE void NAME(three_bits)(const uint8_t *blocks, int64_t count, uint16_t *values) {
    float numbers[LARGE];
    for (; count--; blocks += 110, values += LARGE) {
        const uint8_t *bits = blocks + 32, *scales = blocks + 96;
        float factor = NAME(half)(blocks + 108);
        for (int row = 0; row < 8; row++)
            for (int n = 0; n < 32; n++) {
                int low = bits[row / 4 * 32 + n] >> row % 4 * 2 & 3;
                numbers[row * 32 + n] = (float)(low - (blocks[n] >> row & 1 ? 0 : 4));
            }
        for (int group = 0; group < 16; group++) {
            int low = group < 8 ? scales[group] & 15 : scales[group - 8] >> 4;
            int scale = (low | (scales[8 + group % 4] >> group / 4 * 2 & 3) << 4) - 32;
            for (int n = group * 16; n < group * 16 + 16; n++)
                numbers[n] *= factor * (float)scale;
        }
        NAME(round_values)(numbers, LARGE, values);
    }
}

/* Scale and minimum, of six bits each, of one of eight groups. */
TARGET INLINE void NAME(group_scale)(const uint8_t *packed, int group, int *scale, int *minimum) {
    if (group < 4) {
        *scale = packed[group] & 63;
        *minimum = packed[group + 4] & 63;
    } else {
        *scale = (packed[group + 4] & 15) | packed[group - 4] >> 6 << 4;
        *minimum = packed[group + 4] >> 4 | packed[group] >> 6 << 4;
    }
}

/* Four bits, or five with a plane of fifth bits, in eight groups with scales and minimums. */
TARGET INLINE void NAME(four_bits)(const uint8_t *blocks, int64_t count, uint16_t *values, int size,
                                   int plane) {
    float numbers[LARGE];
    for (; count--; blocks += size, values += LARGE) {
        const uint8_t *bits = blocks + size - 128;
        float factor = NAME(half)(blocks), lowest = NAME(half)(blocks + 2);
        for (int group = 0; group < 8; group++) {
            int scale, minimum;
            NAME(group_scale)(blocks + 4, group, &scale, &minimum);
            float *into = numbers + group * 32;
            for (int n = 0; n < 32; n++) {
                int low = bits[group / 2 * 32 + n] >> group % 2 * 4 & 15;
                int high = plane ? (blocks[16 + n] >> group & 1) << 4 : 0;
                into[n] = (float)(low | high);
            }
            NAME(scale)(into, 32, factor * (float)scale, -(lowest * (float)minimum));
        }
        NAME(round_values)(numbers, LARGE, values);
    }
}

/* Six bits, four and two apart, in 16 groups with scales of eight bits. */
TARGET INLINE void NAME(six_bits)(const uint8_t *blocks, int64_t count, uint16_t *values) {
    float numbers[LARGE];
    for (; count--; blocks += 210, values += LARGE) {
        const int8_t *scales = (const int8_t *)blocks + 192;
        float factor = NAME(half)(blocks + 208);
        for (int row = 0; row < 8; row++) {
            const uint8_t *low = blocks + row / 4 * 64 + row % 2 * 32;
            const uint8_t *high = blocks + 128 + row / 4 * 32;
            for (int n = 0; n < 32; n++) {
                int number = (low[n] >> row % 4 / 2 * 4 & 15) | (high[n] >> row % 4 * 2 & 3) << 4;
                numbers[row * 32 + n] = (float)(number - 32);
            }
        }
        for (int group = 0; group < 16; group++)
            for (int n = group * 16; n < group * 16 + 16; n++)
                numbers[n] *= factor * (float)scales[group];
        NAME(round_values)(numbers, LARGE, values);
    }
}

TARGET static int NAME(dequantize)(int type, const uint8_t *blocks, int64_t count,
                                   uint16_t *values) {
    switch (type) {
    case Q4_0: NAME(symmetric)(blocks, count, values, 18, 0, 8); return 0;
    case Q4_1: NAME(asymmetric)(blocks, count, values, 20, 0); return 0;
    case Q5_0: NAME(symmetric)(blocks, count, values, 22, 2, 16); return 0;
    case Q5_1: NAME(asymmetric)(blocks, count, values, 24, 4); return 0;
    case Q8_0: NAME(bytes)(blocks, count, values); return 0;
    case Q2_K: NAME(two_bits)(blocks, count, values); return 0;
    case Q3_K: NAME(three_bits)(blocks, count, values); return 0;
    case Q4_K: NAME(four_bits)(blocks, count, values, 144, 0); return 0;
    case Q5_K: NAME(four_bits)(blocks, count, values, 176, 1); return 0;
    case Q6_K: NAME(six_bits)(blocks, count, values); return 0;
    default: return 1;
    }
}
