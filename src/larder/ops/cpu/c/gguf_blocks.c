/* Values in bfloat16 of the quantized blocks of GGUF files.
 *
 * A value is computed in float32 and rounded once to the nearest bfloat16, ties to even. All products
 * but the last are exact in float32, so that contracted operations give the same bits.
 */

#include <stdint.h>
#include <string.h>

#include "c_library.h"

/* Numbers of the types in `enum ggml_type`. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K };

#define SMALL 32 /* values of a block of the first types */
#define LARGE 256 /* of a block of the types K */

#define BODY "gguf_blocks_body.h"
#include "instruction_sets.h"

typedef int (*dequantize_function)(int, const uint8_t *, int64_t, uint16_t *);
static const dequantize_function dequantize_forms[] = FORMS(dequantize);

/* Write the values of `count` blocks. Returns 0, or 1 for an unknown type. */
int larder_dequantize_blocks(int type, const uint8_t *blocks, int64_t count, uint16_t *values) {
    return dequantize_forms[larder_instruction_set()](type, blocks, count, values);
}
