/* server/aside.h - work beside the event loop while a request waits: a long text becomes token ids.
 *
 * What waits for a thread is memory: its bytes count with those of the request bodies (max_bodies_bytes) until the work is
 * over. Work that has not begun when its client leaves is never done. Thread: loop. */
#ifndef TL_SERVER_ASIDE_H
#define TL_SERVER_ASIDE_H

#include <uv.h>

#include "../engine/tinyloop.h"

struct tl_server;

struct tl_aside {
    uv_work_t work;
    struct tl_server *srv;
    void (*run)(void *user);            /* in a thread of the library's pool */
    void (*done)(void *user, bool ran); /* loop, always; ran false = given up before it began. May free the whole */
    void *user;
    size_t bytes;
    bool pending; /* until done */
};

/* a lives until done has been called. Fills a. False: nothing was begun and done will not come. */
bool tl_aside_start(struct tl_aside *a, struct tl_server *s, size_t bytes, void (*run)(void *user),
                    void (*done)(void *user, bool ran), void *user);
/* Nobody wants it any more: done comes soon if it has not begun, else when it is over. Nothing if it is not pending. */
void tl_aside_give_up(struct tl_aside *a);

#endif
