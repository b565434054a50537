/* Threads that are started once, when they are first wanted, and wait from then on. Starting them anew for every range
 * costs more than a wake-up, and the new ones begin behind the caller on its own processor: a training run's optimizer
 * took 1.4 times as long over units of 3 million parameters (docs/log.md).
 *
 * A thread is as nice as the one that starts it, and no less ever after. So there is a pool for each niceness: what a
 * checkpoint computes beside training is helped by threads that give way as it does, and these help nobody else. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>

/* Niceness is -20 to 19. */
enum { MOST_THREADS = 256, NUM_POOLS = 40 };

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

struct pool {
    pthread_cond_t offered;
    struct deal *open_deals;
    int num_threads_started, num_busy, num_wanted;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that follows, `wanted` and `inside` too */
static pthread_cond_t finished = PTHREAD_COND_INITIALIZER;
static struct pool pools[NUM_POOLS] = {[0 ... NUM_POOLS - 1] = {.offered = PTHREAD_COND_INITIALIZER}};

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

static void withdraw(struct pool *pool, struct deal *deal)
{
    pool->num_wanted -= deal->wanted;
    deal->wanted = 0;
    for (struct deal **place = &pool->open_deals; *place; place = &(*place)->after)
        if (*place == deal) {
            *place = deal->after;
            return;
        }
}

static void *work(void *of_pool)
{
    struct pool *pool = of_pool;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!pool->open_deals)
            pthread_cond_wait(&pool->offered, &lock);
        struct deal *deal = pool->open_deals;
        deal->inside++;
        deal->wanted--;
        pool->num_wanted--;
        pool->num_busy++;
        if (!deal->wanted)
            withdraw(pool, deal);
        pthread_mutex_unlock(&lock);
        take_chunks(deal);
        pthread_mutex_lock(&lock);
        pool->num_busy--;
        if (!--deal->inside)
            pthread_cond_broadcast(&finished);
    }
    return NULL;
}

/* That of the calling thread, by its niceness; on Linux each has its own. */
static struct pool *own_pool(void)
{
    int level = getpriority(PRIO_PROCESS, 0) + NUM_POOLS / 2;
    return &pools[level < 0 ? 0 : level < NUM_POOLS ? level : NUM_POOLS - 1];
}

static void offer(struct pool *pool, struct deal *deal, int wanted)
{
    pthread_mutex_lock(&lock);
    deal->wanted = wanted;
    deal->after = pool->open_deals;
    pool->open_deals = deal;
    pool->num_wanted += wanted;
    while (pool->num_threads_started - pool->num_busy < pool->num_wanted && pool->num_threads_started < MOST_THREADS) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, pool))
            break;
        pthread_detach(thread);
        pool->num_threads_started++;
    }
    for (int i = 0; i < wanted; i++)
        pthread_cond_signal(&pool->offered);
    pthread_mutex_unlock(&lock);
}

static void finish(struct pool *pool, struct deal *deal)
{
    pthread_mutex_lock(&lock);
    if (deal->wanted)
        withdraw(pool, deal);
    while (deal->inside)
        pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
}

/* A forked process has the thread that forked it and no other, and what these have left behind. */
static void begin_anew(void)
{
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&finished, NULL);
    for (int i = 0; i < NUM_POOLS; i++) {
        pools[i] = (struct pool){.open_deals = NULL};
        pthread_cond_init(&pools[i].offered, NULL);
    }
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
    struct pool *pool = wanted > 0 ? own_pool() : NULL;
    if (pool)
        offer(pool, &deal, wanted);
    take_chunks(&deal);
    if (pool)
        finish(pool, &deal);
}
