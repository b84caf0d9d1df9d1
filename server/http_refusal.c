#include "http_refusal.h"

#include <dlfcn.h>
#include <stddef.h>

typedef MHD_ANSWER queue_fn(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *r);

MHD_ANSWER tl_http_queue(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *r)
{
    static queue_fn *library;
    if (!library)
        *(void **)&library = dlsym(RTLD_NEXT, "MHD_queue_response");
    return library ? library(mhd, status, r) : MHD_NO;
}

/* Takes the place of the library's function of this name for calls from inside it. MHD_NO makes it close the connection
 * without a word. */
MHD_ANSWER MHD_queue_response(struct MHD_Connection *mhd, unsigned status, struct MHD_Response *r)
{
    return tl_http_refused(mhd, status) ? MHD_NO : tl_http_queue(mhd, status, r);
}
