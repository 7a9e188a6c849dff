/* Softmax weights of stored rows from the logits of attention, joined over the heads of a group. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "attention_weights.h"
#include "c_library.h"

#define BODY "attention_weights_body.h"
#include "instruction_sets.h"

typedef void (*weigh_function)(const struct weighing *, float *, float *);
static const weigh_function weigh_forms[] = FORMS(weigh);

int larder_weights_from_logits(const struct weighing *call) {
    int64_t most = 1;
    for (int64_t head = 0; head < call->heads; head++)
        most = call->lengths[head] > most ? call->lengths[head] : most;
    most = (most + LANES - 1) / LANES * LANES;
    float *raised = malloc(2 * (size_t)most * sizeof(float));
    if (!raised)
        return 1;
    weigh_forms[larder_instruction_set()](call, raised, raised + most);
    free(raised);
    return 0;
}
