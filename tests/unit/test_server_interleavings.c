/* A thousand random interleavings against the real engine: nothing that happens to a name disturbs what runs on it. */
#include "registry_fixture.h"

/* ---- a thousand interleavings ------------------------------------------------------------------------------------- */

enum { CONTENTS = 4, DEPTHS = 2, IDS = 3, RUNS = 8, MAKINGS = 4, GENERATED = 4, SUFFIX = 3, DEEP = 4 };
static const int lengths[CONTENTS] = {9, 33, 64, 70};
static int32_t expected[CONTENTS][DEEP + 1][GENERATED]; /* after content c and the suffix, at a depth */
static int32_t contents[CONTENTS][80];
static const char *const salts[2] = {"", "s"};

struct run {
    bool on, done;
    struct tl_claim claim;
    struct tl_job *job;
    int32_t out[GENERATED];
    int n, content, loops;
    enum tl_finish finish;
    bool submitted;
    uint64_t scope; /* of the pool */
};

static struct run runs[RUNS];
static struct tl_making makings[MAKINGS];
static pthread_mutex_t jobs_lock = PTHREAD_MUTEX_INITIALIZER;
static bool cancelling;

/* Cancels from another thread, as the event loop does. */
static void *canceller(void *arg)
{
    unsigned seed = 99;
    (void)arg;
    for (;;) {
        struct timespec pause = {0, 200000};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&jobs_lock);
        bool end = !cancelling;
        struct run *r = &runs[rand_r(&seed) % RUNS];
        if (r->job && rand_r(&seed) % 4 == 0)
            tl_job_cancel(r->job);
        pthread_mutex_unlock(&jobs_lock);
        if (end)
            return NULL;
    }
}

static enum tl_verdict on_run_event(void *arg, const struct tl_event *ev)
{
    struct run *r = arg;
    if (ev->kind == TL_EVENT_TOKEN)
        r->out[r->n++] = ev->sampled->token;
    if (ev->kind == TL_EVENT_KEPT)
        tl_registry_keep_automatic(reg, ev->handle, r->scope);
    if (ev->kind == TL_EVENT_STARTED && ev->handle)
        tl_registry_pool_hit(reg, ev->handle, r->scope);
    if (ev->kind == TL_EVENT_DONE) {
        pthread_mutex_lock(&jobs_lock);
        r->job = NULL;
        pthread_mutex_unlock(&jobs_lock);
        r->done = true;
        r->finish = ev->finish;
    }
    return TL_GO_ON;
}

static void full_prompt(int32_t *out, int content)
{
    memcpy(out, contents[content], (size_t)lengths[content] * sizeof(int32_t));
    for (int i = 0; i < SUFFIX; i++)
        out[lengths[content] + i] = 200 + i;
}

static void submit_run(struct run *r, struct tl_request *q)
{
    struct tl_error err = {0};
    struct tl_job *job;
    q->max_tokens = GENERATED;
    q->sampling.temperature = 0;
    q->sampling.ignore_eos = true;
    q->on_event = on_run_event;
    q->arg = r;
    r->submitted = true;
    ck_assert_msg(tl_sched_submit(t.s, q, &job, &err) == TL_OK, "%s", err.msg);
    pthread_mutex_lock(&jobs_lock);
    r->job = job;
    pthread_mutex_unlock(&jobs_lock);
}

/* The claimed state decides what the answer must be, whatever has happened to the name since. */
static void start_claimed(struct run *r)
{
    static const int32_t suffix[SUFFIX] = {200, 201, 202};
    struct tl_handle_info info;
    struct tl_request q;
    tl_handle_info(r->claim.handle, &info);
    r->content = 0;
    while (lengths[r->content] != info.n_tokens)
        r->content++;
    tl_request_default(&q);
    q.handle = r->claim.handle;
    q.tokens = suffix;
    q.n_tokens = SUFFIX;
    r->loops = info.n_loops;
    if (info.kind == TL_HANDLE_RESUME)
        q.new_L = r->loops = DEEP;
    submit_run(r, &q);
}

static void start_pooled(struct run *r, unsigned *seed)
{
    int32_t whole[96];
    struct tl_request q;
    r->content = (int)(rand_r(seed) % CONTENTS);
    r->loops = 1 + (int)(rand_r(seed) % DEPTHS);
    full_prompt(whole, r->content);
    tl_request_default(&q);
    q.tokens = whole;
    q.n_tokens = lengths[r->content] + SUFFIX;
    q.loops = r->loops;
    q.pool = tl_registry_pool(reg);
    q.pool_scope = r->scope = tl_registry_scope(reg, "a", salts[rand_r(seed) % 2]);
    q.keep_all = rand_r(seed) % 2;
    submit_run(r, &q);
}

static void look_at_runs(void)
{
    for (int i = 0; i < RUNS; i++) {
        struct run *r = &runs[i];
        if (!r->on)
            continue;
        if (!r->submitted && r->claim.ready)
            start_claimed(r);
        bool lost = !r->submitted && r->claim.code; /* the name went away before its state was there again */
        if (!r->done && !lost)
            continue;
        if (r->done && r->finish != TL_FINISH_ERROR)
            ck_assert_mem_eq(r->out, expected[r->content][r->loops], (size_t)r->n * sizeof(int32_t));
        if (r->done && r->finish == TL_FINISH_LENGTH)
            ck_assert_int_eq(r->n, GENERATED);
        tl_registry_release(reg, &r->claim);
        r->on = false;
    }
}

static void look_at_makings(unsigned *seed, bool all)
{
    for (int i = 0; i < MAKINGS; i++)
        if (makings[i].state == TL_MAKING_MADE && (all || rand_r(seed) % 2))
            tl_registry_commit(reg, &makings[i]);
}

static void random_make(unsigned *seed)
{
    static const enum tl_entry_kind kinds[] = {PC, PC, RH, PE};
    struct tl_error err = {0};
    struct tl_making *m = &makings[rand_r(seed) % MAKINGS];
    int content = (int)(rand_r(seed) % CONTENTS);
    char id[16];
    if (m->begun)
        return;
    memset(m, 0, sizeof(*m));
    snprintf(id, sizeof(id), "x%d", (int)(rand_r(seed) % IDS));
    memcpy(prompt, contents[content], sizeof(contents[content]));
    m->def = define(kinds[rand_r(seed) % 4], "a", id, lengths[content], 1 + (int)(rand_r(seed) % DEPTHS));
    if (m->def->kind == RH)
        m->def->max_loops = DEEP;
    if (m->def->kind == PE)
        snprintf(m->def->id, sizeof(m->def->id), "pe_%u", rand_r(seed));
    tl_definition_digest(m->def);
    m->def->in_pool = m->def->kind != PE && rand_r(seed) % 2;
    strcpy(m->def->salt, salts[rand_r(seed) % 2]);
    m->def->ttl_seconds = rand_r(seed) % 3 ? 0 : 1 + rand_r(seed) % 4;
    m->def->sliding = rand_r(seed) % 2;
    m->must_match = m->match_any = rand_r(seed) % 2;
    tl_registry_make(reg, m, &err); /* refusals are fine */
}

static void random_step(unsigned *seed)
{
    static const enum tl_entry_kind kinds[] = {PC, RH};
    struct tl_error err = {0};
    enum tl_entry_kind kind = kinds[rand_r(seed) % 2];
    struct run *r = &runs[rand_r(seed) % RUNS];
    struct tl_purge purge = {.kinds = 15, .force = rand_r(seed) % 2};
    char id[16];
    snprintf(id, sizeof(id), "x%d", (int)(rand_r(seed) % IDS));
    switch (rand_r(seed) % 12) {
    case 0:
    case 1:
    case 2: random_make(seed); break;
    case 3:
    case 4:
    case 5:
        if (r->on)
            break;
        memset(r, 0, sizeof(*r));
        r->on = tl_registry_claim(reg, kind, "a", id, &r->claim, &err) == 0;
        break;
    case 6:
    case 7:
        if (r->on)
            break;
        memset(r, 0, sizeof(*r));
        r->on = true;
        start_pooled(r, seed);
        break;
    case 8: drop(kind, "a", id, NULL); break;
    case 9: clock_now += rand_r(seed) % 3; break;
    case 10:
        if (rand_r(seed) % 4 == 0)
            tl_registry_abandon(reg, &makings[rand_r(seed) % MAKINGS]);
        else if (rand_r(seed) % 4 == 0)
            tl_registry_purge(reg, &purge);
        break;
    case 11: tl_pool_evict_one(tl_registry_pool(reg)); break;
    }
    if (rand_r(seed) % 2)
        turn();
    look_at_runs();
    look_at_makings(seed, false);
}

static void settle(unsigned *seed)
{
    struct tl_purge all = {.kinds = 15, .force = true};
    for (int i = 0;; i++) {
        bool busy = false;
        turn();
        look_at_makings(seed, true);
        look_at_runs();
        for (int k = 0; k < RUNS; k++)
            busy = busy || runs[k].on;
        for (int k = 0; k < MAKINGS; k++)
            busy = busy || makings[k].begun;
        if (!busy)
            break;
        ck_assert_int_lt(i, 5000);
    }
    tl_registry_purge(reg, &all);
    for (int i = 0; i < 4; i++)
        turn();
    ck_assert_uint_eq(tiny_kv_used(&t), 0);
}

static void make_expectations(void)
{
    for (int c = 0; c < CONTENTS; c++)
        for (int i = 0; i < 80; i++)
            contents[c][i] = i < 8 ? i + 1 : (i * 31 + c * 17) % 290;
    for (int c = 0; c < CONTENTS; c++)
        for (int loops = 1; loops <= DEEP; loops++) {
            int32_t whole[96];
            struct tl_request q;
            struct tl_result res;
            struct tl_error err = {0};
            full_prompt(whole, c);
            tl_request_default(&q);
            q.tokens = whole;
            q.n_tokens = lengths[c] + SUFFIX;
            q.loops = loops;
            q.max_tokens = GENERATED;
            q.sampling.temperature = 0;
            q.sampling.ignore_eos = true;
            ck_assert_msg(tl_generate(t.s, &q, &res, &err) == TL_OK, "%s", err.msg);
            memcpy(expected[c][loops], res.tokens, sizeof(expected[c][loops]));
            tl_result_clear(&res);
        }
}

START_TEST(nothing_that_happens_to_a_name_disturbs_what_runs)
{
    pthread_t thread;
    make_expectations();
    cancelling = true;
    ck_assert_int_eq(pthread_create(&thread, NULL, canceller, NULL), 0);
    for (unsigned i = 0; i < 1000; i++) {
        unsigned seed = i * 7919 + 1;
        for (int k = 0; k < 30; k++)
            random_step(&seed);
        settle(&seed);
    }
    pthread_mutex_lock(&jobs_lock);
    cancelling = false;
    pthread_mutex_unlock(&jobs_lock);
    pthread_join(thread, NULL);
}
END_TEST

int main(void)
{
    const TTest *cases[] = {nothing_that_happens_to_a_name_disturbs_what_runs};
    dir = tiny_model_dir("tiny", "f32");
    return dir ? suite_main("server_interleavings", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 300) : 1;
}
