#include "queue.h"

#include <stddef.h>
#include <string.h>
#include <time.h>

void tl_queue_init(struct tl_queue *q, int max)
{
    pthread_condattr_t attr;
    memset(q, 0, sizeof(*q));
    q->max = max;
    pthread_mutex_init(&q->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&q->some, &attr);
    pthread_condattr_destroy(&attr);
}

void tl_queue_destroy(struct tl_queue *q)
{
    pthread_cond_destroy(&q->some);
    pthread_mutex_destroy(&q->lock);
}

bool tl_queue_push(struct tl_queue *q, struct tl_task *t)
{
    pthread_mutex_lock(&q->lock);
    bool ok = q->n < q->max && !q->closed;
    if (ok) {
        t->next_job = NULL;
        if (q->tail)
            q->tail->next_job = t;
        else
            q->head = t;
        q->tail = t;
        q->n++;
        pthread_cond_signal(&q->some);
    }
    pthread_mutex_unlock(&q->lock);
    return ok;
}

void tl_queue_poke(struct tl_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->poked = true;
    pthread_cond_signal(&q->some);
    pthread_mutex_unlock(&q->lock);
}

void tl_queue_close(struct tl_queue *q)
{
    pthread_mutex_lock(&q->lock);
    q->closed = true;
    pthread_cond_signal(&q->some);
    pthread_mutex_unlock(&q->lock);
}

struct tl_task *tl_queue_take(struct tl_queue *q, double wait_s, bool *poked, bool *closed)
{
    struct timespec until;
    pthread_mutex_lock(&q->lock);
    if (wait_s > 0 && !q->head && !q->poked && !q->closed) {
        clock_gettime(CLOCK_MONOTONIC, &until);
        long ns = until.tv_nsec + (long)(wait_s * 1e9);
        until.tv_sec += ns / 1000000000;
        until.tv_nsec = ns % 1000000000;
        /* A wake-up without cause only makes the caller look around once more. */
        pthread_cond_timedwait(&q->some, &q->lock, &until);
    }
    struct tl_task *all = q->head;
    q->head = q->tail = NULL;
    q->n = 0;
    *poked = q->poked;
    *closed = q->closed;
    q->poked = false;
    pthread_mutex_unlock(&q->lock);
    return all;
}
