#include "model.h"

#include <stdio.h>
#include <string.h>

#include "arch_bind.h"
#include "mem.h"
#include "prefix_pool.h"
#include "weights.h"

#define STEP_ROWS_DEFAULT      256
#define STEP_ROWS_AHEAD        2048 /* of a device that runs ahead: a GPU wants many rows at once */
#define HEADS_MAX              64   /* rows of one step whose logits are wanted */
#define SEQ_LEN_DEFAULT_MAX    8192
#define KV_BYTES_DEFAULT       (2ull << 30)
#define DEVICE_PERCENT_DEFAULT 90 /* of a card's free memory */

struct opening { /* what tl_model_open carries from step to step */
    struct tl_model *m;
    const struct tl_model_params *p;
    struct tl_arch_binding *binding;
};

static void weights_progress(void *arg, double fraction)
{
    const struct tl_model_params *p = arg;
    p->progress(p->progress_arg, "weights", fraction);
}

static enum tl_status check_params(const struct opening *o, struct tl_error *err)
{
    const struct tl_model_params *p = o->p;
    const struct tl_arch_spec *spec = &o->binding->spec;

    if (p->n_threads < 0 || p->n_threads > 1024)
        return tl_fail(err, TL_ERR_BAD_PARAM, "threads is %d, it must be 0 to 1024", p->n_threads);
    if (p->step_rows_max < 0 || p->step_rows_max > 1 << 16)
        return tl_fail(err, TL_ERR_BAD_PARAM, "step_rows_max is %d, it must be 0 to %d", p->step_rows_max, 1 << 16);
    if (p->max_seq_len < 0 || p->max_seq_len > spec->max_positions)
        return tl_fail(err, TL_ERR_BAD_PARAM, "max_seq_len is %d, the model has %d positions", p->max_seq_len,
                       spec->max_positions);
    if (p->max_loops < 0 || p->max_loops > spec->loops_max)
        return tl_fail(err, TL_ERR_LOOPS_RANGE, "max_loops is %d, the model allows %d", p->max_loops, spec->loops_max);
    return TL_OK;
}

static void fill_info(struct opening *o, const struct tl_weights_info *w)
{
    struct tl_model_info *info = &o->m->info;
    struct tl_arch_spec *spec = &o->m->net.spec;
    const char *end = o->p->dir + strlen(o->p->dir), *start;

    while (end > o->p->dir && end[-1] == '/')
        end--;
    for (start = end; start > o->p->dir && start[-1] != '/'; start--)
        ;
    info->spec = spec;
    snprintf(info->name, sizeof(info->name), "%.*s", (int)(end - start), start);
    memcpy(info->fingerprint, w->fingerprint, sizeof(info->fingerprint));
    snprintf(info->weights, sizeof(info->weights), "%s", tl_wtype_name(o->m->net.wtype));
    snprintf(info->device, sizeof(info->device), "%s", o->m->be->ops->describe(o->m->be));
    snprintf(info->passed_over, sizeof(info->passed_over), "%s", o->m->be->passed_over);
    info->vocab_size = spec->vocab_size;
    info->n_parameters = w->n_parameters;
    info->weight_bytes = w->device_bytes;
    info->max_loops = o->p->max_loops ? o->p->max_loops : spec->loops_max;
    if (spec->loops_default > info->max_loops) /* who caps the depth caps what is run unasked, too */
        spec->loops_default = info->max_loops;
    info->step_rows_max = o->p->step_rows_max         ? o->p->step_rows_max
                          : o->m->be->ops->runs_ahead ? STEP_ROWS_AHEAD
                                                      : STEP_ROWS_DEFAULT;
}

/* How many KV pages the budget leaves after weights and scratch. */
static enum tl_status pages_of_budget(const struct opening *o, size_t page_bytes, int64_t *n_pages,
                                      struct tl_error *err)
{
    const struct tl_model *m = o->m;
    uint64_t fixed = m->info.weight_bytes + m->scratch_bytes, budget = o->p->memory_bytes;
    size_t bytes_free, bytes_total;

    m->be->ops->mem_info(m->be, &bytes_free, &bytes_total);
    if (!budget)
        budget =
            fixed + (m->be->ops->runs_ahead ? (uint64_t)bytes_free / 100 * DEVICE_PERCENT_DEFAULT : KV_BYTES_DEFAULT);
    *n_pages = budget > fixed ? (int64_t)((budget - fixed) / page_bytes) : 0;
    if (*n_pages > INT32_MAX)
        *n_pages = INT32_MAX;
    if (*n_pages < tl_n_slots(m->info.spec, m->info.spec->loops_default)) {
        tl_fail(
            err, TL_ERR_EXCEEDS_MEMORY,
            "the memory budget of %llu bytes leaves no room: weights take %llu, scratch %llu, one block of tokens %llu",
            (unsigned long long)budget, (unsigned long long)m->info.weight_bytes, (unsigned long long)m->scratch_bytes,
            (unsigned long long)page_bytes * (unsigned)tl_n_slots(m->info.spec, m->info.spec->loops_default));
        tl_error_param(err, "memory");
        return TL_ERR_EXCEEDS_MEMORY;
    }
    return TL_OK;
}

/* The configured length, or the most that the model, the default limit and half the pages allow. */
static enum tl_status choose_seq_len(const struct opening *o, int64_t n_pages, int *out, struct tl_error *err)
{
    const struct tl_arch_spec *spec = o->m->info.spec;
    int64_t slots = tl_n_slots(spec, spec->loops_default), fit = n_pages / slots * TL_BLOCK_TOKENS,
            half = n_pages / 2 / slots * TL_BLOCK_TOKENS;

    if (o->p->max_seq_len) {
        if (o->p->max_seq_len > fit) {
            tl_fail(err, TL_ERR_EXCEEDS_MEMORY, "max_seq_len is %d, the memory budget holds %lld tokens at depth %d",
                    o->p->max_seq_len, (long long)fit, spec->loops_default);
            tl_error_param(err, "max_seq_len");
            return TL_ERR_EXCEEDS_MEMORY;
        }
        *out = o->p->max_seq_len;
        return TL_OK;
    }
    *out = spec->max_positions < SEQ_LEN_DEFAULT_MAX ? spec->max_positions : SEQ_LEN_DEFAULT_MAX;
    if (*out > half)
        *out = half > 0 ? (int)half : TL_BLOCK_TOKENS;
    return TL_OK;
}

static enum tl_status open_all(struct opening *o, struct tl_error *err)
{
    struct tl_model *m = o->m;
    const struct tl_model_params *p = o->p;
    struct tl_weights_info w;
    struct tl_weights_params wp = {.start_seed = p->start_seed,
                                   .progress = p->progress ? weights_progress : NULL,
                                   .progress_arg = (void *)(uintptr_t)p};
    struct tl_forward_params fp;
    size_t page_bytes;
    int64_t n_pages;
    enum tl_kv_format format;
    enum tl_status st = tl_arch_open(&o->binding, p->dir, &(struct tl_arch_params){p->start_state_random}, err);

    if (st != TL_OK || (st = check_params(o, err)) != TL_OK ||
        (st = tl_backend_open(&m->be, p->device, p->n_threads, err)) != TL_OK)
        return st;
    wp.rope_positions = p->max_seq_len                                         ? p->max_seq_len
                        : o->binding->spec.max_positions < SEQ_LEN_DEFAULT_MAX ? o->binding->spec.max_positions
                                                                               : SEQ_LEN_DEFAULT_MAX;
    st = tl_weights_load(&m->net, m->be, o->binding, &wp, &w, err);
    if (st != TL_OK)
        return st;
    fill_info(o, &w);
    /* A template that cannot be used is no reason not to serve the model: whoever wants to chat hears why. */
    if ((st = tl_tokenizer_of_model(&o->m->tokenizer, p->dir, m->info.vocab_size, err)) != TL_OK)
        return st;
    if (tl_chat_open(&m->chat, p->dir, m->tokenizer, &m->chat_error) == TL_ERR_NO_HOST_MEMORY)
        return tl_fail_host_memory(err, TL_CHAT_TEMPLATE_BYTES_MAX);
    if ((st = m->be->ops->prepare(m->be, &m->net, m->info.step_rows_max, err)) != TL_OK)
        return st;
    m->scratch_bytes = m->be->ops->scratch_bytes(m->be);
    format = m->net.wtype == TL_W_F32 ? TL_KV_F32 : TL_KV_F16;
    page_bytes = tl_kv_page_bytes(&m->net.spec, format);
    if ((st = pages_of_budget(o, page_bytes, &n_pages, err)) != TL_OK ||
        (st = choose_seq_len(o, n_pages, &m->info.max_seq_len, err)) != TL_OK)
        return st;
    st = tl_kv_create(&m->kv, m->be, &m->net.spec, format, n_pages, m->info.step_rows_max, err);
    if (st != TL_OK)
        return st;
    m->info.page_bytes = page_bytes;
    m->seq_reserve_pages =
        (int64_t)tl_n_slots(&m->net.spec, m->net.spec.loops_default) * tl_blocks(m->info.max_seq_len);
    fp = (struct tl_forward_params){.rows_max = m->info.step_rows_max,
                                    .heads_max = m->info.step_rows_max < HEADS_MAX ? m->info.step_rows_max : HEADS_MAX,
                                    .loops_max = m->info.max_loops,
                                    .start_seed = p->start_seed};
    return tl_forward_create(&m->fwd, m->be, &m->net, m->kv, &fp, err);
}

enum tl_status tl_model_open(struct tl_model **out, const struct tl_model_params *params, struct tl_error *err)
{
    struct opening o = {.p = params};
    enum tl_status st;

    *out = NULL;
    if (!params->dir || !params->dir[0])
        return tl_fail(err, TL_ERR_BAD_PARAM, "no model directory is given");
    o.m = tl_calloc(1, sizeof(*o.m));
    if (!o.m)
        return tl_fail_host_memory(err, sizeof(*o.m));
    st = open_all(&o, err);
    tl_arch_free(o.binding);
    if (st == TL_OK)
        *out = o.m;
    else
        tl_model_free(o.m);
    return st;
}

void tl_model_free(struct tl_model *m)
{
    if (!m)
        return;
    tl_forward_free(m->fwd);
    tl_kv_free(m->kv);
    tl_tokenizer_free(m->tokenizer);
    tl_chat_free(m->chat);
    if (m->be) {
        tl_net_free(&m->net, m->be);
        m->be->ops->close(m->be);
    }
    tl_free(m);
}

const struct tl_model_info *tl_model_info(const struct tl_model *m) { return &m->info; }
const struct tl_tokenizer *tl_model_tokenizer(const struct tl_model *m) { return m->tokenizer; }
const struct tl_chat_template *tl_model_chat(const struct tl_model *m, const struct tl_error **why_not)
{
    *why_not = m->chat_error.status != TL_OK ? &m->chat_error : NULL;
    return m->chat;
}

void tl_model_memory(const struct tl_model *m, struct tl_memory *out)
{
    uint64_t page = m->kv->view.page_bytes;
    memset(out, 0, sizeof(*out));
    out->weights = m->info.weight_bytes;
    out->scratch = m->scratch_bytes;
    out->kv_total = (uint64_t)m->kv->n_pages * page;
    out->kv_used = (uint64_t)(m->kv->n_pages - m->kv->n_free) * page;
    out->kv_reserved = (uint64_t)m->kv->n_reserved * page;
    out->kv_held = (uint64_t)m->kv->n_held * page;
    out->kv_seq_reserve = (uint64_t)m->seq_reserve_pages * page;
    out->kv_used_peak = (uint64_t)m->kv->n_used_peak * page;
    out->budget = out->weights + out->scratch + out->kv_total;
}

bool tl_model_reserve(struct tl_model *m, int64_t n)
{
    while (!tl_kv_reserve(m->kv, n))
        if (n > m->kv->n_pages || !tl_pools_evict_one(m))
            return false;
    return true;
}
