#include "tiny_model.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"
#include "temp_dir.h"

static char bases[16][TEMP_PATH], dirs[16][TEMP_PATH + 8];
static int n_dirs;
static pid_t owner; /* test cases are forked: only the parent cleans up */

static void remove_dirs(void)
{
    for (int i = 0; i < n_dirs && getpid() == owner; i++)
        temp_dir_remove(bases[i]);
}

const char *tiny_model_dir(const char *preset, const char *weights)
{
    char *dir = dirs[n_dirs];
    char *argv[] = {"synth", "--preset", (char *)(uintptr_t)preset, "--to", (char *)(uintptr_t)weights, "--out",
                    dir,     NULL};

    if (n_dirs == 16)
        return NULL;
    if (!owner) {
        owner = getpid();
        atexit(remove_dirs);
    }
    temp_dir_make(bases[n_dirs]);
    snprintf(dir, sizeof(dirs[0]), "%s/model", bases[n_dirs]);
    n_dirs++;
    return tl_cmd_synth(7, argv) == 0 ? dir : NULL;
}

void tiny_open_with(struct tiny *t, const struct tl_model_params *p, const struct tl_sched_params *sp)
{
    struct tl_error err = {0};
    ck_assert_msg(tl_model_open(&t->m, p, &err) == TL_OK, "%s", err.msg);
    ck_assert_msg(tl_sched_create(&t->s, t->m, sp, &err) == TL_OK, "%s", err.msg);
}

void tiny_open(struct tiny *t, const char *dir, int pages)
{
    struct tl_model_params p = {.dir = dir, .device = "cpu", .n_threads = 1, .step_rows_max = 64};
    tiny_open_with(t, &p, NULL);
    if (pages) { /* now that weights, scratch and page size are known */
        struct tl_memory mem;
        tl_model_memory(t->m, &mem);
        p.memory_bytes = mem.weights + mem.scratch + (uint64_t)pages * tl_model_info(t->m)->page_bytes;
        tl_sched_free(t->s);
        tl_model_free(t->m);
        tiny_open_with(t, &p, NULL);
    }
}

uint64_t tiny_kv_used(const struct tiny *t)
{
    struct tl_memory mem;
    tl_model_memory(t->m, &mem);
    return mem.kv_used;
}

struct tl_job *tiny_submit(struct tiny *t, const struct tl_request *r)
{
    struct tl_job *j;
    struct tl_error err = {0};
    ck_assert_msg(tl_sched_submit(t->s, r, &j, &err) == TL_OK, "%s", err.msg);
    return j;
}

bool tiny_step(struct tiny *t)
{
    bool busy;
    struct tl_error err = {0};
    ck_assert_msg(tl_sched_step(t->s, &busy, &err) == TL_OK, "%s", err.msg);
    return busy;
}

void tiny_run(struct tiny *t)
{
    while (tiny_step(t))
        ;
}

void tiny_close(struct tiny *t)
{
    struct tl_memory mem;
    tl_sched_free(t->s);
    tl_model_memory(t->m, &mem);
    ck_assert_uint_eq(mem.kv_used, 0);
    ck_assert_uint_eq(mem.kv_reserved, 0);
    tl_model_free(t->m);
}
