/* An fp32 master as two planes of 16 bits and a third of single bits; docs/optimizers.md draws them.
 *
 * hi: the master rounded to the nearest bf16, ties to even. lo: the lower 16 bits of the master as a signed number, so
 * that (hi << 16) + lo is the master again, with one exception: a lower half of 0x8000 is half a step, hi may have been
 * rounded either way, and both have lo = -32768. Then the tie bit of the element is 1 where hi was rounded down. It is
 * read and written where lo = -32768 and hi is even, and nowhere else.
 *
 * NaN keeps its bits too. Rounding would make infinity or zero of those of 0x7F80_0001..0x7F80_8000 and
 * 0x7FFF_8000..0x7FFF_FFFF, so they lie under hi = 0x7FC0 with a tie bit of 1 (the sign of lo says which they are), and
 * the tie bit of any other hi = 0x7FC0 is 0. All other NaNs round their tie up.
 *
 * Without ties (NULL) the tie that was rounded down is kept as lo = 32767: one fp32 step less, in one master of 131,072.
 *
 * Or lo8 alone: the 8 bits below hi, and no more. Of two weights that are as near hi is the one further from zero, so
 * that (hi << 16) + (lo8 << 8) is any number of 24 bits; a NaN keeps its upper half, made quiet.
 */

static inline int NATIVE(needs_tie)(uint16_t hi, int16_t lo)
{
    return (lo == INT16_MIN && !(hi & 1)) || (hi & 0x7FFF) == 0x7FC0;
}

static void NATIVE(join_exceptions)(
    const uint16_t *hi, const int16_t *lo, const uint8_t *ties, size_t first, size_t count, uint32_t *bits)
{
    for (size_t i = 0; i < count; i++) {
        size_t at = first + i;
        if (!NATIVE(needs_tie)(hi[i], lo[i]) || !(ties[at >> 3] >> (at & 7) & 1))
            continue;
        uint32_t upper = hi[i];
        if ((upper & 0x7FFF) == 0x7FC0)
            upper = (upper & 0x8000) | (lo[i] < 0 ? 0x7FFF : 0x7F80);
        bits[i] = upper << 16 | (uint16_t)lo[i];
    }
}

/* Masters of `count` elements; element i has its tie bit at first + i. */
static inline void NATIVE(join)(
    const uint16_t *restrict hi, const int16_t *restrict lo, const uint8_t *ties, size_t first, size_t count,
    uint32_t *restrict bits)
{
    uint32_t odd_ones = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t h = hi[i], l = (uint32_t)(int32_t)lo[i];
        bits[i] = (h << 16) + l;
        odd_ones |= (uint32_t)(l == 0xFFFF8000) | (uint32_t)((h & 0x7FFF) == 0x7FC0);
    }
    if (odd_ones && ties)
        NATIVE(join_exceptions)(hi, lo, ties, first, count, bits);
}

static void NATIVE(split_exceptions)(
    const uint32_t *bits, size_t first, size_t count, uint16_t *hi, int16_t *lo, uint8_t *ties)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t upper = bits[i] >> 16, low = bits[i] & 0xFFFF, sign = upper & 0x8000;
        int tie = 0;
        if ((bits[i] & 0x7FFFFFFF) > 0x7F800000) {
            tie = low < 0x8000 ? upper == (sign | 0x7F80) : upper == (sign | 0x7FFF);
            hi[i] = (uint16_t)(tie ? sign | 0x7FC0 : upper + (low >> 15));
        } else if (low == 0x8000) {
            tie = !(upper & 1);
            if (tie && !ties)
                lo[i] = INT16_MAX;
        }
        if (ties && NATIVE(needs_tie)(hi[i], lo[i])) {
            size_t at = first + i;
            ties[at >> 3] = (uint8_t)((ties[at >> 3] & ~(1u << (at & 7))) | (unsigned)tie << (at & 7));
        }
    }
}

/* Planes of `count` masters; the reverse of join. */
static inline void NATIVE(split)(
    const uint32_t *restrict bits, size_t first, size_t count, uint16_t *restrict hi, int16_t *restrict lo,
    uint8_t *ties)
{
    uint32_t odd_ones = 0;
    for (size_t i = 0; i < count; i++) {
        uint32_t u = bits[i];
        uint32_t h = (u + 0x7FFF + (u >> 16 & 1)) >> 16;
        hi[i] = (uint16_t)h;
        lo[i] = (int16_t)(uint16_t)u;
        odd_ones |= (uint32_t)((u & 0xFFFF) == 0x8000) | (uint32_t)((u & 0x7FFFFFFF) > 0x7F800000);
    }
    if (odd_ones)
        NATIVE(split_exceptions)(bits, first, count, hi, lo, ties);
}

static inline void NATIVE(join24)(
    const uint16_t *restrict hi, const int8_t *restrict lo8, size_t count, uint32_t *restrict bits)
{
    for (size_t i = 0; i < count; i++)
        bits[i] = ((uint32_t)hi[i] << 16) + ((uint32_t)(int32_t)lo8[i] << 8);
}

/* What is cut off rounds up by chance; these 8 bits and either half of a chance, by which moments go, are independent. */
static inline void NATIVE(split24)(
    const uint32_t *restrict bits, const uint32_t *restrict chance, size_t count, uint16_t *restrict hi,
    int8_t *restrict lo8)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t u = bits[i], rounded = u + ((chance[i] >> 24 ^ chance[i] >> 8) & 0xFF);
        uint32_t kept = (u & 0x7FFFFFFF) > 0x7F800000 ? (u | 0x400000) & 0xFFFF0000 : rounded;
        hi[i] = (uint16_t)((kept + 0x8000) >> 16);
        lo8[i] = (int8_t)(kept >> 8);
    }
}

/* Masters of elements at to at + count, as they are kept. */
static inline void NATIVE(join_halves)(const struct halves *h, size_t at, size_t count, uint32_t *bits)
{
    if (h->lo8)
        NATIVE(join24)(h->hi + at, h->lo8 + at, count, bits);
    else
        NATIVE(join)(h->hi + at, h->lo + at, h->ties, at, count, bits);
}

/* The reverse; chances are looked at where 8 bits are kept. */
static inline void NATIVE(split_halves)(
    const struct halves *h, const uint32_t *bits, const uint32_t *chance, size_t at, size_t count)
{
    if (h->lo8)
        NATIVE(split24)(bits, chance, count, h->hi + at, h->lo8 + at);
    else
        NATIVE(split)(bits, at, count, h->hi + at, h->lo + at, h->ties);
}
