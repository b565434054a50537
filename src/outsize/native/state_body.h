/* Moments in fewer bits: bf16, or 8-bit floats whose exponents count from one of their block. docs/optimizers.md.
 *
 * What is cut off is rounded up or down by chance, so that the mean of many roundings is exact: random bits are added
 * below the cut, and the sum is cut. The chances of an element follow from its index and a key, see chances.
 */

/* Random bits of elements first to first + count: the hash lowbias32 of index and key. */
static inline void NATIVE(chances)(uint32_t first, uint32_t key, size_t count, uint32_t *restrict chance)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t x = first + (uint32_t)i + key;
        x ^= x >> 16;
        x *= 0x7FEB352Du;
        x ^= x >> 15;
        x *= 0x846CA68Bu;
        chance[i] = x ^ x >> 16;
    }
}

static inline void NATIVE(widen)(const uint16_t *restrict narrow, size_t count, uint32_t *restrict bits)
{
    for (size_t i = 0; i < count; i++)
        bits[i] = (uint32_t)narrow[i] << 16;
}

/* bf16; the 16 bits at `shift` of the chances decide. A NaN stays one. */
static inline void NATIVE(narrow)(
    const uint32_t *restrict bits, const uint32_t *restrict chance, int shift, size_t count, uint16_t *restrict narrow)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t u = bits[i];
        uint32_t rounded = (u + (chance[i] >> shift & 0xFFFF)) >> 16;
        narrow[i] = (uint16_t)((u & 0x7FFFFFFF) > 0x7F800000 ? u >> 16 | 0x40 : rounded);
    }
}

/* The exponent that code 0 would have in a block whose largest has exponent `top`. */
static inline uint32_t NATIVE(base)(uint32_t top, uint32_t levels)
{
    return top > levels - 1 ? top - (levels - 1) : 1;
}

/* Values of a block; `mantissa` bits of fraction, and a sign where `sign` is 1. Code 0 is zero. */
static inline void NATIVE(decode)(
    const uint8_t *restrict codes, uint8_t top, int mantissa, int sign, size_t count, uint32_t *restrict bits)
{
    uint32_t largest = sign ? 127 : 255;
    uint32_t base = NATIVE(base)(top, (largest + 1) >> mantissa) << mantissa;
    int cut = 23 - mantissa;
    for (size_t i = 0; i < count; i++) {
        uint32_t code = codes[i], magnitude = code & largest;
        bits[i] = (magnitude ? (magnitude + base) << cut : 0) | (code & ~largest) << 24;
    }
}

/* Codes of a block of at most 64, and the exponent of its largest, rounded up: nothing in it lies beyond the codes.
 * What lies below code 1 becomes that or zero by chance where there is a sign, and else that: a second moment that
 * is not zero stays so, since it divides. */
static inline __attribute__((always_inline)) uint8_t NATIVE(encode_below)(
    const uint32_t *restrict bits, const uint32_t *restrict chance, uint32_t most, int shift, int mantissa, int sign,
    size_t count, uint8_t *restrict codes)
{
    int32_t largest = sign ? 127 : 255, cut = 23 - mantissa;
    uint32_t top = (most + (1u << cut) - 1) >> 23;
    top = top > 255 ? 255 : top;
    int32_t base = (int32_t)(NATIVE(base)(top, (uint32_t)(largest + 1) >> mantissa) << mantissa);
    union { uint32_t bits; float value; } least = {(uint32_t)(base + 1) << cut};
    for (size_t i = 0; i < count; i++) {
        union { uint32_t bits; float value; } magnitude = {bits[i] & 0x7FFFFFFF};
        uint32_t by_chance = chance[i] >> shift & 0xFFFF;
        int32_t code = (int32_t)((magnitude.bits + (by_chance << (cut - 16))) >> cut) - base;
        float bar = sign ? (float)(int32_t)by_chance * 0x1p-16f * least.value : 0.0f;
        int32_t below = magnitude.value > bar;
        code = magnitude.bits < least.bits ? below : code;
        code = code > largest ? largest : code;
        codes[i] = (uint8_t)((uint32_t)code | (sign ? bits[i] >> 24 & 0x80 : 0));
    }
    return (uint8_t)top;
}

static inline uint8_t NATIVE(encode)(
    const uint32_t *restrict bits, const uint32_t *restrict chance, int shift, int mantissa, int sign, size_t count,
    uint8_t *restrict codes)
{
    uint32_t most = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = bits[i] & 0x7FFFFFFF;
        most = magnitude > most ? magnitude : most;
    }
    return NATIVE(encode_below)(bits, chance, most, shift, mantissa, sign, count, codes);
}

/* Elements of a gradient, fp32 or bf16, from `at` on, times `clip`. */
static inline void NATIVE(clipped)(
    const void *gradient, int is_bf16, float clip, size_t at, size_t count, float *restrict into)
{
    if (is_bf16) {
        const uint16_t *from = (const uint16_t *)gradient + at;
        for (size_t i = 0; i < count; i++) {
            union word wide = {(uint32_t)from[i] << 16};
            into[i] = wide.value * clip;
        }
    } else {
        const float *from = (const float *)gradient + at;
        for (size_t i = 0; i < count; i++)
            into[i] = from[i] * clip;
    }
}

/* Elements of a moment that is not fp32, from `at` on, a multiple of GROUP, with a sign or without. */
static inline __attribute__((always_inline)) void NATIVE(decode_moment)(
    const void *moment, const uint8_t *tops, int state, int sign, size_t at, size_t count, uint32_t *bits)
{
    if (state == STATE_BF16) {
        NATIVE(widen)((const uint16_t *)moment + at, count, bits);
        return;
    }
    for (size_t i = 0; i < count; i += GROUP) {
        size_t size = count - i < GROUP ? count - i : GROUP;
        NATIVE(decode)((const uint8_t *)moment + at + i, tops[(at + i) / GROUP], MANTISSA, sign, size, bits + i);
    }
}

/* The way back; of the chances of these elements the 16 bits at `shift` decide. */
static inline __attribute__((always_inline)) void NATIVE(encode_moment)(
    const uint32_t *bits, const uint32_t *chance, int shift, int state, int sign, size_t at, size_t count, void *moment,
    uint8_t *tops)
{
    if (state == STATE_BF16) {
        NATIVE(narrow)(bits, chance, shift, count, (uint16_t *)moment + at);
        return;
    }
    for (size_t i = 0; i < count; i += GROUP) {
        size_t size = count - i < GROUP ? count - i : GROUP;
        tops[(at + i) / GROUP] =
            NATIVE(encode)(bits + i, chance + i, shift, MANTISSA, sign, size, (uint8_t *)moment + at + i);
    }
}
