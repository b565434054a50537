/* Masters to planes and back, of whole ranges. */
#include "state.h"
#include "threads.h"

struct range {
    struct halves halves;
    uint32_t *master;
    uint32_t first, key; /* of the chances */
    int32_t by_chance;   /* else to the nearest */
};

#define BODY "split_range_body.h"
#include "versions.h"

/* master[0..count) from planes. */
EXPORTED void outsize_join(
    uint16_t *hi, int16_t *lo, int8_t *lo8, uint8_t *ties, uint32_t *master, size_t count, int num_threads)
{
    struct range range = {{hi, lo, lo8, ties}, master, 0, 0, 0};
    outsize_parallel(CHOOSE(join_range), &range, count, CHUNK, num_threads);
}

/* Planes of master[0..count), which begins with element `first` of its unit. */
EXPORTED void outsize_split(
    uint16_t *hi, int16_t *lo, int8_t *lo8, uint8_t *ties, uint32_t *master, size_t count, int num_threads,
    uint32_t first, uint32_t key, int32_t by_chance)
{
    struct range range = {{hi, lo, lo8, ties}, master, first, key, by_chance};
    outsize_parallel(CHOOSE(split_range), &range, count, CHUNK, num_threads);
}
