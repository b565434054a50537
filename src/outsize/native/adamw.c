/* AdamW over split or fp32 masters, with moments in fp32, bf16 or 8 bits. */
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "state.h"
#include "threads.h"

/* optim/adamw.py has the same fields in the same order. Pointers are to the first element of the range. */
struct adamw {
    struct halves halves;
    float *master; /* used where it is not split */
    void *gradient;
    void *exp_avg;
    void *exp_avg_sq;
    uint8_t *exp_avg_top;
    uint8_t *exp_avg_sq_top;
    size_t count;
    size_t first; /* index of the first element in its unit, a multiple of GROUP */
    int32_t gradient_is_bf16;
    int32_t state;
    uint32_t key;
    float clip;       /* factor of the gradient */
    float decay;      /* 1 - lr * weight_decay */
    float lerp;       /* 1 - beta1 */
    float beta2;
    float square;     /* 1 - beta2 */
    float correction; /* square root of 1 - beta2 ^ step */
    float eps;
    float step;       /* -lr / (1 - beta1 ^ step) */
};

#define BODY "adamw_body.h"
#include "versions.h"

EXPORTED void outsize_adamw(const struct adamw *settings, int num_threads)
{
    outsize_parallel(CHOOSE(adamw_range), settings, settings->count, CHUNK, num_threads);
}
