/* NF4, byte for byte as codecs/nf4.py writes it: 64 elements share a magnitude, each is the number of a level. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "inline.h"
#include "threads.h"

/* Elements of a block; levels; elements that one thread takes at once. */
enum { BLOCK = 64, LEVELS = 16, CHUNK = 1 << 17 };
/* Keeps a block of zeros from dividing by zero. */
static const float LEAST = 0x1p-149f;

/* What a call works on. levels: by code, and where codes change, LEVELS - 1. is_bf16: of elements, fp32 otherwise. */
struct nf4 {
    const float *levels, *borders;
    void *elements;
    uint8_t *codes;
    float *scales;
    int is_bf16;
};

static ALWAYS_INLINE float from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static ALWAYS_INLINE uint16_t nearest_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define BODY "nf4_body.h"
#include "versions.h"

/* Write elements[0..numel) in codes, two to a byte, and magnitudes; NaN where a block is not finite. */
EXPORTED int outsize_nf4_encode(
    const float *borders, void *elements, int is_bf16, size_t numel, uint8_t *codes, float *scales, int num_threads)
{
    struct nf4 nf4 = {NULL, borders, elements, codes, scales, is_bf16};
    outsize_parallel(CHOOSE(encode_range), &nf4, numel, CHUNK, num_threads);
    return 0;
}

/* The reverse. */
EXPORTED int outsize_nf4_decode(
    const float *levels, uint8_t *codes, float *scales, size_t numel, void *elements, int is_bf16, int num_threads)
{
    struct nf4 nf4 = {levels, NULL, elements, codes, scales, is_bf16};
    outsize_parallel(CHOOSE(decode_range), &nf4, numel, CHUNK, num_threads);
    return 0;
}
