/* The body of a kernel for each instruction set; included with
 *
 *   BODY               file that defines its functions by NAME(x), with TARGET
 *   WITH_DOT_PRODUCT   defined where HAS_DOT_PRODUCT changes the body
 *
 * HAS_AVX512 is defined where the body may use the intrinsics of AVX-512.
 * FORMS(x) are the forms of x in the order of `enum instruction_set`.
 */

#define NAME(x) x##_baseline
#define TARGET
#include BODY
#undef NAME
#undef TARGET

#if defined(__x86_64__)
#include <immintrin.h>

#define NAME(x) x##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#include BODY
#undef NAME
#undef TARGET

#define HAS_AVX512
#define NAME(x) x##_avx512
#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,popcnt")))
#include BODY
#undef NAME
#undef TARGET

#if defined(WITH_DOT_PRODUCT)
#define HAS_DOT_PRODUCT
#define NAME(x) x##_avx512bf16
#define TARGET \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx512bf16,"   \
                          "avx512vnni,avx2,fma,bmi2,popcnt")))
#include BODY
#undef NAME
#undef TARGET
#undef HAS_DOT_PRODUCT
#define FORMS(x) {x##_baseline, x##_avx2, x##_avx512, x##_avx512bf16}
#else
#define FORMS(x) {x##_baseline, x##_avx2, x##_avx512, x##_avx512}
#endif
#undef HAS_AVX512
#else
#define FORMS(x) {x##_baseline}
#endif
