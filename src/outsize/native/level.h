/* Which instruction set is used: the best that processor and operating system offer, or a lower one that was asked for. */
#ifndef OUTSIZE_LEVEL_H
#define OUTSIZE_LEVEL_H

#define EXPORTED __attribute__((visibility("default")))

enum { LEVEL_PLAIN = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2 };

/* The level in use. */
EXPORTED int outsize_level(void);

/* Use `level`, or the best there is where that is lower; returns what is used from then on. For tests. */
EXPORTED int outsize_use_level(int level);

#endif
