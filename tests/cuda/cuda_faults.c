/* tests/cuda/cuda_faults.c - the CUDA backend when CUDA fails, on a runtime that needs no card (fake_runtime.h).
 *
 *   cuda_faults MODEL_DIR...
 *
 *   - a machine without a driver, without a card, with an old card: a clear error, and "auto" takes the CPU and says why
 *   - too little memory: what is missing, with numbers
 *   - cards of other kinds: no kernel asks for more shared memory than its card has, whatever the model's heads and weights
 *   - every single call made to fail in turn, once as a lack of memory and once as a lost device, while a model is opened and
 *     steps are run: an error with a message or no harm; all that was taken is given back; a lost device stays lost
 * Ends with "N passed, N failed". */
#include "fake_runtime.h"

#include "backend.h"
#include "random_net.h"
#include "tinyloop.h"

#define N_TOKENS 70

static int passed, failed;

static void check(bool ok, const char *what, const char *more)
{
    if (ok)
        passed++;
    else
        failed++;
    if (!ok)
        printf("FAILED %s: %s\n", what, more);
}

static void opens(const char *what, enum tl_status want, const char *text)
{
    struct tl_backend *be = NULL;
    struct tl_error err = {0};
    enum tl_status st = tl_backend_open(&be, "cuda", 1, &err);
    check(st == want && !be && strstr(err.msg, text), what, err.msg);
    check(fake.held == 0, what, "something is still held");
    st = tl_backend_open(&be, "auto", 1, &err);
    check(st == TL_OK && !strcmp(be->ops->name, "cpu") && strstr(be->passed_over, text), what, "auto takes the CPU");
    if (st == TL_OK)
        be->ops->close(be);
}

static void machines(void)
{
    fake_reset();
    fake.driver = 0;
    opens("no driver", TL_ERR_UNSUPPORTED, "no NVIDIA driver");
    fake_reset();
    fake.devices = 0;
    opens("no card", TL_ERR_UNSUPPORTED, "none is visible");
    fake_reset();
    fake.devices_error = cudaErrorNoDevice;
    opens("a driver without a card", TL_ERR_UNSUPPORTED, "no device");
    fake_reset();
    fake.major = 7;
    fake.minor = 5;
    opens("an old card", TL_ERR_UNSUPPORTED, "(Card of Paper) has compute capability 7.5, at least 8.0");
}

/* ---- cards ---- */

#define ROWS 200

/* n rows in front of position 600: of one sequence, or of as many sequences (which share pages; nothing is computed). */
static void run_rows(struct net *n, const struct seq_pages *pages, int rows, bool one, const char *what)
{
    struct tl_row row[ROWS];
    struct tl_step_seq seqs[ROWS];
    int32_t places[ROWS];
    struct tl_row_set set = {places, rows};
    struct tl_op ops[] = {{.kind = TL_OP_EMBED}, {.kind = TL_OP_LAYER, .layer = n->layers}};
    struct tl_step step = {.net = &n->net,
                           .kv = n->kv,
                           .rows = row,
                           .n_rows = rows,
                           .seqs = seqs,
                           .sets = &set,
                           .n_sets = 1,
                           .ops = ops,
                           .n_ops = 2};
    struct tl_error err = {0};
    step.n_seqs = one ? 1 : rows;
    for (int i = 0; i < rows; i++) {
        places[i] = i;
        row[i] = (struct tl_row){one ? 0 : i, one ? 600 - rows + i : 599, 1};
        seqs[i] = (struct tl_step_seq){.pages = pages[i % NET_SEQS_MAX].pages, .stride = NET_BLOCKS};
    }
    check(n->be->ops->run(n->be, &step, &err) == TL_OK && n->be->ops->sync(n->be, &err) == TL_OK, what, err.msg);
}

static struct tl_arch_spec spec_of(int d_head, uint32_t norms)
{
    return (struct tl_arch_spec){.d_model = 1024,
                                 .n_heads = 4,
                                 .n_kv_heads = 2,
                                 .d_head = d_head,
                                 .d_ff = 2048,
                                 .vocab_size = 64,
                                 .n_core = 1,
                                 .loops_default = 1,
                                 .loops_trained = 1,
                                 .loops_max = 2,
                                 .max_positions = NET_POSITIONS,
                                 .norm_eps = 1e-5f,
                                 .embed_scale = 1,
                                 .norms = norms,
                                 .rope = TL_ROPE_HALF,
                                 .final_norm = true};
}

static void cards(void)
{
    static const struct {
        int major, minor;
        size_t shared;
    } kinds[] = {{8, 0, 163 << 10}, {8, 6, 99 << 10}, {8, 9, 99 << 10}, {9, 0, 227 << 10}, {12, 0, 99 << 10}};
    static const int heads[] = {32, 48, 64, 96, 128, 256}, rows[] = {1, 4, 12, 40, ROWS};
    static struct seq_pages pages[NET_SEQS_MAX];
    char what[100];
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++)
            for (enum tl_wtype t = TL_W_F32; t <= TL_W_INT4; t++) {
                struct tl_arch_spec spec = spec_of(heads[h], 63);
                struct net n;
                fake_reset();
                fake.major = kinds[k].major;
                fake.minor = kinds[k].minor;
                fake.shared = kinds[k].shared;
                net_open(&n, "cuda", &spec, t, ROWS, 1);
                net_pages(&n, pages, NET_SEQS_MAX);
                for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
                    for (int one = 0; one < 2; one++) {
                        snprintf(what, sizeof(what),
                                 "a card of compute capability %d.%d, heads of %d, weights %d, %d rows", kinds[k].major,
                                 kinds[k].minor, heads[h], (int)t, rows[i]);
                        run_rows(&n, pages, rows[i], one, what);
                    }
                net_close(&n);
                check(fake.held == 0 && fake.overtaken == 0, what, "something is still held, or may be overtaken");
            }
}

static long launches_of(struct net *n, const struct seq_pages *pages, int rows, bool one, const char *what)
{
    long before = fake.launches;
    run_rows(n, pages, rows, one, what);
    return fake.launches - before;
}

/* The step of one row as one kernel, which only a model of a common shape gets, and the chain of kernels instead of it. With heads of 128
 * and integers, that of two rows, too, if they are of two sequences, and no norm stands behind a product. There are left-over tiles here;
 * little: with heads of 128 not all find room, and the kernel does without. */
static void one_kernel(int d_head, enum tl_wtype t, bool little)
{
    static struct seq_pages pages[NET_SEQS_MAX];
    const char *what = "the one-kernel step";
    struct tl_arch_spec spec = spec_of(d_head, TL_N1 | TL_N4);
    bool pairs = d_head == 128 && (t == TL_W_INT8 || t == TL_W_INT4);
    long launches[2], two[2], alike[2];
    spec.d_model = 1088;
    for (int chain = 0; chain < 2; chain++) {
        struct net n;
        if (chain)
            setenv("TL_CUDA_ONE_KERNEL", "0", 1);
        fake_reset();
        if (little)
            fake.shared = 216 << 10;
        net_open(&n, "cuda", &spec, t, ROWS, 1);
        net_pages(&n, pages, NET_SEQS_MAX);
        launches[chain] = launches_of(&n, pages, 1, true, what);
        two[chain] = launches_of(&n, pages, 2, false, what);
        alike[chain] = launches_of(&n, pages, 2, true, what);
        run_rows(&n, pages, 4, true, what);
        net_close(&n);
        check(fake.held == 0 && fake.overtaken == 0, what, "something is still held, or may be overtaken");
    }
    unsetenv("TL_CUDA_ONE_KERNEL");
    check(launches[0] > 0 && launches[0] < launches[1], what, "it takes as many launches as the chain of kernels");
    check(two[0] == (pairs ? launches[0] : two[1]), what,
          "two rows of two sequences take other launches than they should");
    check(alike[0] == alike[1], what, "two rows of one sequence are taken for rows of two");
    spec.norms |= TL_N2;
    struct net n;
    fake_reset();
    net_open(&n, "cuda", &spec, t, ROWS, 1);
    net_pages(&n, pages, NET_SEQS_MAX);
    check(launches_of(&n, pages, 2, false, what) > launches[0], what,
          "two rows are taken though a norm follows a product");
    net_close(&n);
}

/* Models of such heads and of little width: products of fewer tiles than a cluster has blocks, or the grid has. */
static void narrow(int d_head, enum tl_wtype t)
{
    static const int heads[][2] = {{1, 1}, {4, 4}, {8, 1}, {5, 1}},
                     widths[][2] = {{64, 64}, {128, 576}, {320, 64}, {576, 320}};
    static struct seq_pages pages[NET_SEQS_MAX];
    char what[100];
    for (size_t h = 0; h < sizeof(heads) / sizeof(heads[0]); h++)
        for (size_t w = 0; w < sizeof(widths) / sizeof(widths[0]); w++) {
            struct tl_arch_spec spec = spec_of(d_head, TL_N1 | TL_N4);
            struct net n;
            spec.n_heads = heads[h][0];
            spec.n_kv_heads = heads[h][1];
            spec.d_model = widths[w][0];
            spec.d_ff = widths[w][1];
            snprintf(what, sizeof(what), "%d heads over %d of %d, width %d, %d within, weights %d", heads[h][0],
                     heads[h][1], d_head, widths[w][0], widths[w][1], (int)t);
            fake_reset();
            net_open(&n, "cuda", &spec, t, ROWS, 1);
            net_pages(&n, pages, NET_SEQS_MAX);
            run_rows(&n, pages, 1, true, what);
            run_rows(&n, pages, 4, true, what);
            net_close(&n);
            check(fake.held == 0 && fake.overtaken == 0, what, "something is still held, or may be overtaken");
        }
}

/* Open, run a prompt and single tokens (twice, so that graphs are captured, and once more), close. */
static enum tl_status use(const char *dir, uint64_t memory, struct tl_error *err)
{
    struct tl_model *m = NULL;
    int32_t tokens[N_TOKENS];
    enum tl_status st;
    float *logits = NULL;
    st = tl_model_open(
        &m, &(struct tl_model_params){.dir = dir, .device = "cuda", .memory_bytes = memory, .step_rows_max = 64}, err);
    if (st != TL_OK)
        return st;
    logits = calloc((size_t)tl_model_info(m)->vocab_size * N_TOKENS, sizeof(*logits));
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = i % tl_model_info(m)->vocab_size;
    for (int chunk = 0; chunk < 2 && st == TL_OK; chunk++) {
        struct tl_logits_params p = {
            .tokens = tokens, .n_tokens = N_TOKENS, .n_rows = 2, .n_loops = 2, .logits = logits, .chunk = chunk};
        st = tl_logits(m, &p, err);
    }
    if (st == TL_ERR_DEVICE && fake.dead) { /* it never comes back, whatever the driver says then */
        struct tl_error again = {0};
        struct tl_logits_params p = {.tokens = tokens, .n_tokens = 3, .n_rows = 1, .n_loops = 1, .logits = logits};
        fake.dead = false;
        check(tl_logits(m, &p, &again) == TL_ERR_DEVICE && strstr(again.msg, "failed earlier"), "a lost device",
              again.msg);
        fake.dead = true;
    }
    free(logits);
    tl_model_free(m);
    return st;
}

static void each_call(const char *dir)
{
    static const struct {
        cudaError_t e;
        enum tl_status st;
        const char *name;
    } kinds[] = {{cudaErrorMemoryAllocation, TL_ERR_NO_DEVICE_MEMORY, "no memory"},
                 {cudaErrorIllegalAddress, TL_ERR_DEVICE, "lost"}};
    struct tl_error err = {0};
    long calls, harmless = 0, other = 0;
    char what[200];
    fake_reset();
    check(use(dir, 64 << 20, &err) == TL_OK, dir, err.msg);
    check(fake.held == 0, dir, "something is still held");
    snprintf(what, sizeof(what), "%ld calls may overtake what was begun in the default stream", fake.overtaken);
    check(fake.overtaken == 0, dir, what);
    calls = fake.calls;
    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        for (long i = 1; i <= calls; i++) {
            enum tl_status st;
            fake_reset();
            fake.fail_at = i;
            fake.fail_with = kinds[k].e;
            memset(&err, 0, sizeof(err));
            st = use(dir, 64 << 20, &err);
            snprintf(what, sizeof(what), "%s, call %ld of %ld (%s), %s", dir, i, calls, fake.failed_call,
                     kinds[k].name);
            harmless += st == TL_OK;
            other += st != TL_OK && st != kinds[k].st;
            check((st == TL_OK ? !fake.dead : strlen(err.msg) > 10) && fake.held == 0 && fake.used == 0, what,
                  st == TL_OK && fake.dead ? "went on with a lost device"
                  : fake.held || fake.used ? "something is still held"
                                           : err.msg);
        }
    printf("%s: %ld calls made to fail two ways, %ld times without harm, %ld times reported as something else\n", dir,
           calls, harmless, other);
}

static void little_memory(const char *dir)
{
    struct tl_error err = {0};
    fake_reset();
    fake.memory = 100000;
    check(use(dir, 0, &err) != TL_OK && strpbrk(err.msg, "123456789"), "a card of 100 kB", err.msg);
    printf("a card of 100 kB: %s\n", err.msg);
    check(fake.held == 0, "a card of 100 kB", "something is still held");
    fake_reset();
    check(use(dir, (uint64_t)1 << 40, &err) != TL_OK && strpbrk(err.msg, "123456789"), "a budget beyond the card",
          err.msg);
    printf("a budget of a TiB: %s\n", err.msg);
    check(fake.held == 0, "a budget beyond the card", "something is still held");
}

int main(int argc, char **argv)
{
    machines();
    cards();
    for (int d_head = 64; d_head <= 128; d_head += 64)
        for (enum tl_wtype t = TL_W_BF16; t <= TL_W_INT4; t++)
            narrow(d_head, t);
    for (int d_head = 64; d_head <= 128; d_head += 64)
        for (enum tl_wtype t = TL_W_BF16; t <= TL_W_INT4; t++)
            for (int little = 0; little < (t == TL_W_BF16 ? 1 : 2); little++)
                one_kernel(d_head, t, little);
    for (int i = 1; i < argc; i++) {
        little_memory(argv[i]);
        each_call(argv[i]);
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed || !passed;
}
