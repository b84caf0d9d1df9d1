#include "worker.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "boot_manifest.h"
#include "form_ask.h"
#include "ids.h"
#include "log.h"
#include "queue.h"

#define COUNT_EVERY_S 0.25
#define IDLE_WAIT_S   0.5 /* also the pulse of an idle worker */

struct tl_worker {
    const struct tl_config *cfg;
    struct tl_queue queue;
    pthread_t thread;
    bool started;
    void (*wake)(void *);
    void *wake_arg;
    /* worker thread */
    struct tl_model *model;
    struct tl_sched *sched;
    struct tl_registry *registry;
    struct tl_forms *forms;
    struct tl_task *live;
    bool attend;
    double count_at;
    bool failed;
    struct tl_error failure;
    /* under lock */
    pthread_mutex_t lock;
    struct tl_task *first_result, *last_result;
    struct tl_worker_figures figures;
    struct dropped *dropped, **dropped_tail;
};

struct dropped { /* definitions whose files may go, oldest first */
    struct dropped *next;
    struct tl_definition *def;
};

struct tl_sched *tl_worker_sched(struct tl_worker *w) { return w->sched; }
struct tl_model *tl_worker_model(struct tl_worker *w) { return w->model; }
struct tl_registry *tl_worker_registry(struct tl_worker *w) { return w->registry; }
struct tl_forms *tl_worker_forms(struct tl_worker *w) { return w->forms; }
const struct tl_error *tl_worker_failure(struct tl_worker *w) { return w->failed ? &w->failure : NULL; }
void tl_worker_attend_soon(struct tl_worker *w) { w->attend = true; }

void tl_worker_show_work(struct tl_worker *w)
{
    pthread_mutex_lock(&w->lock);
    if (w->sched)
        tl_sched_stats(w->sched, &w->figures.sched);
    pthread_mutex_unlock(&w->lock);
}

/* ---- results ------------------------------------------------------------------------------------------------------ */

void tl_worker_post(struct tl_worker *w, struct tl_task *t)
{
    bool first = false;
    pthread_mutex_lock(&w->lock);
    if (!t->posted) {
        t->posted = true;
        t->next_result = NULL;
        tl_task_ref(t);
        first = !w->first_result;
        if (w->last_result)
            w->last_result->next_result = t;
        else
            w->first_result = t;
        w->last_result = t;
    }
    pthread_mutex_unlock(&w->lock);
    if (first)
        w->wake(w->wake_arg);
}

/* One at a time, since a task may be posted again as soon as it is off the list; and no more than there were at first, so
 * that a busy worker cannot keep the loop in here. */
void tl_worker_deliver(struct tl_worker *w)
{
    int left = 0;
    pthread_mutex_lock(&w->lock);
    for (struct tl_task *t = w->first_result; t; t = t->next_result)
        left++;
    while (left-- > 0) {
        struct tl_task *t = w->first_result;
        w->first_result = t->next_result;
        if (!w->first_result)
            w->last_result = NULL;
        t->posted = false;
        pthread_mutex_unlock(&w->lock);
        t->ops->deliver(t);
        tl_task_drop(t);
        pthread_mutex_lock(&w->lock);
    }
    bool more = w->first_result != NULL;
    pthread_mutex_unlock(&w->lock);
    if (more)
        w->wake(w->wake_arg);
}

void tl_worker_done(struct tl_worker *w, struct tl_task *t)
{
    if (t->live_prev)
        t->live_prev->live_next = t->live_next;
    else
        w->live = t->live_next;
    if (t->live_next)
        t->live_next->live_prev = t->live_prev;
    tl_worker_post(w, t);
    tl_task_drop(t);
}

/* ---- the thread --------------------------------------------------------------------------------------------------- */

static void on_load_progress(void *arg, const char *what, double fraction)
{
    struct tl_worker *w = arg;
    pthread_mutex_lock(&w->lock);
    snprintf(w->figures.load_step, sizeof(w->figures.load_step), "%s", what);
    w->figures.load_fraction = fraction;
    w->figures.alive_at = tl_now_mono();
    pthread_mutex_unlock(&w->lock);
    w->wake(w->wake_arg);
}

static void fail(struct tl_worker *w, const struct tl_error *err, bool loading)
{
    w->failed = true;
    w->failure = *err;
    pthread_mutex_lock(&w->lock);
    w->figures.state = TL_WORKER_FAILED;
    w->figures.error = *err;
    w->figures.failed_loading = loading;
    pthread_mutex_unlock(&w->lock);
    w->wake(w->wake_arg);
}

static void on_registry_changed(void *arg) { tl_worker_attend_soon(arg); }

/* An entry has expired or was evicted: the loop lets its file go. Without memory the file stays, and is found expired later. */
static void on_dropped(void *arg, const struct tl_definition *d)
{
    struct tl_worker *w = arg;
    struct dropped *node = calloc(1, sizeof(*node));
    if (node)
        node->def = tl_definition_copy(d);
    if (!node || !node->def) {
        free(node);
        return;
    }
    pthread_mutex_lock(&w->lock);
    *w->dropped_tail = node;
    w->dropped_tail = &node->next;
    pthread_mutex_unlock(&w->lock);
    w->wake(w->wake_arg);
}

void tl_worker_drop_file(struct tl_worker *w, const struct tl_definition *d) { on_dropped(w, d); }

struct tl_definition *tl_worker_dropped(struct tl_worker *w)
{
    struct tl_definition *d = NULL;
    pthread_mutex_lock(&w->lock);
    struct dropped *node = w->dropped;
    if (node) {
        w->dropped = node->next;
        if (!w->dropped)
            w->dropped_tail = &w->dropped;
    }
    pthread_mutex_unlock(&w->lock);
    if (node)
        d = node->def;
    free(node);
    return d;
}

struct restoring {
    struct tl_worker *w;
    const struct tl_boot_manifest *boot; /* NULL = none */
};

static void restore(void *arg, struct tl_definition *d)
{
    struct restoring *r = arg;
    if (!r->boot || !tl_boot_manifest_replaces(r->boot, d)) {
        tl_registry_restore(r->w->registry, d);
        return;
    }
    tl_log(TL_LOG_INFO, "the stored entry %s gives way to the boot manifest's", d->id);
    on_dropped(r->w, d);
    tl_definition_free(d);
}

static enum tl_status open_registry(struct tl_worker *w, struct tl_error *err)
{
    const struct tl_config *cfg = w->cfg;
    struct tl_registry_params rp = {
        .model = w->model,
        .sched = w->sched,
        .pool_capacity = (int)cfg->pool_capacity,
        .pool_bytes = (uint64_t)cfg->pool_bytes,
        .entries_max = (int)cfg->max_entries,
        .tenant_entries_max = (int)cfg->tenant_entries,
        .tenant_bytes_max = (uint64_t)cfg->tenant_bytes,
        .tombstones_max = (int)cfg->gone_entries,
        .rebuild_at_start = cfg->rebuild_at_start,
        .changed = on_registry_changed,
        .dropped = on_dropped,
        .arg = w,
    };
    struct tl_boot_manifest *boot = NULL;
    enum tl_status st = tl_forms_create(&w->forms, w->model, err);
    if (st == TL_OK)
        st = tl_registry_create(&w->registry, &rp, err);
    if (st == TL_OK && cfg->boot_manifest[0]) {
        st = tl_boot_manifest_read(&boot, cfg->boot_manifest, err);
        if (st == TL_OK)
            st = tl_boot_manifest_resolve(boot, cfg, w->model, err);
    }
    struct restoring r = {w, boot};
    if (st == TL_OK && cfg->state_dir[0])
        st = tl_definitions_load(cfg->state_dir, restore, &r, err);
    if (st == TL_OK && boot)
        st = tl_boot_manifest_build(boot, w->registry, w->sched, on_load_progress, w, err);
    tl_boot_manifest_free(boot);
    return st;
}

static void load(struct tl_worker *w)
{
    const struct tl_config *cfg = w->cfg;
    struct tl_error err = {0};
    struct tl_model_params mp = {
        .dir = cfg->model,
        .device = cfg->device,
        .n_threads = (int)cfg->threads,
        .memory_bytes = (uint64_t)cfg->memory_bytes,
        .max_seq_len = (int)cfg->max_seq_len,
        .max_loops = (int)cfg->max_loops,
        .step_rows_max = (int)cfg->step_rows,
        .start_seed = (uint64_t)cfg->start_seed,
        .start_state_random = cfg->random_start_state,
        .progress = on_load_progress,
        .progress_arg = w,
    };
    /* The loop bounds what waits; one request may bring max_choices sequences. */
    struct tl_sched_params sp = {
        .n_running_max = (int)cfg->max_running,
        .n_waiting_max = (int)((cfg->max_waiting + cfg->max_running) * cfg->max_choices),
    };
    enum tl_status st = tl_model_open(&w->model, &mp, &err);
    if (st == TL_OK)
        st = tl_model_warm(w->model, sp.n_running_max, &err);
    if (st == TL_OK)
        st = tl_sched_create(&w->sched, w->model, &sp, &err);
    if (st == TL_OK)
        st = open_registry(w, &err);
    if (st != TL_OK) {
        fail(w, &err, true);
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->figures.state = TL_WORKER_READY;
    w->figures.load_fraction = 1;
    w->figures.alive_at = tl_now_mono();
    w->figures.info = tl_model_info(w->model);
    w->figures.tokenizer = tl_model_tokenizer(w->model);
    w->figures.chat = tl_model_chat(w->model, &w->figures.no_chat);
    tl_model_memory(w->model, &w->figures.memory);
    pthread_mutex_unlock(&w->lock);
    w->wake(w->wake_arg);
}

static void start_tasks(struct tl_worker *w, struct tl_task *t)
{
    while (t) {
        struct tl_task *next = t->next_job;
        t->live_prev = NULL;
        t->live_next = w->live;
        if (w->live)
            w->live->live_prev = t;
        w->live = t;
        t->ops->work(t, w);
        t = next;
    }
}

static void attend_tasks(struct tl_worker *w)
{
    struct tl_task *next;
    w->attend = false;
    for (struct tl_task *t = w->live; t; t = next) {
        next = t->live_next; /* t may end in here; the others cannot */
        t->ops->attend(t, w);
    }
}

static void publish(struct tl_worker *w, double busy_s)
{
    pthread_mutex_lock(&w->lock);
    w->figures.alive_at = tl_now_mono();
    w->figures.busy_s += busy_s;
    if (w->sched) {
        tl_sched_stats(w->sched, &w->figures.sched);
        tl_model_memory(w->model, &w->figures.memory);
        if (busy_s == 0 || w->figures.alive_at >= w->count_at) { /* a walk over all entries: not in every step */
            tl_registry_counters(w->registry, &w->figures.registry);
            w->count_at = w->figures.alive_at + COUNT_EVERY_S;
        }
    }
    pthread_mutex_unlock(&w->lock);
}

#ifdef TL_TEST_HOOKS
/* The device is lost after this many steps that had work, if a test asks for it. */
static bool test_device_is_lost(struct tl_error *err)
{
    static int steps;
    const char *at = getenv("TINYLOOPD_TEST_FAIL_STEP");
    if (!at || ++steps != atoi(at))
        return false;
    tl_fail(err, TL_ERR_DEVICE, "the device was lost by a test");
    return true;
}
#endif

static void *run(void *arg)
{
    struct tl_worker *w = arg;
    bool busy = false, poked, closed = false;
    load(w);
    while (!closed) {
        struct tl_task *jobs = tl_queue_take(&w->queue, busy || w->attend ? 0 : IDLE_WAIT_S, &poked, &closed);
        double start = tl_now_mono();
        struct tl_error err = {0};
        start_tasks(w, jobs);
        if (!w->failed)
            tl_registry_tick(w->registry);
        if (poked || w->attend)
            attend_tasks(w);
        busy = false;
        if (!w->failed && tl_sched_step(w->sched, &busy, &err) != TL_OK)
            fail(w, &err, false);
#ifdef TL_TEST_HOOKS
        if (busy && !w->failed && test_device_is_lost(&err)) {
            fail(w, &err, false);
            tl_sched_free(w->sched);
            w->sched = NULL;
        }
#endif
        publish(w, busy ? tl_now_mono() - start : 0);
    }
    /* Whatever is left ends as cancelled, by events from in here; a task that waits for nothing of the scheduler ends in
     * its attend. */
    tl_sched_free(w->sched);
    w->sched = NULL;
    if (!w->failed) {
        struct tl_error err;
        tl_fail(&err, TL_ERR_CANCELLED, "The server is shutting down.");
        w->failed = true;
        w->failure = err;
    }
    attend_tasks(w);
    tl_registry_free(w->registry);
    tl_forms_free(w->forms);
    w->registry = NULL;
    tl_model_free(w->model);
    w->model = NULL;
    return NULL;
}

/* ---- from the loop ------------------------------------------------------------------------------------------------ */

enum tl_status tl_worker_create(struct tl_worker **out, const struct tl_config *cfg, void (*wake)(void *),
                                void *wake_arg, struct tl_error *err)
{
    sigset_t all, before;
    *out = NULL;
    struct tl_worker *w = calloc(1, sizeof(*w));
    if (!w)
        return tl_fail_host_memory(err, sizeof(*w));
    w->cfg = cfg;
    w->wake = wake;
    w->wake_arg = wake_arg;
    w->dropped_tail = &w->dropped;
    w->figures.alive_at = tl_now_mono();
    tl_queue_init(&w->queue, (int)(cfg->max_waiting + cfg->max_running));
    pthread_mutex_init(&w->lock, NULL);
    sigfillset(&all); /* signals are the loop's alone */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&w->thread, NULL, run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        tl_worker_free(w);
        return tl_fail_errno(err, "start a thread", "worker", rc);
    }
    w->started = true;
    *out = w;
    return TL_OK;
}

void tl_worker_stop(struct tl_worker *w)
{
    if (!w->started)
        return;
    tl_queue_close(&w->queue);
    pthread_join(w->thread, NULL);
    w->started = false;
}

void tl_worker_free(struct tl_worker *w)
{
    struct tl_definition *d;
    if (!w)
        return;
    while ((d = tl_worker_dropped(w)))
        tl_definition_free(d);
    tl_queue_destroy(&w->queue);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

bool tl_worker_submit(struct tl_worker *w, struct tl_task *t)
{
    tl_task_ref(t);
    if (tl_queue_push(&w->queue, t))
        return true;
    tl_task_drop(t);
    return false;
}

void tl_worker_poke(struct tl_worker *w) { tl_queue_poke(&w->queue); }

void tl_worker_figures(struct tl_worker *w, struct tl_worker_figures *out)
{
    pthread_mutex_lock(&w->lock);
    *out = w->figures;
    pthread_mutex_unlock(&w->lock);
}
