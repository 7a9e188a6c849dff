/* Selection of the lowest scores, for the kernels that build on it. */

#ifndef LARDER_REMOVAL_H
#define LARDER_REMOVAL_H

#include <stdint.h>

#define MOST_REJECTED 4 /* MAX_REJECTED of topk.py */

int64_t larder_find_lowest(const float *scores, const uint8_t *spared, int64_t count, int64_t gone,
                           int64_t *worst);

#endif
