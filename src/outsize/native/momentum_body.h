#include "split_body.h"
#include "state_body.h"

static inline float NATIVE(product)(int fused, float a, float b, float c)
{
    return fused ? fmaf(a, b, c) : a * b + c;
}

/* `fused`, `first_step` and `nesterov` are constants where this is called, so that each loop has one body. */
static inline __attribute__((always_inline)) void NATIVE(sgd)(
    const struct momentum *s, int fused, int has_moment, int first_step, int nesterov, int decays,
    const float *restrict gradient, size_t count, float *restrict master, float *restrict moment)
{
    float decay = s->decay, kept = s->kept, taken = s->taken, step = -s->lr;
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], p = master[i];
        if (decays)
            g = NATIVE(product)(fused, p, decay, g);
        if (has_moment) {
            float m = moment[i];
            if (first_step)
                m = g;
            else if (fused == FUSED_MOMENTUM)
                m = fmaf(m, kept, g * taken);
            else
                m = NATIVE(product)(fused, g, taken, m * kept);
            moment[i] = m;
            g = nesterov ? NATIVE(product)(fused, m, kept, g) : m;
        }
        master[i] = NATIVE(product)(fused, g, step, p);
    }
}

static inline __attribute__((always_inline)) void NATIVE(sgd_as)(
    const struct momentum *s, int fused, const float *restrict gradient, size_t count, float *restrict master,
    float *restrict moment)
{
    int decays = s->decay != 0.0f;
    if (!moment)
        NATIVE(sgd)(s, fused, 0, 0, 0, decays, gradient, count, master, moment);
    else if (s->first_step)
        NATIVE(sgd)(s, fused, 1, 1, s->nesterov, decays, gradient, count, master, moment);
    else if (s->nesterov)
        NATIVE(sgd)(s, fused, 1, 0, 1, decays, gradient, count, master, moment);
    else
        NATIVE(sgd)(s, fused, 1, 0, 0, decays, gradient, count, master, moment);
}

static inline void NATIVE(lion)(
    const struct momentum *s, const float *restrict gradient, size_t count, float *restrict master,
    float *restrict moment)
{
    float decay = s->decay, kept = s->kept, taken = s->taken, share = s->share, rest = s->rest, lr = s->lr;
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], m = moment[i];
        float along = m * share + g * rest;
        float sign = (float)((0.0f < along) - (along < 0.0f));
        master[i] = master[i] * decay - sign * lr;
        moment[i] = m * kept + g * taken;
    }
}

static inline void NATIVE(update)(
    const struct momentum *s, const float *restrict gradient, size_t count, float *restrict master,
    float *restrict moment)
{
    if (s->rule == RULE_LION)
        NATIVE(lion)(s, gradient, count, master, moment);
    else if (s->fused == FUSED_MOMENTUM)
        NATIVE(sgd_as)(s, FUSED_MOMENTUM, gradient, count, master, moment);
    else if (s->fused == FUSED_GRADIENT)
        NATIVE(sgd_as)(s, FUSED_GRADIENT, gradient, count, master, moment);
    else
        NATIVE(sgd_as)(s, FUSED_NONE, gradient, count, master, moment);
}

/* Block by block, as adamw_range. */
static void NATIVE(momentum_range)(const void *arguments, size_t begin, size_t end)
{
    const struct momentum *s = arguments;
    union word joined[BLOCK], m[BLOCK];
    uint32_t chance[BLOCK];
    float gradient[BLOCK];
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t count = end - at < BLOCK ? end - at : BLOCK;
        union word *master = s->master ? (union word *)s->master + at : joined;
        if (!s->master)
            NATIVE(join_halves)(&s->halves, at, count, &joined->bits);
        if (s->halves.lo8 || s->state != STATE_FP32)
            NATIVE(chances)((uint32_t)(s->first + at), s->key, count, chance);
        NATIVE(clipped)(s->gradient, s->gradient_is_bf16, s->clip, at, count, gradient);
        if (!s->moment || s->state == STATE_FP32) {
            float *moment = s->moment ? (float *)s->moment + at : NULL;
            NATIVE(update)(s, gradient, count, &master->value, moment);
        } else {
            NATIVE(decode_moment)(s->moment, s->moment_top, s->state, 1, at, count, &m->bits);
            NATIVE(update)(s, gradient, count, &master->value, &m->value);
            NATIVE(encode_moment)(&m->bits, chance, 0, s->state, 1, at, count, s->moment, s->moment_top);
        }
        if (!s->master)
            NATIVE(split_halves)(&s->halves, &joined->bits, chance, at, count);
    }
}
