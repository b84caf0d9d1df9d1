#include "backend.h"

#include <stdio.h>
#include <string.h>

static const struct tl_backend_ops *const backends[] = {&tl_backend_cpu, &tl_backend_cuda};

#ifdef TL_TEST_HOOKS
const struct tl_backend_ops *tl_backend_test;
#endif

enum tl_status tl_backend_open(struct tl_backend **out, const char *device, int n_threads, struct tl_error *err)
{
    struct tl_error why;
    enum tl_status st;

    *out = NULL;
#ifdef TL_TEST_HOOKS
    if (tl_backend_test && device && !strcmp(device, "test"))
        return tl_backend_test->open(out, n_threads, err);
#endif
    if (!device || !strcmp(device, "auto")) {
        if (tl_backend_cuda.open(out, n_threads, &why) == TL_OK)
            return TL_OK;
        st = tl_backend_cpu.open(out, n_threads, err);
        if (st == TL_OK)
            snprintf((*out)->passed_over, sizeof((*out)->passed_over), "cuda: %.150s", why.msg);
        return st;
    }
    for (size_t i = 0; i < sizeof(backends) / sizeof(backends[0]); i++)
        if (!strcmp(device, backends[i]->name))
            return backends[i]->open(out, n_threads, err);
    st = tl_fail(err, TL_ERR_BAD_PARAM, "device is '%.40s', it must be auto, cpu or cuda", device);
    tl_error_param(err, "device");
    return st;
}

enum tl_status tl_fail_shape(struct tl_error *err, const char *name, int64_t n_out, int64_t n_in, int64_t want_out,
                             int64_t want_in)
{
    return tl_fail(err, TL_ERR_BAD_PARAM, "matrix %s is [%lld, %lld], the model needs [%lld, %lld]", name,
                   (long long)n_out, (long long)n_in, (long long)want_out, (long long)want_in);
}

enum tl_status tl_net_check(const struct tl_net *net,
                            enum tl_status (*fn)(void *ctx, const char *name, const struct tl_mat *m, int64_t n_out,
                                                 int64_t n_in, struct tl_error *err),
                            void *ctx, struct tl_error *err)
{
    const struct tl_arch_spec *s = &net->spec;
    int64_t d = s->d_model, up = (s->mlp == TL_MLP_SILU_GATED ? 2 : 1) * (int64_t)s->d_ff;
    enum tl_status st = TL_OK;

    if (s->d_head < 2 || s->d_head > TL_HEAD_DIM_MAX || s->d_head % 2 || s->n_kv_heads < 1 ||
        s->n_heads % s->n_kv_heads)
        return tl_fail(err, TL_ERR_UNSUPPORTED, "d_head is %d (2 to %d, even) with %d heads over %d kv heads",
                       s->d_head, TL_HEAD_DIM_MAX, s->n_heads, s->n_kv_heads);
    for (int i = 0; st == TL_OK && i < s->n_prelude + s->n_core + s->n_coda; i++) {
        const struct tl_layer *l = &net->layers[i];
        st = fn(ctx, "qkv", l->qkv, tl_q_dim(s) + 2 * (int64_t)tl_kv_dim(s), d, err);
        if (st == TL_OK)
            st = fn(ctx, "o", l->o, d, tl_q_dim(s), err);
        if (st == TL_OK)
            st = fn(ctx, "up", l->up, up, d, err);
        if (st == TL_OK)
            st = fn(ctx, "down", l->down, d, s->d_ff, err);
        if (st == TL_OK && tl_has_value_embed(s, i))
            st = fn(ctx, "value_embed", l->value_embed, s->vocab_size, tl_kv_dim(s), err);
    }
    if (st == TL_OK)
        st = fn(ctx, "embed", net->embed, s->vocab_size, d, err);
    if (st == TL_OK)
        st = fn(ctx, "head", net->head, s->vocab_size, d, err);
    if (st == TL_OK && s->inject == TL_INJECT_CONCAT_LINEAR)
        st = fn(ctx, "adapter", net->adapter, d, 2 * d, err);
    if (st == TL_OK && s->inject == TL_INJECT_DIAG)
        st = fn(ctx, "inject_b", net->inject_b, d, d, err);
    if (st == TL_OK && s->core_to_coda == TL_C2C_LINEAR)
        st = fn(ctx, "coda_in", net->coda_in, d, d, err);
    return st;
}
