/* Masters to planes and back, of whole ranges. */
#include <stddef.h>
#include <stdint.h>

#include "threads.h"

/* Elements that are looked at together for exceptions, and those that one thread takes at once. Tie bits of two chunks
 * never share a byte: a chunk is a multiple of 8 elements. */
enum { BLOCK = 512, CHUNK = 1 << 16 };

struct planes {
    uint16_t *hi;
    int16_t *lo;
    uint8_t *ties;
    uint32_t *master;
};

#define BODY "split_range_body.h"
#include "versions.h"

/* master[0..count) from planes; ties may be NULL, and has bit i of byte i / 8 for element i otherwise. */
EXPORTED void outsize_join(
    uint16_t *hi, int16_t *lo, uint8_t *ties, uint32_t *master, size_t count, int num_threads)
{
    struct planes planes = {hi, lo, ties, master};
    outsize_parallel(CHOOSE(join_range), &planes, count, CHUNK, num_threads);
}

/* Planes of master[0..count). */
EXPORTED void outsize_split(
    uint16_t *hi, int16_t *lo, uint8_t *ties, uint32_t *master, size_t count, int num_threads)
{
    struct planes planes = {hi, lo, ties, master};
    outsize_parallel(CHOOSE(split_range), &planes, count, CHUNK, num_threads);
}
