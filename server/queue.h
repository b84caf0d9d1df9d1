/* server/queue.h - the bounded hand-over from the loop to the worker. Refuses when full, never blocks the loop. */
#ifndef TL_SERVER_QUEUE_H
#define TL_SERVER_QUEUE_H

#include <pthread.h>

#include "job.h"

struct tl_queue {
    pthread_mutex_t lock;
    pthread_cond_t some;
    struct tl_task *head, *tail;
    int n, max;
    bool poked, closed;
};

void tl_queue_init(struct tl_queue *q, int max);
void tl_queue_destroy(struct tl_queue *q); /* must be empty */
bool tl_queue_push(struct tl_queue *q,
                   struct tl_task *t);   /* any thread; false: full or closed. Takes over a reference */
void tl_queue_poke(struct tl_queue *q);  /* any thread: wake the other side without a job */
void tl_queue_close(struct tl_queue *q); /* any thread: no more jobs; wakes the other side */
/* Worker: everything that waits, in order. If there is nothing, sleeps up to wait_s for a job or a poke. *poked: there was
 * one since the last call. *closed: there will be nothing more. */
struct tl_task *tl_queue_take(struct tl_queue *q, double wait_s, bool *poked, bool *closed);

#endif
