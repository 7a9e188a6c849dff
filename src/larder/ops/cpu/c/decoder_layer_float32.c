/* Decoder layer in float32. */

typedef float number;
#define IS_FLOAT32
#define EXPORTED(x) x##_float32
#include "decoder_layer.h"
