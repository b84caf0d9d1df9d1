/* The CUDA backend of a build without CUDA: it is there by name and says what it is. */
#include "backend.h"

static enum tl_status no_cuda(struct tl_backend **out, int n_threads, struct tl_error *err)
{
    (void)n_threads;
    *out = NULL;
    return tl_fail(err, TL_ERR_UNSUPPORTED,
                   "this program was built without CUDA: use --device cpu, or build where nvcc is installed");
}

const struct tl_backend_ops tl_backend_cuda = {.name = "cuda", .open = no_cuda};
