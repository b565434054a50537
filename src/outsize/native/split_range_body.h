#include "split_body.h"

static void NATIVE(join_range)(const void *arguments, size_t begin, size_t end)
{
    const struct planes *p = arguments;
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t count = end - at < BLOCK ? end - at : BLOCK;
        NATIVE(join)(p->hi + at, p->lo + at, p->ties, at, count, p->master + at);
    }
}

static void NATIVE(split_range)(const void *arguments, size_t begin, size_t end)
{
    const struct planes *p = arguments;
    for (size_t at = begin; at < end; at += BLOCK) {
        size_t count = end - at < BLOCK ? end - at : BLOCK;
        NATIVE(split)(p->master + at, at, count, p->hi + at, p->lo + at, p->ties);
    }
}
