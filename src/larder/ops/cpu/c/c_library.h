/* What the kernels share. */

#ifndef LARDER_C_LIBRARY_H
#define LARDER_C_LIBRARY_H

#define LANES 16
#define MAX_VECTORS 64 /* of LANES numbers: heads of at most 1,024 */
#define INLINE static inline __attribute__((always_inline))

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MIN_EXPONENT -126.0f /* the smallest exponent of a normal float32 */

/* What the processor can run, in rising order. */
enum instruction_set { BASELINE, AVX2, AVX512, AVX512_BF16, MATRIX_UNITS };

/* At most AVX512_BF16: matrix units are asked for by themselves. */
enum instruction_set larder_instruction_set(void);

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 11
#define WITH_MATRIX_UNITS
/* Whether the processor multiplies tiles of bfloat16, and the system lets it. */
int larder_has_matrix_units(void);
#endif

/* Run a task on so many threads of torch's OpenMP runtime, or once where there is none. A task takes
 * shares until none is left, so that fewer threads than asked for are enough. */
void larder_parallel(void (*task)(void *), void *given, int threads);

#endif
