/* Decoder layer in bfloat16. */

#include <stdint.h>

typedef uint16_t number;
#define EXPORTED(x) x
#include "decoder_layer.h"
