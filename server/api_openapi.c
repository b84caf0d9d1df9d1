/* GET /openapi.json: the description of this API. Its source is openapi.yaml. */
#include "http.h"
#include "routes.h"

static const char document[] =
#include "openapi_json.inc"
    ;

void tl_api_openapi(struct tl_exchange *x)
{
    tl_bytes_add(&x->out, document, sizeof(document) - 1);
    tl_reply_json(x, 200);
}
