#include "job.h"

#include <stddef.h>
#include <string.h>

void tl_task_init(struct tl_task *t, const struct tl_task_ops *ops)
{
    memset(t, 0, sizeof(*t));
    t->ops = ops;
    atomic_init(&t->refs, 1);
}

void tl_task_ref(struct tl_task *t) { atomic_fetch_add(&t->refs, 1); }

void tl_task_drop(struct tl_task *t)
{
    if (t && atomic_fetch_sub(&t->refs, 1) == 1)
        t->ops->free(t);
}
