/* The lossless window encoding of 16-bit floats, byte for byte as codecs/window_numpy.py writes it.
 *
 * codecs/window_layout.py draws the form, and hands over the layout of the words and the places of the parts, so that
 * its arithmetic exists once. What is here is the walk: a block's rows while they lie in the first-level cache.
 */
#include <stdint.h>
#include <string.h>

#include "inline.h"

enum { BLOCK = 16384, ROWS = 16, SPAN = 2048, POSITION_BITS = 11, SAMPLING = 16, MOST_PIECES = 16, MOST_SIGNS = 5 };

/* A register of AVX2; two of SSE2 or NEON. Any address will do. */
enum { LANES = 16 };
typedef uint16_t lanes __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t flags __attribute__((vector_size(LANES)));

/* Pieces and signs as in `WindowLayout`. */
struct layout {
    int32_t mantissa_bits, code_bits, num_guests, hole_shift, num_pieces, num_signs;
    int32_t first_host[MOST_PIECES], mask[MOST_PIECES], shift[MOST_PIECES], sign_bit[MOST_SIGNS];
};

/* As in `Sections`. */
struct sections {
    int64_t numel, num_blocks, tail, left_over, left_over_start, counts_start, num_counts, exceptions_start, num_bases;
};

/* Bits of a row that go elsewhere: masked where they lie, then moved; at least one of the shifts is 0. */
struct field {
    const uint16_t *row;
    uint16_t mask, left, right;
};

static ALWAYS_INLINE struct field field_of(const uint16_t *row, int mask, int shift)
{
    struct field found = {row, (uint16_t)mask, (uint16_t)(shift > 0 ? shift : 0), (uint16_t)(shift < 0 ? -shift : 0)};
    return found;
}

static ALWAYS_INLINE int hole_of(const struct layout *layout)
{
    return ((1 << layout->num_guests) - 1) << layout->hole_shift;
}

static ALWAYS_INLINE int64_t length_of(const struct sections *at, int64_t block)
{
    return block < at->num_blocks ? BLOCK : at->tail;
}

#define BODY "window_body.h"
#include "versions.h"

/* Encode source[0..numel) into into[0..2 numel). `num_bytes` is how many; 2 numel if the words are kept as they are. */
EXPORTED int outsize_window_encode(
    const struct layout *layout, const struct sections *at, const uint16_t *source, uint8_t *into, int64_t *num_bytes)
{
    *num_bytes = CHOOSE(encode)(layout, at, source, into);
    if (*num_bytes == 2 * at->numel)
        memcpy(into, source, (size_t)*num_bytes);
    return 0;
}

/* Decode into into[0..numel); -1 where the list of `num_exceptions` leads outside, or is not what was counted. */
EXPORTED int outsize_window_decode(
    const struct layout *layout, const struct sections *at, const uint8_t *encoded, int64_t num_exceptions,
    uint16_t *into)
{
    return CHOOSE(decode)(layout, at, encoded, num_exceptions, into);
}

/* The lower and upper halves of source[0..count); upper ones of fp32 are bf16. */
EXPORTED int outsize_halves(const uint32_t *source, int64_t count, uint16_t *lower, uint16_t *upper)
{
    CHOOSE(halves)(source, count, lower, upper);
    return 0;
}

/* The reverse. */
EXPORTED int outsize_whole(const uint16_t *lower, const uint16_t *upper, int64_t count, uint32_t *into)
{
    CHOOSE(whole)(lower, upper, count, into);
    return 0;
}
