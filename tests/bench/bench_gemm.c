/* The CPU kernels beside what the machine can do: JSON lines with rates and their ratios to ceilings of the same run.
 *
 *   bench_gemm [threads]      (2 threads unless said)
 *
 * read:    bandwidth of 1 thread and of all.
 * decode:  one row through INT4 and INT8 matrices of 2048 x 10240 that together exceed the last-level cache by far; bytes of
 *          packed weights per second over the read bandwidth of the same threads.
 * prefill: many rows; operations per second over those of oneDNN's int8 matmul (weights laid out by oneDNN beforehand), and over
 *          the machine's own int8 rate. oneDNN is a yardstick in this program only.
 * A figure is the best of its passes, and what is compared takes turns in several rounds: others may be using the machine. */
#include "cpu/ceilings.h"
#include "cpu/cpu.h"
#include "cpu/threads.h"
#include "mem.h"

#include <oneapi/dnnl/dnnl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t g_seed = 1;

static uint64_t next(void)
{
    uint64_t z = (g_seed += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void stop_if(bool bad, const char *what)
{
    if (!bad)
        return;
    fprintf(stderr, "bench_gemm: %s\n", what);
    exit(1);
}

/* ---- ours ---- */

static struct tl_mat *random_mat(enum tl_wtype t, int64_t n_out, int64_t n_in)
{
    size_t bytes = (size_t)(n_out * n_in) / (t == TL_W_INT4 ? 2 : 1), groups = (size_t)(n_out * ((n_in / 32 + 1) / 2));
    uint8_t *q = tl_malloc(bytes + 8), *g = tl_malloc(groups + 8);
    float *s = tl_array((size_t)n_out, sizeof(*s));
    struct tl_mat_src src = {.wtype = t, .n_in = n_in, .n_parts = 1};
    struct tl_mat *m = NULL;
    struct tl_error err = {.msg = "no memory"};
    stop_if(!q || !g || !s, "no memory");
    for (size_t i = 0; i < bytes; i++) {
        uint8_t v = (uint8_t)next();
        if (t == TL_W_INT4)
            v = (uint8_t)((v & 15) == 8 || v >> 4 == 8 ? 0x35 : v);
        else
            v = v == 0x80 ? 1 : v;
        q[i] = v;
    }
    for (size_t i = 0; i < groups; i++)
        g[i] = (uint8_t)(next() | 0x11);
    for (int64_t i = 0; i < n_out; i++)
        s[i] = 0.01f;
    src.part[0] = (struct tl_mat_part){q, s, g, n_out};
    stop_if(tl_cpu_mat_create(NULL, &src, &m, &err) != TL_OK, err.msg);
    tl_free(q);
    tl_free(g);
    tl_free(s);
    return m;
}

struct work {
    struct tl_cpu_pool *pool;
    const struct tl_cpu_kernels *k;
    struct tl_mat **mats;
    int n_mats, rows;
    struct tl_cpu_acts acts;
    float *y;
    struct tl_cpu_linear_scratch *tmp;
};

static void run_mats(void *ctx, int tid)
{
    struct work *w = ctx;
    for (int i = 0; i < w->n_mats; i++) {
        struct tl_mat *m = w->mats[i];
        int64_t t0, t1;
        tl_cpu_share(m->n_tiles, tid, tl_cpu_pool_size(w->pool), &t0, &t1);
        (m->wtype == TL_W_INT4 ? w->k->linear_q4 : w->k->linear_q8)(m, &w->acts, w->rows, t0, t1, w->y, m->n_out,
                                                                    w->tmp + tid);
        tl_cpu_pool_barrier(w->pool);
    }
}

static double best_seconds(struct work *w, double seconds)
{
    double best = 1e30, start = now(), t0, t1;
    do {
        t0 = now();
        tl_cpu_pool_run(w->pool, run_mats, w);
        t1 = now();
        best = t1 - t0 < best ? t1 - t0 : best;
    } while (t1 - start < seconds);
    return best;
}

static void put_rows(struct work *w, int rows, int64_t n_in)
{
    float *x = tl_array((size_t)n_in, sizeof(*x));
    w->rows = rows;
    w->acts.k_max = n_in;
    w->acts.q = tl_cpu_pages((size_t)(rows * n_in));
    w->acts.group = tl_array((size_t)(rows * n_in / 32), 4);
    w->acts.sum = tl_array((size_t)rows, 4);
    w->acts.scale = tl_array((size_t)rows, 4);
    stop_if(!x || !w->acts.q || !w->acts.group || !w->acts.sum || !w->acts.scale, "no memory");
    for (int i = 0; i < rows; i++) {
        for (int64_t k = 0; k < n_in; k++)
            x[k] = (float)(next() % 2001) / 1000 - 1;
        w->k->quantise(x, n_in, n_in, w->acts.q + i * n_in, w->acts.group + i * (n_in / 32), w->acts.sum + i,
                       w->acts.scale + i);
    }
    tl_free(x);
}

static void drop_rows(struct work *w)
{
    tl_free(w->acts.q);
    tl_free(w->acts.group);
    tl_free(w->acts.sum);
    tl_free(w->acts.scale);
}

#define ROUNDS 5

static double larger(double a, double b) { return a > b ? a : b; }

static void bench_decode(struct work *w, enum tl_wtype t)
{
    enum { N = 40 };
    struct tl_mat *mats[N];
    double bytes = 0, rate = 0, bandwidth = 0, read;
    int n = t == TL_W_INT4 ? N : N / 2, threads = tl_cpu_pool_size(w->pool);
    struct tl_error err;
    for (int i = 0; i < n; i++) {
        mats[i] = random_mat(t, 10240, 2048);
        bytes += (double)(mats[i]->tile_bytes * (size_t)mats[i]->n_tiles);
    }
    put_rows(w, 1, 2048);
    w->mats = mats;
    w->n_mats = n;
    for (int i = 0; i < ROUNDS; i++) {
        stop_if(tl_cpu_read_bandwidth(threads, (size_t)256 << 20, 0.2, &read, &err) != TL_OK, err.msg);
        bandwidth = larger(bandwidth, read);
        rate = larger(rate, bytes / best_seconds(w, 0.3));
    }
    printf("{\"bench\":\"decode\",\"weights\":\"%s\",\"set_mb\":%.0f,\"threads\":%d,\"read_gb_per_s\":%.2f,\"gb_per_"
           "s\":%.2f,"
           "\"of_read_bandwidth\":%.3f}\n",
           t == TL_W_INT4 ? "int4" : "int8", bytes / 1e6, threads, bandwidth / 1e9, rate / 1e9, rate / bandwidth);
    fflush(stdout);
    drop_rows(w);
    for (int i = 0; i < n; i++)
        tl_cpu_mat_free(NULL, mats[i]);
}

/* ---- oneDNN ---- */

static void ok(dnnl_status_t st) { stop_if(st != dnnl_success, "oneDNN refused a matmul"); }

/* Operations per second of src [m, k] x weights [k, n] in s32, the weights in the layout that oneDNN likes best. */
static double dnnl_rate(dnnl_data_type_t src_type, int64_t m, int64_t n, int64_t k, double seconds)
{
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    dnnl_memory_desc_t src_d, any_d, dst_d;
    const dnnl_memory_desc_t *w_d;
    dnnl_matmul_desc_t desc;
    dnnl_primitive_desc_t pd;
    dnnl_primitive_t prim;
    dnnl_memory_t src, wei, dst;
    dnnl_exec_arg_t args[3];
    double best = 1e30, start, t0, t1;
    void *p;
    ok(dnnl_engine_create(&engine, dnnl_cpu, 0));
    ok(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags));
    ok(dnnl_memory_desc_init_by_tag(&src_d, 2, (dnnl_dims_t){m, k}, src_type, dnnl_ab));
    ok(dnnl_memory_desc_init_by_tag(&any_d, 2, (dnnl_dims_t){k, n}, dnnl_s8, dnnl_format_tag_any));
    ok(dnnl_memory_desc_init_by_tag(&dst_d, 2, (dnnl_dims_t){m, n}, dnnl_s32, dnnl_ab));
    ok(dnnl_matmul_desc_init(&desc, &src_d, &any_d, NULL, &dst_d));
    ok(dnnl_primitive_desc_create(&pd, &desc, NULL, engine, NULL));
    w_d = dnnl_primitive_desc_query_md(pd, dnnl_query_weights_md, 0);
    ok(dnnl_primitive_create(&prim, pd));
    ok(dnnl_memory_create(&src, &src_d, engine, DNNL_MEMORY_ALLOCATE));
    ok(dnnl_memory_create(&wei, w_d, engine, DNNL_MEMORY_ALLOCATE));
    ok(dnnl_memory_create(&dst, &dst_d, engine, DNNL_MEMORY_ALLOCATE));
    ok(dnnl_memory_get_data_handle(src, &p));
    memset(p, 3, (size_t)(m * k));
    ok(dnnl_memory_get_data_handle(wei, &p));
    memset(p, 2, dnnl_memory_desc_get_size(w_d));
    args[0] = (dnnl_exec_arg_t){DNNL_ARG_SRC, src};
    args[1] = (dnnl_exec_arg_t){DNNL_ARG_WEIGHTS, wei};
    args[2] = (dnnl_exec_arg_t){DNNL_ARG_DST, dst};
    start = now();
    do {
        t0 = now();
        ok(dnnl_primitive_execute(prim, stream, 3, args));
        ok(dnnl_stream_wait(stream));
        t1 = now();
        best = t1 - t0 < best ? t1 - t0 : best;
    } while (t1 - start < seconds);
    dnnl_memory_destroy(src);
    dnnl_memory_destroy(wei);
    dnnl_memory_destroy(dst);
    dnnl_primitive_destroy(prim);
    dnnl_primitive_desc_destroy(pd);
    dnnl_stream_destroy(stream);
    dnnl_engine_destroy(engine);
    return 2.0 * (double)m * (double)n * (double)k / best;
}

static void bench_prefill(struct work *w, double int8_rate)
{
    static const int shapes[][2] = {{3072, 2048}, {2048, 2048}, {10240, 2048}, {2048, 5120}}; /* outputs, inputs */
    for (int i = 0; i < 4; i++) {
        int64_t n = shapes[i][0], k = shapes[i][1];
        struct tl_mat *mats[2] = {random_mat(TL_W_INT4, n, k), random_mat(TL_W_INT8, n, k)};
        for (int m = 256; m <= 512; m *= 2) {
            double u8 = 0, s8 = 0, best, rate[2] = {0}, ops = 2.0 * m * (double)n * (double)k;
            put_rows(w, m, k);
            w->y = tl_cpu_pages((size_t)(m * n) * sizeof(float));
            stop_if(!w->y, "no memory");
            w->n_mats = 1;
            for (int r = 0; r < ROUNDS; r++) {
                u8 = larger(u8, dnnl_rate(dnnl_u8, m, n, k, 0.06));
                s8 = larger(s8, dnnl_rate(dnnl_s8, m, n, k, 0.06));
                for (int t = 0; t < 2; t++) {
                    w->mats = &mats[t];
                    rate[t] = larger(rate[t], ops / best_seconds(w, 0.06));
                }
            }
            best = larger(u8, s8);
            printf("{\"bench\":\"prefill\",\"rows\":%d,\"outputs\":%d,\"inputs\":%d,\"threads\":%d,\"onednn_u8s8_"
                   "gops\":%.0f,"
                   "\"onednn_s8s8_gops\":%.0f,\"int4_gops\":%.0f,\"int8_gops\":%.0f,\"int4_of_onednn\":%.2f,"
                   "\"int8_of_onednn\":%.2f,\"int4_of_int8_rate\":%.2f}\n",
                   m, (int)n, (int)k, tl_cpu_pool_size(w->pool), u8 / 1e9, s8 / 1e9, rate[0] / 1e9, rate[1] / 1e9,
                   rate[0] / best, rate[1] / best, rate[0] / int8_rate);
            fflush(stdout);
            tl_free(w->y);
            w->y = NULL;
            drop_rows(w);
        }
        tl_cpu_mat_free(NULL, mats[0]);
        tl_cpu_mat_free(NULL, mats[1]);
    }
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 2;
    struct work w = {.k = tl_cpu_kernels_of(tl_cpu_level())};
    struct tl_error err;
    double one, all, rate;
    char n[16];
    if (!getenv("OMP_WAIT_POLICY")) { /* read by oneDNN's threads before main() */
        snprintf(n, sizeof(n), "%d", threads);
        setenv("OMP_NUM_THREADS", n, 1);
        setenv("OMP_WAIT_POLICY", "passive", 1);
        execv("/proc/self/exe", argv);
    }
    stop_if(tl_cpu_pool_open(&w.pool, threads, &err) != TL_OK, "no threads");
    stop_if(tl_cpu_read_bandwidth(1, (size_t)512 << 20, 1.0, &one, &err) != TL_OK, "no memory");
    stop_if(tl_cpu_read_bandwidth(threads, (size_t)512 << 20, 1.0, &all, &err) != TL_OK, "no memory");
    stop_if(tl_cpu_int8_rate(threads, 0.3, &rate, &err) != TL_OK, "no threads");
    printf("{\"bench\":\"ceilings\",\"level\":\"%s\",\"threads\":%d,\"read_gb_per_s_1\":%.2f,\"read_gb_per_s\":%.2f,"
           "\"int8_gops\":%.0f}\n",
           w.k->name, threads, one / 1e9, all / 1e9, rate / 1e9);
    fflush(stdout);
    w.tmp = tl_cpu_pages((size_t)threads * sizeof(*w.tmp));
    w.y = tl_cpu_pages(10240 * sizeof(float));
    stop_if(!w.tmp || !w.y, "no memory");
    bench_decode(&w, TL_W_INT4);
    bench_decode(&w, TL_W_INT8);
    tl_free(w.y);
    bench_prefill(&w, rate);
    tl_free(w.tmp);
    tl_cpu_pool_close(w.pool);
    return 0;
}
