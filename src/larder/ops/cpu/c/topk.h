/* Selection of the highest scores, for the kernels that build on it. */

#ifndef LARDER_TOPK_H
#define LARDER_TOPK_H

#include <stdint.h>

int larder_top_masks(const float *scores, int64_t rows, int64_t size, int64_t count,
                     uint8_t *marks);

#endif
