/* Definitions on disk: what is confirmed is there, what is not whole is set aside, and a kill at any moment changes neither. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "definitions.h"
#include "log.h"
#include "suite.h"
#include "temp_dir.h"

#define PATH_ROOM (TEMP_PATH + 260)

static char dir[TEMP_PATH];
static struct tl_definition *loaded[256];
static int n_loaded;

static void setup(void)
{
    temp_dir_make(dir);
    tl_log_setup(TL_LOG_ERROR, false);
}

static void forget(void)
{
    while (n_loaded > 0)
        tl_definition_free(loaded[--n_loaded]);
}

static void teardown(void)
{
    forget();
    temp_dir_remove(dir);
}

static void take(void *arg, struct tl_definition *d)
{
    (void)arg;
    ck_assert_int_lt(n_loaded, 256);
    loaded[n_loaded++] = d;
}

static int load(void)
{
    struct tl_error err = {0};
    forget();
    ck_assert_msg(tl_definitions_load(dir, take, NULL, &err) == TL_OK, "%s", err.msg);
    return n_loaded;
}

static struct tl_definition *define(const char *tenant, const char *id, int n)
{
    struct tl_definition *d = calloc(1, sizeof(*d));
    d->kind = TL_ENTRY_RESUME;
    snprintf(d->id, sizeof(d->id), "%s", id);
    snprintf(d->tenant, sizeof(d->tenant), "%s", tenant);
    memset(d->fingerprint, 'a', 64);
    d->tokens = malloc((size_t)n * sizeof(int32_t));
    for (int i = 0; i < n; i++)
        d->tokens[i] = i * 3;
    d->n_tokens = n;
    d->loops = 2;
    d->max_loops = 8;
    d->cache_window = 64;
    d->sliding = true;
    d->persist = true;
    d->ttl_seconds = 77;
    d->created_at = 1795980000;
    d->expires_at = 1795980077;
    d->generation = 0x6b0c7b370007;
    memset(d->idempotency, 'f', 64);
    d->metadata = strdup("{\"rev\":\"42 \\\"é\\u0000\"}");
    ck_assert(tl_definition_digest(d));
    return d;
}

static void write_one(const char *tenant, const char *id, int n)
{
    struct tl_error err = {0};
    struct tl_definition *d = define(tenant, id, n);
    ck_assert_msg(tl_definition_write(dir, d, &err) == TL_OK, "%s", err.msg);
    ck_assert_int_eq(tl_state_dir_sync(dir, &err), TL_OK);
    tl_definition_free(d);
}

/* The n-th file whose name ends so; false if there are fewer. */
static bool find(const char *end, char path[PATH_ROOM])
{
    DIR *dp = opendir(dir);
    const struct dirent *e;
    bool found = false;
    while (!found && (e = readdir(dp))) {
        size_t n = strlen(e->d_name), m = strlen(end);
        found = n >= m && strcmp(e->d_name + n - m, end) == 0;
        if (found)
            snprintf(path, PATH_ROOM, "%s/%s", dir, e->d_name);
    }
    closedir(dp);
    return found;
}

START_TEST(what_is_written_reads_back)
{
    struct tl_definition *d = define("acme", "Support-v3", 300);
    write_one("acme", "Support-v3", 300);
    ck_assert_int_eq(load(), 1);
    struct tl_definition *l = loaded[0];
    ck_assert_str_eq(l->id, d->id);
    ck_assert_str_eq(l->tenant, d->tenant);
    ck_assert_str_eq(l->digest, d->digest);
    ck_assert_str_eq(l->fingerprint, d->fingerprint);
    ck_assert(l->kind == d->kind && l->loops == 2 && l->max_loops == 8 && l->cache_window == 64 && l->sliding &&
              !l->in_pool);
    ck_assert_int_eq(l->ttl_seconds, 77);
    ck_assert_int_eq(l->expires_at, d->expires_at);
    ck_assert_uint_eq(l->generation, d->generation);
    ck_assert(tl_definition_same_state(l, d));
    ck_assert_ptr_nonnull(strstr(l->metadata, "42"));
    ck_assert_str_eq(l->idempotency, d->idempotency);
    tl_definition_free(d);
}
END_TEST

START_TEST(names_that_differ_in_case_or_tenant_are_two_files)
{
    struct tl_error err;
    write_one("a", "x", 5);
    write_one("a", "X", 6);
    write_one("b", "x", 7);
    write_one("a", "x", 8); /* replaces the first */
    ck_assert_int_eq(load(), 3);
    ck_assert_int_eq(tl_definition_remove(dir, TL_ENTRY_RESUME, "a", "x", &err), TL_OK);
    ck_assert_int_eq(tl_definition_remove(dir, TL_ENTRY_RESUME, "a", "x", &err), TL_OK);
    ck_assert_int_eq(tl_definition_remove(dir, TL_ENTRY_PREFIX, "b", "x", &err), TL_OK); /* of another kind */
    ck_assert_int_eq(load(), 2);
}
END_TEST

START_TEST(a_changed_byte_anywhere_sets_the_file_aside)
{
    char path[PATH_ROOM], bad[PATH_ROOM];
    write_one("a", "x", 5);
    ck_assert(find(".def", path));
    FILE *f = fopen(path, "rb");
    char whole[4096];
    size_t n = fread(whole, 1, sizeof(whole), f);
    fclose(f);
    for (size_t i = 0; i < n; i += 7) {
        whole[i] ^= 1;
        f = fopen(path, "wb");
        fwrite(whole, 1, n, f);
        fclose(f);
        whole[i] ^= 1;
        ck_assert_int_eq(load(), 0);
        ck_assert(find(".def.bad", bad));
        unlink(bad);
    }
    for (size_t cut = 0; cut < n; cut += 11) {
        f = fopen(path, "wb");
        fwrite(whole, 1, cut, f);
        fclose(f);
        ck_assert_int_eq(load(), 0);
    }
    f = fopen(path, "wb");
    fwrite(whole, 1, n, f);
    fclose(f);
    ck_assert_int_eq(load(), 1);
}
END_TEST

START_TEST(strange_things_in_the_directory_do_no_harm)
{
    char path[PATH_ROOM], other[PATH_ROOM + 32];
    write_one("a", "x", 5);
    ck_assert(find(".def", path));
    snprintf(other, sizeof(other), "%s/half.def.tmp", dir);
    fclose(fopen(other, "wb"));
    snprintf(other, sizeof(other), "%s/pipe.def", dir);
    ck_assert_int_eq(mkfifo(other, 0600), 0);
    snprintf(other, sizeof(other), "%s/dir.def", dir);
    ck_assert_int_eq(mkdir(other, 0700), 0);
    snprintf(other, sizeof(other), "%s/link.def", dir);
    ck_assert_int_eq(symlink("/etc/passwd", other), 0);
    snprintf(other, sizeof(other), "%s/copy.def", dir); /* a definition under another's name */
    ck_assert_int_eq(link(path, other), 0);
    snprintf(other, sizeof(other), "%s/README", dir);
    fclose(fopen(other, "wb"));
    ck_assert_int_eq(load(), 1);
    ck_assert(!find(".tmp", other));
    ck_assert_int_eq(load(), 1);
}
END_TEST

START_TEST(a_state_directory_has_one_server)
{
    struct tl_error err = {0};
    int a, b;
    ck_assert_int_eq(tl_state_dir_open(dir, &a, &err), TL_OK);
    ck_assert_int_eq(tl_state_dir_open(dir, &b, &err), TL_ERR_IO);
    ck_assert_int_eq(b, -1);
    close(a);
    ck_assert_int_eq(tl_state_dir_open(dir, &b, &err), TL_OK);
    close(b);
    ck_assert_int_eq(tl_state_dir_open("/proc/nothing/there", &b, &err), TL_ERR_IO);
}
END_TEST

static int n_done, n_failed;
static void on_stored(void *arg, const struct tl_error *err)
{
    (void)arg;
    n_done++;
    n_failed += err != NULL;
}

START_TEST(the_store_keeps_the_order)
{
    uv_loop_t loop;
    struct tl_store *s;
    struct tl_error err;
    uv_loop_init(&loop);
    ck_assert_int_eq(tl_store_create(&s, &loop, dir, &err), TL_OK);
    for (int i = 0; i < 50; i++) {
        tl_store_put(s, define("a", "x", 5 + i), on_stored, NULL);
        tl_store_remove(s, TL_ENTRY_RESUME, "a", "x", on_stored, NULL);
        tl_store_put(s, define("a", "y", 5 + i), on_stored, NULL);
        if (i % 5 == 0)
            uv_run(&loop, UV_RUN_NOWAIT);
    }
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(n_done, 150);
    ck_assert_int_eq(n_failed, 0);
    ck_assert_int_eq(load(), 1);
    ck_assert_int_eq(loaded[0]->n_tokens, 54);
    tl_store_free(s);
    ck_assert_int_eq(tl_store_create(&s, &loop, "/proc/nothing/there", &err), TL_OK);
    tl_store_put(s, define("a", "x", 5), on_stored, NULL);
    uv_run(&loop, UV_RUN_DEFAULT);
    ck_assert_int_eq(n_failed, 1); /* told, not lost */
    tl_store_free(s);
    uv_loop_close(&loop);
}
END_TEST

/* A child writes and says what it has confirmed; it is killed somewhere in between. */
START_TEST(a_kill_at_any_moment_loses_nothing_that_was_confirmed)
{
    unsigned seed = 3;
    char path[PATH_ROOM];
    for (int round = 0; round < 60; round++) {
        int p[2], confirmed = 0, id;
        ck_assert_int_eq(pipe(p), 0);
        pid_t child = fork();
        if (child == 0) {
            char name[16];
            for (int i = 0; i < 40; i++) {
                snprintf(name, sizeof(name), "id%d", i);
                write_one("a", name, 100 + i);
                if (write(p[1], &i, sizeof(i)) != sizeof(i))
                    break;
            }
            _exit(0);
        }
        close(p[1]);
        struct timespec wait = {0, (long)(rand_r(&seed) % 4000) * 1000};
        nanosleep(&wait, NULL);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        while (read(p[0], &id, sizeof(id)) == sizeof(id))
            confirmed = id + 1;
        close(p[0]);
        int n = load();
        ck_assert_msg(n == confirmed || n == confirmed + 1, "%d confirmed, %d there", confirmed, n);
        ck_assert(!find(".bad", path));
        for (int i = 0; i < n; i++) {
            struct tl_error err;
            ck_assert_int_eq(loaded[i]->n_tokens, 100 + atoi(loaded[i]->id + 2));
            ck_assert_int_eq(tl_definition_remove(dir, TL_ENTRY_RESUME, "a", loaded[i]->id, &err), TL_OK);
        }
    }
}
END_TEST

int main(void)
{
    const TTest *cases[] = {
        what_is_written_reads_back,
        names_that_differ_in_case_or_tenant_are_two_files,
        a_changed_byte_anywhere_sets_the_file_aside,
        strange_things_in_the_directory_do_no_harm,
        a_state_directory_has_one_server,
        the_store_keeps_the_order,
        a_kill_at_any_moment_loses_nothing_that_was_confirmed,
    };
    return suite_main("server_definitions", cases, sizeof(cases) / sizeof(cases[0]), setup, teardown, 60);
}
