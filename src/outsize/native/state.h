/* How kernels of optimizers go through planes, and how moments lie there; see state_body.h. */
#ifndef OUTSIZE_STATE_H
#define OUTSIZE_STATE_H

#include <stddef.h>
#include <stdint.h>

/* Elements that are worked on at once, those that one thread takes, and those that share an exponent: multiples of GROUP
 * and of 8. */
enum { BLOCK = 512, CHUNK = 1 << 15, GROUP = 64 };
enum { STATE_FP32 = 0, STATE_BF16 = 1, STATE_8BIT = 2 };
/* Bits of fraction of the codes of 8 bits: a sign and 16 octaves for the first moment; for the second, which has
 * no sign and is a square, 32 octaves. */
enum { MANTISSA = 3 };

/* A master that is split: the weight, and either 16 bits below it, with ties where these are kept, or 8. */
struct halves {
    uint16_t *hi;
    int16_t *lo;
    int8_t *lo8;
    uint8_t *ties; /* may be NULL; bit i of byte i / 8 is that of element i */
};

union word {
    uint32_t bits;
    float value;
};

#endif
