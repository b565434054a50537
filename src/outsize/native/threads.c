#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>

enum { MOST_THREADS = 256 };

struct deal {
    range_function function;
    const void *arguments;
    size_t count;
    size_t chunk;
    atomic_size_t next;
};

static void *take_chunks(void *context)
{
    struct deal *deal = context;
    for (;;) {
        size_t begin = atomic_fetch_add_explicit(&deal->next, deal->chunk, memory_order_relaxed);
        if (begin >= deal->count)
            return NULL;
        size_t left = deal->count - begin;
        deal->function(deal->arguments, begin, begin + (left < deal->chunk ? left : deal->chunk));
    }
}

void outsize_parallel(range_function function, const void *arguments, size_t count, size_t chunk, int num_threads)
{
    struct deal deal = {function, arguments, count, chunk, 0};
    size_t num_chunks = chunk ? count / chunk + (count % chunk != 0) : 0;
    pthread_t threads[MOST_THREADS];
    int started = 0, wanted = num_threads < MOST_THREADS ? num_threads - 1 : MOST_THREADS;
    if (wanted > 0 && (size_t)wanted > num_chunks - 1)
        wanted = num_chunks ? (int)num_chunks - 1 : 0;
    while (started < wanted && pthread_create(&threads[started], NULL, take_chunks, &deal) == 0)
        started++;
    take_chunks(&deal);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}
