#include "tiny_model.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "commands.h"

static char dirs[16][128];
static int n_dirs;

static void remove_dirs(void)
{
    for (int i = 0; i < n_dirs; i++) {
        char cmd[200];
        snprintf(cmd, sizeof(cmd), "rm -rf '%s'", dirs[i]);
        if (system(cmd) != 0)
            fprintf(stderr, "cannot remove %s\n", dirs[i]);
    }
}

const char *tiny_model_dir(const char *preset, const char *weights)
{
    char *dir = dirs[n_dirs], base[64] = "/tmp/tinyloop-test-XXXXXX";
    static int registered;

    if (n_dirs == 16 || !mkdtemp(base))
        return NULL;
    snprintf(dir, sizeof(dirs[0]), "%s", base);
    n_dirs++;
    if (!registered++)
        atexit(remove_dirs);
    snprintf(dir, sizeof(dirs[0]), "%s/model", base);
    {
        char *argv[] = {"synth", "--preset", (char *)(uintptr_t)preset, "--to", (char *)(uintptr_t)weights, "--out", dir, NULL};
        if (tl_cmd_synth(7, argv) != 0)
            return NULL;
    }
    return dir;
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

void tiny_close(struct tiny *t)
{
    struct tl_memory mem;
    tl_sched_free(t->s);
    tl_model_memory(t->m, &mem);
    ck_assert_uint_eq(mem.kv_used, 0);
    ck_assert_uint_eq(mem.kv_reserved, 0);
    tl_model_free(t->m);
}
