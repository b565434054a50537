/* Threads that are started once, when they are first wanted, and wait from then on. Starting them anew for every range
 * costs more than a wake-up, and the new ones begin behind the caller on its own processor: a training run's optimizer
 * took 1.4 times as long over units of 3 million parameters (docs/log.md). */
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
    int wanted; /* threads that may still join */
    int inside; /* threads that have joined and not left */
    struct deal *after;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, `wanted` and `inside` too */
static pthread_cond_t offered = PTHREAD_COND_INITIALIZER;
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static struct deal *open_deals;
static int num_threads_started, num_busy, num_wanted;

static void take_chunks(struct deal *deal)
{
    for (;;) {
        size_t begin = atomic_fetch_add_explicit(&deal->next, deal->chunk, memory_order_relaxed);
        if (begin >= deal->count)
            return;
        size_t left = deal->count - begin;
        deal->function(deal->arguments, begin, begin + (left < deal->chunk ? left : deal->chunk));
    }
}

static void withdraw(struct deal *deal)
{
    num_wanted -= deal->wanted;
    deal->wanted = 0;
    for (struct deal **place = &open_deals; *place; place = &(*place)->after)
        if (*place == deal) {
            *place = deal->after;
            return;
        }
}

static void *work(void *nothing)
{
    (void)nothing;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!open_deals)
            pthread_cond_wait(&offered, &lock);
        struct deal *deal = open_deals;
        deal->inside++;
        deal->wanted--;
        num_wanted--;
        num_busy++;
        if (!deal->wanted)
            withdraw(deal);
        pthread_mutex_unlock(&lock);
        take_chunks(deal);
        pthread_mutex_lock(&lock);
        num_busy--;
        if (!--deal->inside)
            pthread_cond_broadcast(&finished);
    }
    return NULL;
}

static void offer(struct deal *deal, int wanted)
{
    pthread_mutex_lock(&lock);
    deal->wanted = wanted;
    deal->after = open_deals;
    open_deals = deal;
    num_wanted += wanted;
    while (num_threads_started - num_busy < num_wanted && num_threads_started < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, NULL))
            break;
        pthread_detach(thread);
        num_threads_started++;
    }
    for (int i = 0; i < wanted; i++)
        pthread_cond_signal(&offered);
    pthread_mutex_unlock(&lock);
}

static void finish(struct deal *deal)
{
    pthread_mutex_lock(&lock);
    if (deal->wanted)
        withdraw(deal);
    while (deal->inside)
        pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
}

/* A forked process has the thread that forked it and no other, and what these have left behind. */
static void begin_anew(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&offered, NULL);
    pthread_cond_init(&finished, NULL);
    open_deals = NULL;
    num_threads_started = num_busy = num_wanted = 0;
}

__attribute__((constructor)) static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, begin_anew);
}

void outsize_parallel(range_function function, const void *arguments, size_t count, size_t chunk, int num_threads)
{
    struct deal deal = {.function = function, .arguments = arguments, .count = count, .chunk = chunk};
    size_t num_chunks = chunk ? count / chunk + (count % chunk != 0) : 0;
    int wanted = num_threads - 1;
    if (wanted > 0 && (size_t)wanted + 1 > num_chunks)
        wanted = num_chunks ? (int)num_chunks - 1 : 0;
    if (wanted > 0)
        offer(&deal, wanted);
    take_chunks(&deal);
    if (wanted > 0)
        finish(&deal);
}
