/* Compiles the file BODY once for each instruction set, so that one library runs everywhere and is fast where it can be.
 *
 * BODY names each of its functions NATIVE(name), which becomes name_avx512, name_avx2 and name_plain; it has no include
 * guard. The file that includes this one then defines, with CHOOSE, which of them is called. Contraction of products
 * and sums is off for all (see setup.py): where a fused multiply-add is meant, BODY says so, and every version computes
 * the same bits.
 */
#include "level.h"

#if defined(__x86_64__) && defined(__clang__)
#define NATIVE(name) name##_avx512
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,f16c"))), apply_to = function)
#include BODY
#pragma clang attribute pop
#undef NATIVE
#define NATIVE(name) name##_avx2
#pragma clang attribute push(__attribute__((target("avx2,fma,bmi2,f16c"))), apply_to = function)
#include BODY
#pragma clang attribute pop
#undef NATIVE
#elif defined(__x86_64__)
#define NATIVE(name) name##_avx512
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,f16c,prefer-vector-width=512")
#include BODY
#pragma GCC pop_options
#undef NATIVE
#define NATIVE(name) name##_avx2
#pragma GCC push_options
#pragma GCC target("avx2,fma,bmi2,f16c")
#include BODY
#pragma GCC pop_options
#undef NATIVE
#endif

#define NATIVE(name) name##_plain
#include BODY
#undef NATIVE
#undef BODY

#if defined(__x86_64__)
#define CHOOSE(name) \
    (outsize_level() == LEVEL_AVX512 ? name##_avx512 : outsize_level() == LEVEL_AVX2 ? name##_avx2 : name##_plain)
#else
#define CHOOSE(name) name##_plain
#endif
