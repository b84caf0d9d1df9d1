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
