#include "level.h"

#include <stdatomic.h>
#include <stdint.h>

#ifndef OUTSIZE_CHECKSUM
#define OUTSIZE_CHECKSUM 0
#endif

static int best_level(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            return LEVEL_AVX512;
        return LEVEL_AVX2;
    }
#endif
    return LEVEL_PLAIN;
}

static atomic_int level_in_use = -1;

int outsize_level(void)
{
    int level = atomic_load_explicit(&level_in_use, memory_order_relaxed);
    return level < 0 ? outsize_use_level(LEVEL_AVX512) : level;
}

int outsize_use_level(int level)
{
    int best = best_level();
    if (level > best)
        level = best;
    atomic_store_explicit(&level_in_use, level, memory_order_relaxed);
    return level;
}

/* Of the sources that this library was built from, see kernel_sources.py. */
EXPORTED uint32_t outsize_checksum(void)
{
    return OUTSIZE_CHECKSUM;
}
