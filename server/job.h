/* server/job.h - a piece of work that crosses from the loop to the worker, and its results on the way back.
 *
 * A task is refcounted: the loop holds one reference as long as somebody waits for it, the worker one from
 * tl_worker_submit until tl_worker_done, and one while results wait to be delivered. What both sides touch is guarded by
 * the lock of the concrete task (generate.h). */
#ifndef TL_SERVER_JOB_H
#define TL_SERVER_JOB_H

#include <stdatomic.h>
#include <stdbool.h>

struct tl_task;
struct tl_worker;

struct tl_task_ops {
    void (*work)(struct tl_task *t, struct tl_worker *w); /* worker: start; ends with tl_worker_done, now or later */
    void (*attend)(struct tl_task *t,
                   struct tl_worker *w); /* worker, between steps: look at flags, submit what follows */
    void (*deliver)(struct tl_task *t);  /* loop: results are there */
    void (*free)(struct tl_task *t);     /* the last reference is gone: any thread */
};

struct tl_task {
    const struct tl_task_ops *ops;
    atomic_int refs;
    struct tl_task *next_job;              /* queue.c */
    struct tl_task *next_result;           /* worker.c, under its lock */
    bool posted;                           /* waits for delivery; under the worker's lock */
    struct tl_task *live_prev, *live_next; /* worker: started, not done */
};

void tl_task_init(struct tl_task *t, const struct tl_task_ops *ops); /* one reference, the caller's */
void tl_task_ref(struct tl_task *t);
void tl_task_drop(struct tl_task *t); /* NULL is fine */

#endif
