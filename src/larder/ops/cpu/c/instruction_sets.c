/* Instruction set of the processor that the kernels run on. */

#include "c_library.h"

#if defined(WITH_MATRIX_UNITS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define REQUEST_PERMISSION 0x1023 /* ARCH_REQ_XCOMP_PERM of arch_prctl */
#define TILE_DATA 18              /* XFEATURE_XTILEDATA */
#define AMX_BF16 (1u << 22)       /* of EDX of leaf 7 */
#define AMX_TILE (1u << 24)

/* The kernel grants a process the state of tiles once, for all of its threads. */
int larder_has_matrix_units(void) {
    static int known; /* 1: no, 2: yes */
    if (!known) {
        unsigned a, b, c, d = 0;
        int found = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d & AMX_BF16 && d & AMX_TILE &&
                    larder_instruction_set() == AVX512_BF16 &&
                    !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
        known = 1 + found;
    }
    return known == 2;
}
#endif

enum instruction_set larder_instruction_set(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return __builtin_cpu_supports("avx512bf16") ? AVX512_BF16 : AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return BASELINE;
}
