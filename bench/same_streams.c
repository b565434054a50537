/* What memory gives a step that computes nothing: the planes of the exact form, each read, changed and written, and a
 * bf16 gradient that is read, in chunks that threads take in turn as native/threads.c deals them out. */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum { CHUNK = 1 << 15, MOST_THREADS = 256 };

struct work {
    int16_t *hi, *lo;
    const int16_t *gradient;
    float *exp_avg, *exp_avg_sq;
    size_t count;
    atomic_size_t next;
};

static void touch(
    int16_t *restrict hi, int16_t *restrict lo, const int16_t *restrict gradient, float *restrict exp_avg,
    float *restrict exp_avg_sq, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        hi[i] += gradient[i];
        lo[i] += gradient[i];
        exp_avg[i] += 1.0f;
        exp_avg_sq[i] += 1.0f;
    }
}

static void *take_chunks(void *context)
{
    struct work *w = context;
    for (;;) {
        size_t at = atomic_fetch_add_explicit(&w->next, CHUNK, memory_order_relaxed);
        if (at >= w->count)
            return NULL;
        size_t left = w->count - at, count = left < CHUNK ? left : CHUNK;
        touch(w->hi + at, w->lo + at, w->gradient + at, w->exp_avg + at, w->exp_avg_sq + at, count);
    }
}

int same_streams(
    int16_t *hi, int16_t *lo, const int16_t *gradient, float *exp_avg, float *exp_avg_sq, size_t count, int num_threads)
{
    struct work work = {hi, lo, gradient, exp_avg, exp_avg_sq, count, 0};
    pthread_t threads[MOST_THREADS];
    int started = 0;
    while (started < num_threads - 1 && started < MOST_THREADS &&
           pthread_create(&threads[started], NULL, take_chunks, &work) == 0)
        started++;
    take_chunks(&work);
    for (int i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return started + 1;
}
