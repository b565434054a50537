#include "split_body.h"
#include "state_body.h"

/* One step of `count` elements as torch's fused AdamW takes it in its vector body, operation by operation
 * (FusedAdamKernel.cpp of ATen, 2.4 to 2.13). */
static inline void NATIVE(update_exact)(
    const struct adamw *s, const float *restrict gradient, size_t count, float *restrict master,
    float *restrict exp_avg, float *restrict exp_avg_sq)
{
    int small = fabsf(s->lerp) < 0.5f; /* which end of the interpolation is added to */
    float weight = small ? s->lerp : s->lerp - 1.0f;
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], m = exp_avg[i], v = exp_avg_sq[i];
        m = fmaf(weight, g - m, small ? m : g);
        v = fmaf(s->square * g, g, v * s->beta2);
        float root = sqrtf(v) / s->correction + s->eps;
        master[i] = master[i] * s->decay + s->step * m / root;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

/* The same mathematics with a division less, for state that is rounded anyway. */
static inline void NATIVE(update_rounded)(
    const struct adamw *s, const float *restrict gradient, size_t count, float *restrict master,
    float *restrict exp_avg, float *restrict exp_avg_sq)
{
    float inverse = 1.0f / s->correction;
    for (size_t i = 0; i < count; i++) {
        float g = gradient[i], m = exp_avg[i], v = exp_avg_sq[i];
        m = m + s->lerp * (g - m);
        v = v * s->beta2 + s->square * g * g;
        float root = sqrtf(v) * inverse + s->eps;
        master[i] = master[i] * s->decay + s->step * m / root;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
    }
}

/* A whole group of 8-bit moments beside split masters without ties: the same as below, in two passes that keep to
 * registers what they can. */
static inline __attribute__((always_inline)) void NATIVE(step_group)(
    const struct adamw *s, size_t at, int is_bf16, int keeps_8)
{
    float master[GROUP], m[GROUP], v[GROUP];
    uint16_t *restrict hi = s->halves.hi + at;
    int16_t *restrict lo = s->halves.lo + (keeps_8 ? 0 : at);
    int8_t *restrict lo8 = s->halves.lo8 + (keeps_8 ? at : 0);
    uint8_t *restrict m_codes = (uint8_t *)s->exp_avg + at, *restrict v_codes = (uint8_t *)s->exp_avg_sq + at;
    const uint16_t *restrict narrow = (const uint16_t *)s->gradient + at;
    const float *restrict wide = (const float *)s->gradient + at;
    uint32_t m_base = NATIVE(base)(s->exp_avg_top[at / GROUP], 128 >> MANTISSA) << MANTISSA;
    uint32_t v_base = NATIVE(base)(s->exp_avg_sq_top[at / GROUP], 256 >> MANTISSA) << MANTISSA;
    float clip = s->clip, lerp = s->lerp, beta2 = s->beta2, square = s->square, eps = s->eps, step = s->step;
    float decay = s->decay, inverse = 1.0f / s->correction;
    uint32_t m_most = 0, v_most = 0;
    for (size_t i = 0; i < GROUP; i++) {
        uint32_t low = keeps_8 ? (uint32_t)(int32_t)lo8[i] << 8 : (uint32_t)(int32_t)lo[i];
        union word p = {((uint32_t)hi[i] << 16) + low}, a, b, g;
        g.bits = is_bf16 ? (uint32_t)narrow[i] << 16 : ((union word){.value = wide[i]}).bits;
        float gradient = g.value * clip;
        uint32_t magnitude = m_codes[i] & 127u;
        a.bits = (magnitude ? (magnitude + m_base) << (23 - MANTISSA) : 0) | (uint32_t)(m_codes[i] & 128u) << 24;
        b.bits = v_codes[i] ? (v_codes[i] + v_base) << (23 - MANTISSA) : 0;
        a.value = a.value + lerp * (gradient - a.value);
        b.value = b.value * beta2 + square * gradient * gradient;
        master[i] = p.value * decay + step * a.value / (sqrtf(b.value) * inverse + eps);
        m[i] = a.value;
        v[i] = b.value;
        uint32_t m_bits = a.bits & 0x7FFFFFFF, v_bits = b.bits & 0x7FFFFFFF;
        m_most = m_bits > m_most ? m_bits : m_most;
        v_most = v_bits > v_most ? v_bits : v_most;
    }
    uint32_t chance[GROUP];
    NATIVE(chances)((uint32_t)(s->first + at), s->key, GROUP, chance);
    s->exp_avg_top[at / GROUP] = NATIVE(encode_below)((uint32_t *)m, chance, m_most, 0, MANTISSA, 1, GROUP, m_codes);
    s->exp_avg_sq_top[at / GROUP] = NATIVE(encode_below)((uint32_t *)v, chance, v_most, 16, MANTISSA, 0, GROUP, v_codes);
    if (keeps_8)
        NATIVE(split24)((uint32_t *)master, chance, GROUP, hi, lo8);
    else
        NATIVE(split)((uint32_t *)master, at, GROUP, hi, lo, NULL);
}

/* Block by block: what a block needs stays in the first-level cache, and each plane is read and written once. */
static void NATIVE(adamw_range)(const void *arguments, size_t begin, size_t end)
{
    const struct adamw *s = arguments;
    if (s->state == STATE_8BIT && s->halves.hi && !s->halves.ties) {
        for (; begin + GROUP <= end; begin += GROUP) {
            if (s->halves.lo8)
                s->gradient_is_bf16 ? NATIVE(step_group)(s, begin, 1, 1) : NATIVE(step_group)(s, begin, 0, 1);
            else
                s->gradient_is_bf16 ? NATIVE(step_group)(s, begin, 1, 0) : NATIVE(step_group)(s, begin, 0, 0);
        }
    }
    union word joined[BLOCK], m[BLOCK], v[BLOCK];
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
        if (s->state == STATE_FP32) {
            float *exp_avg = (float *)s->exp_avg + at, *exp_avg_sq = (float *)s->exp_avg_sq + at;
            NATIVE(update_exact)(s, gradient, count, &master->value, exp_avg, exp_avg_sq);
        } else {
            NATIVE(decode_moment)(s->exp_avg, s->exp_avg_top, s->state, 1, at, count, &m->bits);
            NATIVE(decode_moment)(s->exp_avg_sq, s->exp_avg_sq_top, s->state, 0, at, count, &v->bits);
            NATIVE(update_rounded)(s, gradient, count, &master->value, &m->value, &v->value);
            NATIVE(encode_moment)(&m->bits, chance, 0, s->state, 1, at, count, s->exp_avg, s->exp_avg_top);
            NATIVE(encode_moment)(&v->bits, chance, 16, s->state, 0, at, count, s->exp_avg_sq, s->exp_avg_sq_top);
        }
        if (!s->master)
            NATIVE(split_halves)(&s->halves, &joined->bits, chance, at, count);
    }
}
