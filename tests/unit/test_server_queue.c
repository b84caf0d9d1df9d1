/* The hand-over between the two threads. */
#include "suite.h"

#include <pthread.h>
#include <stdlib.h>

#include "ids.h"
#include "queue.h"

struct item {
    struct tl_task task;
    int n;
};

static atomic_int freed;

static void item_free(struct tl_task *t)
{
    atomic_fetch_add(&freed, 1);
    free(t);
}

static const struct tl_task_ops ops = {.free = item_free};

static struct item *item_new(int n)
{
    struct item *i = calloc(1, sizeof(*i));
    tl_task_init(&i->task, &ops);
    i->n = n;
    return i;
}

START_TEST(order_is_kept_and_a_full_queue_refuses)
{
    struct tl_queue q;
    bool poked, closed;
    int n = 0;
    tl_queue_init(&q, 3);
    struct item *items[4];
    for (int i = 0; i < 4; i++)
        items[i] = item_new(i);
    for (int i = 0; i < 3; i++)
        ck_assert(tl_queue_push(&q, &items[i]->task));
    ck_assert(!tl_queue_push(&q, &items[3]->task));
    for (struct tl_task *t = tl_queue_take(&q, 0, &poked, &closed); t; t = t->next_job)
        ck_assert_int_eq(((struct item *)t)->n, n++);
    ck_assert_int_eq(n, 3);
    ck_assert(!poked && !closed);
    ck_assert(tl_queue_push(&q, &items[3]->task));
    ck_assert_ptr_nonnull(tl_queue_take(&q, 0, &poked, &closed));
    tl_queue_close(&q);
    ck_assert(!tl_queue_push(&q, &items[0]->task));
    ck_assert_ptr_null(tl_queue_take(&q, 10, &poked, &closed));
    ck_assert(closed);
    tl_queue_destroy(&q);
    for (int i = 0; i < 4; i++)
        tl_task_drop(&items[i]->task);
    ck_assert_int_eq(atomic_load(&freed), 4);
}
END_TEST

START_TEST(a_poke_is_kept_until_it_is_seen)
{
    struct tl_queue q;
    bool poked, closed;
    tl_queue_init(&q, 3);
    tl_queue_poke(&q);
    double t = tl_now_mono();
    ck_assert_ptr_null(tl_queue_take(&q, 5, &poked, &closed));
    ck_assert(poked && tl_now_mono() - t < 1);
    tl_queue_take(&q, 0.02, &poked, &closed);
    ck_assert(!poked && tl_now_mono() - t < 4);
    tl_queue_destroy(&q);
}
END_TEST

#define N_ITEMS 20000

static void *consume(void *arg)
{
    struct tl_queue *q = arg;
    bool poked, closed = false;
    long sum = 0;
    while (!closed) {
        struct tl_task *next;
        for (struct tl_task *t = tl_queue_take(q, 1, &poked, &closed); t; t = next) {
            next = t->next_job;
            sum += ((struct item *)t)->n;
            tl_task_drop(t);
        }
    }
    return (void *)sum;
}

START_TEST(two_threads_lose_nothing)
{
    struct tl_queue q;
    pthread_t thread;
    void *sum;
    tl_queue_init(&q, 8);
    atomic_store(&freed, 0);
    ck_assert_int_eq(pthread_create(&thread, NULL, consume, &q), 0);
    for (int i = 0; i < N_ITEMS; i++) {
        struct item *item = item_new(i);
        while (!tl_queue_push(&q, &item->task))
            tl_queue_poke(&q);
    }
    tl_queue_close(&q);
    pthread_join(thread, &sum);
    ck_assert_int_eq((long)sum, (long)N_ITEMS * (N_ITEMS - 1) / 2);
    ck_assert_int_eq(atomic_load(&freed), N_ITEMS);
    tl_queue_destroy(&q);
}
END_TEST

int main(void)
{
    const TTest *const cases[] = {order_is_kept_and_a_full_queue_refuses, a_poke_is_kept_until_it_is_seen,
                                  two_threads_lose_nothing};
    return suite_main("server_queue", cases, sizeof(cases) / sizeof(cases[0]), NULL, NULL, 60);
}
