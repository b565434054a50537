/* The first `numel` of a group in fp32, and the last of them in place of those that are missing. */
static ALWAYS_INLINE void NATIVE(load)(
    const struct grid *grid, const void *elements, size_t start, int numel, int group, union group *x)
{
    const uint16_t *halves = (const uint16_t *)elements + start;
    const uint32_t *words = (const uint32_t *)elements + start;
    if (numel < group)
        for (int i = 0; i < group; i++) {
            int from = i < numel ? i : numel - 1;
            x->bits[i] = grid->is_bf16 ? (uint32_t)halves[from] << 16 : words[from];
        }
    else if (grid->is_bf16)
        for (int i = 0; i < group; i++)
            x->bits[i] = (uint32_t)halves[i] << 16;
    else
        memcpy(x->bits, words, 4 * (size_t)group);
}

/* Scale, bf16, and zero point of a group; 0 where not all of it is finite. */
static ALWAYS_INLINE int NATIVE(choose_scale)(
    const struct grid *grid, const union group *x, int group, uint16_t *scale, float *zero)
{
    float spread;
    if (grid->symmetric) {
        int32_t largest = 0;
        for (int i = 0; i < group; i++) {
            int32_t magnitude = x->integer[i] & INT32_MAX;
            largest = magnitude > largest ? magnitude : largest;
        }
        spread = float_of((uint32_t)largest);
    } else {
        int32_t largest = INT32_MIN, smallest = INT32_MAX;
        for (int i = 0; i < group; i++) {
            int32_t order = in_order(x->integer[i]);
            largest = order > largest ? order : largest;
            smallest = order < smallest ? order : smallest;
        }
        float top = float_of((uint32_t)in_order(largest)), bottom = float_of((uint32_t)in_order(smallest));
        float magnitude = bottom < 0 ? -bottom : bottom;
        bottom = bottom - magnitude * 0x1p-8f + 0.0f; /* no zero point is a negative zero */
        if (!is_finite(top) || !is_finite(bottom))
            return 0;
        *zero = from_bf16(to_bf16(bits_of(bottom)));
        spread = top - *zero;
    }
    if (!is_finite(spread))
        return 0;
    float step = spread * grid->factor;
    *scale = to_bf16(bits_of(step < LEAST_SCALE ? LEAST_SCALE : step));
    return 1;
}

/* From numbers to what has their integers in its lower bits, in place. */
static ALWAYS_INLINE void NATIVE(to_nearest)(union group *x, int group, float inverse, float zero)
{
    for (int i = 0; i < group; i++)
        x->value[i] = (x->value[i] - zero) * inverse + MAGIC;
}

static ALWAYS_INLINE void NATIVE(by_chance)(
    union group *x, int group, float inverse, float zero, const float *chances, int least, int most)
{
    for (int i = 0; i < group; i++) {
        float number = (x->value[i] - zero) * inverse + chances[i], nearest = number + MAGIC;
        int32_t integer = (int32_t)bits_of(nearest) - MAGIC_BITS - (nearest - MAGIC > number);
        integer = integer < least ? least : integer;
        x->integer[i] = integer > most ? most : integer;
    }
}

static ALWAYS_INLINE void NATIVE(store)(const union group *x, int group, int bits, int offset, uint8_t *codes)
{
    int8_t integers[GROUP8];
    uint16_t pairs[GROUP4 / 2];
    for (int i = 0; i < group; i++)
        integers[i] = (int8_t)(x->integer[i] - offset);
    if (bits == 8) {
        memcpy(codes, integers, (size_t)group);
        return;
    }
    memcpy(pairs, integers, (size_t)group);
    for (int i = 0; i < group / 2; i++) {
        uint16_t pair = pairs[i] & 0x0F0F;
        codes[i] = (uint8_t)(pair | pair >> 4);
    }
}

/* A few groups: all their scales first, for each is a chain of operations that wait for each other. */
static ALWAYS_INLINE void NATIVE(encode_few)(
    const struct blocks *blocks, const float *chances, size_t begin, size_t end, int bits, int group)
{
    const struct grid *grid = blocks->grid;
    int least = grid->symmetric ? 1 - (1 << (bits - 1)) : 0;
    int most = grid->symmetric ? (1 << (bits - 1)) - 1 : (1 << bits) - 1;
    int offset = bits == 8 && !grid->symmetric ? 128 : 0;
    size_t first = begin / group, count = (end - begin + group - 1) / group;
    union group x[FEW];
    float inverses[FEW], zeros[FEW];
    for (size_t g = 0; g < count; g++) {
        size_t start = begin + g * group;
        NATIVE(load)(grid, blocks->elements, start, end - start < (size_t)group ? (int)(end - start) : group, group, &x[g]);
        uint16_t scale = BF16_NAN;
        zeros[g] = 0.0f;
        if (!NATIVE(choose_scale)(grid, &x[g], group, &scale, &zeros[g])) {
            memset(&x[g], 0, sizeof x[g]);
            zeros[g] = 0.0f, inverses[g] = 1.0f;
        } else
            inverses[g] = 1.0f / from_bf16(scale);
        blocks->scales[first + g] = scale;
        if (!grid->symmetric)
            blocks->zeros[first + g] = (uint16_t)(bits_of(zeros[g]) >> 16);
    }
    for (size_t g = 0; g < count; g++) {
        if (chances) {
            const float *own = chances + g * group;
            NATIVE(by_chance)(&x[g], group, inverses[g], zeros[g], own, least, most);
        } else
            NATIVE(to_nearest)(&x[g], group, inverses[g], zeros[g]);
        NATIVE(store)(&x[g], group, bits, offset, blocks->codes + (first + g) * (size_t)(group * bits / 8));
    }
}

static ALWAYS_INLINE void NATIVE(encode)(
    const struct blocks *blocks, const float *chances, size_t begin, size_t end, int bits, int group)
{
    size_t few = (size_t)FEW * (size_t)group;
    for (size_t start = begin; start < end; start += few) {
        const float *own = chances ? chances + (start - begin) : NULL;
        NATIVE(encode_few)(blocks, own, start, end - start < few ? end : start + few, bits, group);
    }
}

/* The first `numel` of a group to where they belong. */
static ALWAYS_INLINE void NATIVE(hand_out)(
    const struct grid *grid, const union group *x, int numel, void *elements, size_t start)
{
    uint16_t *halves = (uint16_t *)elements + start;
    if (grid->is_bf16)
        for (int i = 0; i < numel; i++)
            halves[i] = to_bf16(x->bits[i]);
    else
        memcpy((uint32_t *)elements + start, x->bits, 4 * (size_t)numel);
}

static ALWAYS_INLINE void NATIVE(decode)(const struct blocks *blocks, size_t begin, size_t end, int bits, int group)
{
    const struct grid *grid = blocks->grid;
    int offset = bits == 8 && !grid->symmetric ? 128 : 0;
    int sign = bits == 4 && grid->symmetric ? 8 : 0; /* in 4 bits a negative integer has lost its own */
    for (size_t start = begin, number = begin / group; start < end; start += group, number++) {
        int8_t integers[GROUP8];
        uint16_t pairs[GROUP4 / 2];
        union group x;
        const uint8_t *codes = blocks->codes + number * (size_t)(group * bits / 8);
        float scale = from_bf16(blocks->scales[number]);
        if (bits == 8)
            memcpy(integers, codes, (size_t)group);
        else {
            for (int i = 0; i < group / 2; i++)
                pairs[i] = (uint16_t)((codes[i] | codes[i] << 4) & 0x0F0F);
            memcpy(integers, pairs, (size_t)group);
            for (int i = 0; i < group; i++)
                integers[i] = (int8_t)((integers[i] ^ sign) - sign);
        }
        for (int i = 0; i < group; i++)
            x.value[i] = (float)(integers[i] + offset) * scale;
        float zero = grid->symmetric ? 0.0f : from_bf16(blocks->zeros[number]);
        for (int i = 0; !grid->symmetric && i < group; i++)
            x.value[i] += zero;
        if (end - start < (size_t)group)
            NATIVE(hand_out)(grid, &x, (int)(end - start), blocks->elements, start);
        else
            NATIVE(hand_out)(grid, &x, group, blocks->elements, start);
    }
}

static void NATIVE(encode_range)(const void *arguments, size_t begin, size_t end)
{
    const struct blocks *blocks = arguments;
    const float *chances = blocks->chances ? blocks->chances[begin / PIECE] : NULL;
    if (blocks->grid->bits == 8)
        NATIVE(encode)(blocks, chances, begin, end, 8, GROUP8);
    else
        NATIVE(encode)(blocks, chances, begin, end, 4, GROUP4);
}

static void NATIVE(decode_range)(const void *arguments, size_t begin, size_t end)
{
    const struct blocks *blocks = arguments;
    if (blocks->grid->bits == 8)
        NATIVE(decode)(blocks, begin, end, 8, GROUP8);
    else
        NATIVE(decode)(blocks, begin, end, 4, GROUP4);
}
