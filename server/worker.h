/* server/worker.h - the one thread that owns the model, its scheduler and its memory.
 *
 * It takes tasks from the loop, submits them to the scheduler, runs its steps and posts results. The loop learns of results
 * by one wake-up handle; wake-ups coalesce, so it always takes all of them. */
#ifndef TL_SERVER_WORKER_H
#define TL_SERVER_WORKER_H

#include "../engine/tinyloop.h"
#include "config.h"
#include "job.h"
#include "registry.h"

enum tl_worker_state { TL_WORKER_LOADING, TL_WORKER_READY, TL_WORKER_FAILED };

/* What the worker tells about itself, as of its last step. */
struct tl_worker_figures {
    enum tl_worker_state state;
    struct tl_error error; /* FAILED */
    bool failed_loading;   /* FAILED before it was ready */
    char load_step[64];
    double load_fraction;
    double alive_at; /* monotonic time of its last sign of life */
    double busy_s;
    struct tl_sched_stats sched;
    struct tl_memory memory;
    struct tl_registry_counters registry;
    const struct tl_model_info *info;     /* READY: valid until the worker is freed */
    const struct tl_tokenizer *tokenizer; /* likewise; may be NULL */
    const struct tl_chat_template *chat;  /* likewise */
    const struct tl_error *no_chat;       /* why chat is NULL, if there is more to say; likewise */
};

/* wake(wake_arg) is called from the worker when results or news wait; it must not block. Starts the thread, which loads
 * the model at once. Owner: caller, tl_worker_free(). cfg must outlive it. */
enum tl_status tl_worker_create(struct tl_worker **out, const struct tl_config *cfg, void (*wake)(void *),
                                void *wake_arg, struct tl_error *err);
/* Loop: end. Every task is cancelled and its results are posted before this returns; take them, then free. */
void tl_worker_stop(struct tl_worker *w);
/* Worker: the file of this definition (kind, tenant, id) may go. */
void tl_worker_drop_file(struct tl_worker *w, const struct tl_definition *d);
/* Loop: a definition whose entry ended by itself, or NULL. Owner: caller. */
struct tl_definition *tl_worker_dropped(struct tl_worker *w);
void tl_worker_free(struct tl_worker *w); /* NULL is fine; after tl_worker_stop */

bool tl_worker_submit(struct tl_worker *w, struct tl_task *t); /* loop; false: full. Takes a reference if true */
void tl_worker_poke(struct tl_worker *w);                      /* loop: have every task attended to */
void tl_worker_deliver(struct tl_worker *w);                   /* loop: hand out all results */
void tl_worker_figures(struct tl_worker *w, struct tl_worker_figures *out); /* any thread */

/* For tasks, on the worker. */
struct tl_sched *tl_worker_sched(struct tl_worker *w);
struct tl_model *tl_worker_model(struct tl_worker *w);
struct tl_registry *tl_worker_registry(struct tl_worker *w);
struct tl_forms *tl_worker_forms(struct tl_worker *w);
const struct tl_error *tl_worker_failure(struct tl_worker *w); /* not NULL: nothing can be computed any more */
void tl_worker_attend_soon(struct tl_worker *w);
void tl_worker_show_work(struct tl_worker *w);               /* steps so far, before anybody hears that they ended */
void tl_worker_post(struct tl_worker *w, struct tl_task *t); /* results wait; cheap when they already did */
void tl_worker_done(struct tl_worker *w, struct tl_task *t); /* posts, then gives up the worker's reference */

#endif
