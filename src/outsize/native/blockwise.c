/* Groups of integers that share a scale, byte for byte as codecs/blockwise.py writes them, which says what they mean.
 *
 * A group is worked on whole, in fp32, in the first-level cache. Every operation is the one of torch, in its order and
 * rounded by itself.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"
#include "threads.h"

/* Groups of int8 and int4; elements that one thread takes at once, those of a piece in blockwise.py; groups together. */
enum { GROUP8 = 128, GROUP4 = 64, PIECE = 1 << 18, FEW = 16 };

/* Added to a number below 2^22, it leaves the nearest integer, ties to even, in the lower bits: 1.5 * 2^23. */
static const float MAGIC = 12582912.0f;
enum { MAGIC_BITS = 0x4B400000, INFINITE = 0x7F800000, BF16_NAN = 0x7FC0 };
static const float LEAST_SCALE = 0x1p-126f;

/* factor: from the spread of a group to its scale. */
struct grid {
    int32_t bits, symmetric, is_bf16;
    float factor;
};

/* What a call works on. chances: where each piece reads its own; NULL rounds to the nearest. */
struct blocks {
    const struct grid *grid;
    void *elements;
    const float *const *chances;
    uint8_t *codes;
    uint16_t *scales, *zeros;
};

union group {
    float value[GROUP8];
    uint32_t bits[GROUP8];
    int32_t integer[GROUP8];
};

static ALWAYS_INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static ALWAYS_INLINE float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static ALWAYS_INLINE float from_bf16(uint16_t half)
{
    return float_of((uint32_t)half << 16);
}

/* To the nearest, ties to even. A NaN that arithmetic made of bf16 has no lower bits, and stays one. */
static ALWAYS_INLINE uint16_t to_bf16(uint32_t bits)
{
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

static ALWAYS_INLINE int is_finite(float value)
{
    return (bits_of(value) & INFINITE) != INFINITE;
}

/* Bits of a float to an integer with the order of the numbers, infinities and NaN at its ends; and the reverse. */
static ALWAYS_INLINE int32_t in_order(int32_t bits)
{
    return bits ^ (bits >> 31 & INT32_MAX);
}

#define BODY "blockwise_body.h"
#include "versions.h"

/* Write elements[0..numel), bf16 or fp32: integers, scales, and zero points where the grid has them. */
EXPORTED int outsize_blockwise_encode(
    const struct grid *grid, void *elements, size_t numel, const float *const *chances, uint8_t *codes,
    uint16_t *scales, uint16_t *zeros, int num_threads)
{
    struct blocks blocks = {grid, elements, chances, codes, scales, zeros};
    outsize_parallel(CHOOSE(encode_range), &blocks, numel, PIECE, num_threads);
    return 0;
}

/* The reverse. */
EXPORTED int outsize_blockwise_decode(
    const struct grid *grid, uint8_t *codes, uint16_t *scales, uint16_t *zeros, void *elements, size_t numel,
    int num_threads)
{
    struct blocks blocks = {grid, elements, NULL, codes, scales, zeros};
    outsize_parallel(CHOOSE(decode_range), &blocks, numel, PIECE, num_threads);
    return 0;
}
