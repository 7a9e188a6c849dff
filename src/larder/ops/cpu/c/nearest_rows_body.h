/* Nearest kept entry of a rejected one for one instruction set; included once for each, with
 *
 *   NAME(x)   x with the suffix of the instruction set
 *   TARGET    function attribute that selects it
 */

#include "vectors.h"

/* Products with `row`, and squared norms, of LANES stored rows from `rows` on; those behind `count`
 * repeat the last. */
TARGET INLINE void NAME(dot_and_square)(const floats *row, const char *rows, int64_t count,
                                        int64_t dim, int64_t item_bytes, floats *dots,
                                        floats *squares) {
    floats products[LANES], norms[LANES];
    for (int64_t b = 0; b < LANES; b++) {
        const char *own = rows + (b < count ? b : count - 1) * dim * item_bytes;
        floats product = {0}, norm = {0};
        for (int64_t v = 0; v * LANES < dim; v++) {
            floats numbers = NAME(load)(own, v * LANES, dim, item_bytes == 2);
            product += row[v] * numbers;
            norm += numbers * numbers;
        }
        products[b] = product;
        norms[b] = norm;
    }
    *dots = NAME(sum_each)(products);
    *squares = NAME(sum_each)(norms);
}

/* Row of length 1 in the direction of a stored row, whose squared norm is returned. */
TARGET INLINE float NAME(normalize)(const char *stored, int64_t dim, int64_t item_bytes,
                                    floats *row) {
    floats sum = {0};
    float square = 0;
    for (int64_t v = 0; v * LANES < dim; v++) {
        row[v] = NAME(load)(stored, v * LANES, dim, item_bytes == 2);
        sum += row[v] * row[v];
    }
    for (int l = 0; l < LANES; l++)
        square += sum[l];
    for (int64_t v = 0; v * LANES < dim; v++)
        row[v] /= norm(square);
    return square;
}

/* Whether a cosine may be above `best`: a test without roots, which some that are below pass. */
TARGET INLINE int NAME(may_exceed)(floats dots, floats squares, float best) {
    if (best <= 0)
        return 1;
    ints above = (dots > 0) & (dots * dots > squares * (best * best * 0.99999f));
    int32_t any = 0;
    for (int l = 0; l < LANES; l++)
        any |= above[l];
    return any != 0;
}

#if defined(HAS_DOT_PRODUCT)
/* Whether the cosine of a bfloat16 row with one of LANES others may be above `best`: by sums in
 * another order, so that those that are a little below it pass, too.
 *
 * square: squared norm of the row. Rows whose products overflow have no cosine. */
TARGET INLINE int NAME(may_be_near)(const char *row, float square, const char *others, int64_t dim,
                                    float best) {
    floats dots[LANES], squares[LANES];
    float least = best - 1e-4f; /* sums of so many products in another order differ by less */
    if (!(least > 0))
        return 1;
    for (int b = 0; b < LANES; b++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < 2 * dim; d += 64)
            sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(row + d),
                                   (__m512bh)_mm512_loadu_si512(others + 2 * b * dim + d));
        dots[b] = (floats)sum;
    }
    for (int b = 0; b < LANES; b++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t d = 0; d < 2 * dim; d += 64) {
            __m512bh other = (__m512bh)_mm512_loadu_si512(others + 2 * b * dim + d);
            sum = _mm512_dpbf16_ps(sum, other, other);
        }
        squares[b] = (floats)sum;
    }
    __m512 dot = (__m512)NAME(sum_each)(dots), norms = (__m512)NAME(sum_each)(squares);
    dot = _mm512_mul_ps(dot, _mm512_set1_ps(1 / sqrtf(square)));
    __m512 bound = _mm512_mul_ps(norms, _mm512_set1_ps(least * least));
    return _mm512_cmp_ps_mask(dot, _mm512_setzero_ps(), _CMP_GT_OQ) &
           _mm512_cmp_ps_mask(_mm512_mul_ps(dot, dot), bound, _CMP_GT_OQ);
}
#endif

/* Cosine and packed index of the nearest marked entry of the head for one of its entries. */
TARGET INLINE void NAME(find_nearest)(const struct nearest *call, int64_t f, int64_t dim,
                                      int64_t item_bytes) {
    int64_t h = 0, first = 0, place = -1;
    while (call->asked[f] >= first + call->lengths[h])
        first += call->lengths[h++];
    const char *stored = (const char *)call->rows + call->starts[h] * dim * item_bytes;
    float best = -INFINITY;
    floats row[MAX_VECTORS];
    const char *asked = stored + (call->asked[f] - first) * dim * item_bytes;
    float square = NAME(normalize)(asked, dim, item_bytes, row);
    (void)square; /* not read in every form */
    for (int64_t block = 0; block < call->lengths[h]; block += LANES) {
        int64_t rest = call->lengths[h] - block, count = rest < LANES ? rest : LANES;
        for (int64_t byte = 0; rest > AHEAD && byte < LANES * dim * item_bytes; byte += LINE)
            __builtin_prefetch(stored + (block + AHEAD) * dim * item_bytes + byte, 0, 2);
#if defined(HAS_DOT_PRODUCT)
        if (item_bytes == 2 && dim % 32 == 0 && count == LANES &&
            !NAME(may_be_near)(asked, square, stored + block * dim * 2, dim, best))
            continue;
#endif
        floats dots, squares;
        NAME(dot_and_square)(row, stored + block * dim * item_bytes, count, dim, item_bytes, &dots,
                             &squares);
        if (!NAME(may_exceed)(dots, squares, best))
            continue;
        for (int64_t b = 0; b < count; b++) {
            float cosine = dots[b] / norm(squares[b]);
            if (cosine > best && call->marked[first + block + b]) {
                best = cosine;
                place = first + block + b;
            }
        }
    }
    call->cosines[f] = best;
    call->places[f] = place;
}

TARGET static void NAME(find)(const struct nearest *call, int64_t f) {
#define FIND(dim, item_bytes) NAME(find_nearest)(call, f, dim, item_bytes)
    int64_t dim = call->head_dim;
    if (call->item_bytes == 2 && dim == 64)
        FIND(64, 2);
    else if (call->item_bytes == 2 && dim == 128)
        FIND(128, 2);
    else
        FIND(dim, call->item_bytes);
#undef FIND
}

#include "vectors_end.h"
