#include "split_body.h"
#include "state_body.h"

static void NATIVE(join_range)(const void *arguments, size_t begin, size_t end)
{
    const struct range *r = arguments;
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t count = end - at < BLOCK ? end - at : BLOCK;
        NATIVE(join_halves)(&r->halves, at, count, r->master + at);
    }
}

static void NATIVE(split_range)(const void *arguments, size_t begin, size_t end)
{
    const struct range *r = arguments;
    uint32_t chance[BLOCK];
    for (size_t i = 0; i < BLOCK; i++)
        chance[i] = 0x80000000; /* half a step */
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t count = end - at < BLOCK ? end - at : BLOCK;
        if (r->by_chance)
            NATIVE(chances)(r->first + (uint32_t)at, r->key, count, chance);
        NATIVE(split_halves)(&r->halves, r->master + at, chance, at, count);
    }
}
