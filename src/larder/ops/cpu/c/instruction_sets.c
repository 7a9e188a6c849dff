/* Instruction set of the processor that the kernels run on. */

#include <stdint.h>

#include "c_library.h"

static enum instruction_set highest = MATRIX_UNITS;

static enum instruction_set detect_instruction_set(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("bmi2"))
        return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
                       __builtin_cpu_supports("avx512vbmi2") &&
                       __builtin_cpu_supports("avx512vnni")
                   ? AVX512_BF16
                   : AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return BASELINE;
}

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
                    detect_instruction_set() == AVX512_BF16 &&
                    !syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA);
        known = 1 + found;
    }
    return known == 2 && highest == MATRIX_UNITS;
}
#endif

enum instruction_set larder_instruction_set(void) {
    enum instruction_set detected = detect_instruction_set();
    return detected < highest ? detected : highest;
}

/* Take the forms of a lesser processor, as tests do. Not thread-safe. */
void larder_limit_instruction_set(int32_t set) { highest = (enum instruction_set)set; }
