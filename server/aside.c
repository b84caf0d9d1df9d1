#include "aside.h"

#include "server.h"

static void on_work(uv_work_t *work)
{
    struct tl_aside *a = work->data;
    a->run(a->user);
}

static void on_over(uv_work_t *work, int status)
{
    struct tl_aside *a = work->data;
    a->pending = false;
    a->srv->body_bytes -= a->bytes;
    a->srv->large_freed |= a->bytes >= TL_LARGE_BODY;
    a->done(a->user, status == 0);
}

bool tl_aside_start(struct tl_aside *a, struct tl_server *s, size_t bytes, void (*run)(void *user),
                    void (*done)(void *user, bool ran), void *user)
{
    *a = (struct tl_aside){.srv = s, .run = run, .done = done, .user = user, .bytes = bytes};
    a->work.data = a;
    if (uv_queue_work(&s->loop, &a->work, on_work, on_over) != 0)
        return false;
    a->pending = true;
    s->body_bytes += bytes;
    return true;
}

void tl_aside_give_up(struct tl_aside *a)
{
    if (a->pending)
        uv_cancel((uv_req_t *)&a->work); /* refused if it has begun */
}
