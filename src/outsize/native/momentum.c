/* SGD and Lion over split or fp32 masters, with a momentum in fp32, bf16 or 8 bits, or none. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "state.h"
#include "threads.h"

enum { RULE_SGD = 0, RULE_LION = 1 };
/* Which products of SGD are fused with the sum they enter: torch's vector body is plain C++, and its compiler decides.
 * Of the two products of the momentum one alone can be: that of the momentum, or that of the gradient. */
enum { FUSED_NONE = 0, FUSED_MOMENTUM = 1, FUSED_GRADIENT = 2 };

/* optim/momentum_kernel.py has the same fields in the same order. Pointers are to the first element of the range. */
struct momentum {
    struct halves halves;
    float *master; /* used where it is not split */
    void *gradient;
    void *moment; /* NULL for SGD without momentum */
    uint8_t *moment_top;
    size_t count;
    size_t first; /* index of the first element in its unit, a multiple of GROUP */
    int32_t gradient_is_bf16;
    int32_t state;
    int32_t rule;
    int32_t fused;      /* of SGD */
    int32_t nesterov;   /* of SGD */
    int32_t first_step; /* of SGD: the momentum is the gradient */
    uint32_t key;
    float clip;  /* factor of the gradient */
    float decay; /* SGD: factor of the weights that are added to the gradient, Lion: 1 - lr * weight_decay */
    float kept;  /* of the momentum */
    float taken; /* SGD: 1 - dampening, Lion: 1 - kept */
    float share; /* Lion: of the momentum in a step */
    float rest;  /* Lion: 1 - share */
    float lr;
};

#define BODY "momentum_body.h"
#include "versions.h"

EXPORTED void outsize_momentum(const struct momentum *settings, int num_threads)
{
    outsize_parallel(CHOOSE(momentum_range), settings, settings->count, CHUNK, num_threads);
}
