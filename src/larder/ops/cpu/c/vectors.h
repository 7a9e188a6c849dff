/* Vectors of sixteen float32 for one instruction set; included by each kernel's body with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 *
 * Sixteen lanes are one vector whatever the registers are: the compiler splits it. vectors_end.h
 * takes the names back.
 */

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(words) __attribute__((vector_size(4 * LANES)));
typedef uint16_t NAME(halves) __attribute__((vector_size(2 * LANES)));

#define floats NAME(floats)
#define ints NAME(ints)
#define words NAME(words)
#define halves NAME(halves)

TARGET INLINE floats NAME(broadcast)(float value) { return value - (floats){0}; }

TARGET INLINE floats NAME(select)(ints mask, floats taken, floats other) {
    return (floats)(((ints)taken & mask) | ((ints)other & ~mask));
}

/* GCC 12 widens and narrows sixteen numbers in halves of a vector, and puts these together. */
#if defined(HAS_AVX512)
TARGET INLINE words NAME(to_words)(halves bits) {
    return (words)_mm512_cvtepu16_epi32((__m256i)bits);
}
TARGET INLINE halves NAME(to_halves)(words bits) {
    return (halves)_mm512_cvtepi32_epi16((__m512i)bits);
}
#else
TARGET INLINE words NAME(to_words)(halves bits) { return __builtin_convertvector(bits, words); }
TARGET INLINE halves NAME(to_halves)(words bits) { return __builtin_convertvector(bits, halves); }
#endif

/* Numbers [first, first + LANES) of a stored row as float32; zeros behind its end. */
TARGET INLINE floats NAME(load)(const void *row, int64_t first, int64_t dim, int is_bfloat16) {
    int64_t rest = dim - first;
    if (is_bfloat16) {
        halves bits = {0};
        const uint16_t *source = (const uint16_t *)row + first;
        if (rest >= LANES)
            memcpy(&bits, source, sizeof bits);
        else
            memcpy(&bits, source, (size_t)rest * sizeof *source);
        return (floats)(NAME(to_words)(bits) << 16);
    }
    floats loaded = {0};
    const float *source = (const float *)row + first;
    if (rest >= LANES)
        memcpy(&loaded, source, sizeof loaded);
    else
        memcpy(&loaded, source, (size_t)rest * sizeof *source);
    return loaded;
}

/* Lanes of two vectors: every second one and pair of both; every four and half of both. */
#define LANE_PAIRS \
    const ints even = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30};                 \
    const ints odd = {1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31};                  \
    const ints even_pairs = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};            \
    const ints odd_pairs = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#define LANE_FOURS \
    const ints even_fours = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27};            \
    const ints odd_fours = {4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31};           \
    const ints lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};                   \
    const ints upper = {8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31};

/* Sums of every four lanes of four vectors: lane 4 * k + i of the result is that of lanes [4 * k,
 * 4 * k + 4) of vector i. */
TARGET INLINE floats NAME(sum_fours)(floats a, floats b, floats c, floats d) {
    LANE_PAIRS
    floats first = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    floats second = __builtin_shuffle(c, d, even) + __builtin_shuffle(c, d, odd);
    return __builtin_shuffle(first, second, even_pairs) + __builtin_shuffle(first, second, odd_pairs);
}

/* From four results of `sum_fours`: lane 4 * k + i of the result is the sum of lanes i, i + 4, i + 8
 * and i + 12 of vector k. */
TARGET INLINE floats NAME(join_fours)(floats a, floats b, floats c, floats d) {
    LANE_FOURS
    floats first = __builtin_shuffle(a, b, even_fours) + __builtin_shuffle(a, b, odd_fours);
    floats second = __builtin_shuffle(c, d, even_fours) + __builtin_shuffle(c, d, odd_fours);
    return __builtin_shuffle(first, second, lower) + __builtin_shuffle(first, second, upper);
}

/* Lane i of the result is the sum of the lanes of sums[i]. */
TARGET INLINE floats NAME(sum_each)(const floats *sums) {
    floats fours[4];
    for (int i = 0; i < 4; i++, sums += 4)
        fours[i] = NAME(sum_fours)(sums[0], sums[1], sums[2], sums[3]);
    return NAME(join_fours)(fours[0], fours[1], fours[2], fours[3]);
}

/* Lane i of row j becomes lane j of row i. */
TARGET INLINE void NAME(transpose)(floats *rows) {
    LANE_PAIRS
    LANE_FOURS
#define EXCHANGE(distance, first, second)                                                           \
    for (int i = 0; i < LANES; i++)                                                             \
        if (!(i & distance)) {                                                                      \
            floats one = rows[i], other = rows[i + distance];                                       \
            rows[i] = __builtin_shuffle(one, other, first);                                         \
            rows[i + distance] = __builtin_shuffle(one, other, second);                             \
        }
    EXCHANGE(1, even, odd)
    EXCHANGE(2, even_pairs, odd_pairs)
    EXCHANGE(4, even_fours, odd_fours)
    EXCHANGE(8, lower, upper)
#undef EXCHANGE
}

/* exp(x) for x <= 0: 2^whole by exponent bits, the rest by a series; a NaN stays one. */
TARGET INLINE floats NAME(exponential)(floats x) {
    const floats rounding = NAME(broadcast)(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    floats power = x * LOG2_E;
    power = NAME(select)(power < MIN_EXPONENT, NAME(broadcast)(MIN_EXPONENT), power);
    floats whole = (power + rounding) - rounding;
    floats part = (power - whole) * LN_2;
    floats series = part * (1.0f / 5040) + 1.0f / 720;
    series = series * part + 1.0f / 120;
    series = series * part + 1.0f / 24;
    series = series * part + 1.0f / 6;
    series = series * part + 1.0f / 2;
    series = (series * part + 1.0f) * part + 1.0f;
    return (floats)((ints)series + (__builtin_convertvector(whole, ints) << 23));
}
