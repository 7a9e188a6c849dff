/* Search of query heads in trees of keys (DCI); ops/cpu/dci_kernels.py describes the arrays.
 *
 * Each query descends from the top; on every level the members of the best cells are compared. A
 * query's result depends on nothing but its own tree.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "c_library.h"
#include "tree_nodes.h"
#include "tree_search.h"

typedef int (*search_function)(const struct tree_search *, int64_t);

#define BODY "tree_search_body.h"
#include "instruction_sets.h"

static const search_function search_forms[] = FORMS(search);

struct heads {
    const struct tree_search *call;
    int next; /* head that no thread has taken */
    int failed;
};

static void search_as_thread(void *given) {
    struct heads *heads = given;
    search_function search = search_forms[larder_instruction_set()];
    for (int64_t h; (h = __atomic_fetch_add(&heads->next, 1, __ATOMIC_RELAXED)) < heads->call->heads;)
        if (search(heads->call, h))
            __atomic_store_n(&heads->failed, 1, __ATOMIC_RELAXED);
}

/* Returns 0, or 1 if memory is short. */
int larder_tree_search(const struct tree_search *call) {
    struct heads heads = {.call = call};
    larder_parallel(search_as_thread, &heads, (int)call->threads);
    return heads.failed;
}
