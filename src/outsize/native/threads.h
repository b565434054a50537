/* A range dealt out to threads. */
#ifndef OUTSIZE_THREADS_H
#define OUTSIZE_THREADS_H

#include <stddef.h>

/* What is done to elements begin to end; end - begin is `chunk`, or less at the end of the range. */
typedef void (*range_function)(const void *arguments, size_t begin, size_t end);

/* Call `function` for chunks of 0 to `count`, in any order, on the calling thread and num_threads - 1 others, and
 * return when all are done. Whoever is free takes the next chunk, so a thread that is held up holds nobody up. A thread
 * that cannot be started is done without. */
void outsize_parallel(range_function function, const void *arguments, size_t count, size_t chunk, int num_threads);

#endif
