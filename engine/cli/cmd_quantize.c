/* `tinyloop quantize`: any supported model becomes an artifact in our own layout, with the weights asked for.
 *
 * Tensors are read, converted and written a few rows at a time, so memory does not grow with the model. The new directory appears
 * only when it is complete. Calibrating runs a plain INT8 copy of the model, which is made beside the result and removed. */
#include "args.h"
#include "artifact.h"
#include "calibrate.h"
#include "commands.h"
#include "mem.h"
#include "progress.h"
#include "quality.h"
#include "quant.h"
#include "weights.h"

#include <dirent.h>
#include <errno.h>
#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHUNK_ROWS 64

struct quantize {
    const char *model, *out, *to, *embed, *calibrate;
    struct tl_arg_list keep_int8;
    bool quiet, own_head;               /* a tied head becomes a matrix of its own */
    struct tl_calibration *calibration; /* NULL: weights stay as they are */
    enum tl_wtype wtype, embed_wtype;
    struct tl_arch_binding *b;
    struct tl_arch_spec spec; /* of the artifact */
    struct tl_artifact *a;
    struct tl_piece *pieces;
    int n_pieces;
    struct tl_quant_error *errors; /* [n_pieces] */
    uint64_t done;
};

/* ---- which type each matrix gets ---- */

static enum tl_wtype choose(void *arg, const struct tl_piece *p)
{
    const struct quantize *q = arg;
    bool table = p->weight == TL_WT_EMBED || p->weight == TL_WT_HEAD || p->weight == TL_WT_VALUE_EMBED;
    enum tl_wtype t = table ? q->embed_wtype : q->wtype;
    if (t != TL_W_INT4)
        return t;
    for (int i = 0; i < q->keep_int8.n; i++)
        if (fnmatch(q->keep_int8.item[i], p->name, 0) == 0)
            return TL_W_INT8;
    return p->n_in % TL_Q4_GROUP ? TL_W_INT8 : t;
}

/* Parts of one matrix (q, k, v) share a type: one INT8 part makes all of them INT8. */
static void unify_parts(struct tl_piece *p, int n)
{
    for (int i = 0, end; i < n; i = end) {
        bool int8 = false;
        for (end = i; end < n && p[end].weight == p[i].weight && p[end].layer == p[i].layer; end++)
            int8 = int8 || (p[end].n_in && p[end].wtype == TL_W_INT8);
        for (int j = i; j < end && int8; j++)
            p[j].wtype = TL_W_INT8;
    }
}

/* ---- one piece ---- */

struct chunk {
    float *x;                                   /* [CHUNK_ROWS][n_in] */
    uint8_t *packed;                            /* [CHUNK_ROWS] rows as they are stored */
    uint8_t *gscale;                            /* of the whole piece */
    float *scale;                               /* of the whole piece */
    float *weight;                              /* [n_in]: how much errors count; NULL = all the same */
    float *left;                                /* [n_in]: scratch of compensation */
    const struct tl_compensation *compensation; /* of INT4; NULL = none */
};

static size_t packed_row_bytes(const struct tl_piece *p)
{
    size_t n = (size_t)p->n_in;
    return p->wtype == TL_W_F32    ? 4 * n
           : p->wtype == TL_W_BF16 ? 2 * n
           : p->wtype == TL_W_INT8 ? n
                                   : tl_q4_row_bytes(p->n_in);
}

static void convert_row(const struct tl_piece *p, const struct chunk *c, const float *x, uint8_t *out, uint8_t *gscale,
                        float *scale, struct tl_quant_error *e)
{
    switch (p->wtype) {
    case TL_W_F32: memcpy(out, x, (size_t)p->n_in * sizeof(*x)); break;
    case TL_W_BF16:
        for (int64_t i = 0; i < p->n_in; i++) {
            uint16_t v = tl_f32_to_bf16(x[i]);
            float d = fabsf(tl_bf16_to_f32(v) - x[i]);
            memcpy(out + 2 * i, &v, 2);
            e->sum_sq += (double)x[i] * (double)x[i];
            e->sum_sq_error += (double)d * (double)d;
            e->max_error = d > e->max_error ? d : e->max_error;
        }
        break;
    case TL_W_INT8: tl_quant_int8_row(x, p->n_in, (int8_t *)out, scale, e); break;
    default:
        if (c->compensation)
            tl_quant_int4_row_compensated(x, c->compensation, p->n_in, c->left, out, gscale, scale, e);
        else
            tl_quant_int4_row(x, c->weight, p->n_in, out, gscale, scale, e);
    }
}

static enum tl_status write_bytes(struct quantize *q, const void *data, size_t bytes, struct tl_error *err)
{
    q->done += bytes;
    if (!q->quiet)
        tl_progress_show("quantizing", (double)q->done / (double)tl_artifact_bytes(q->a));
    return tl_artifact_write(q->a, data, bytes, err);
}

static enum tl_status write_vector(struct quantize *q, const struct tl_bind *w, const struct tl_piece *p,
                                   struct tl_error *err)
{
    size_t bytes = (size_t)p->rows * sizeof(float);
    float *v = tl_malloc(bytes);
    if (!v)
        return tl_fail_host_memory(err, bytes);
    tl_bind_read(w, p->row, p->rows, v);
    if (q->calibration)
        tl_calibration_fold(q->calibration, p, !q->spec.tied_head, p->row, p->rows, v);
    enum tl_status st = write_bytes(q, v, bytes, err);
    tl_free(v);
    return st;
}

static enum tl_status write_matrix(struct quantize *q, const struct tl_bind *w, const struct tl_piece *p,
                                   struct tl_quant_error *e, struct tl_error *err)
{
    size_t n_in = (size_t)p->n_in, row = packed_row_bytes(p), g = tl_q4_gscale_bytes(p->n_in), rows = (size_t)p->rows;
    struct chunk c = {
        .x = tl_malloc(CHUNK_ROWS * n_in * sizeof(float)),
        .packed = tl_malloc(CHUNK_ROWS * row),
        .gscale = tl_malloc(rows * g),
        .scale = tl_malloc(rows * sizeof(float)),
        .weight = q->calibration ? tl_malloc(n_in * sizeof(float)) : NULL,
        .left = q->calibration ? tl_malloc(n_in * sizeof(float)) : NULL,
    };
    enum tl_status st = TL_OK;
    if (!c.x || !c.packed || !c.gscale || !c.scale || (q->calibration && (!c.weight || !c.left)))
        st = tl_fail_host_memory(err, CHUNK_ROWS * (4 * n_in + row) + rows * (g + 4) + 8 * n_in);
    else if (c.weight)
        tl_calibration_weights(q->calibration, p, !q->spec.tied_head, c.weight);
    if (st == TL_OK && q->calibration && p->wtype == TL_W_INT4)
        st = tl_calibration_compensation(q->calibration, p, !q->spec.tied_head, &c.compensation, err);
    for (size_t r = 0, n; r < rows && st == TL_OK; r += n) {
        n = rows - r < CHUNK_ROWS ? rows - r : CHUNK_ROWS;
        tl_bind_read(w, p->row + (int64_t)r, (int64_t)n, c.x);
        if (q->calibration)
            tl_calibration_fold(q->calibration, p, !q->spec.tied_head, p->row + (int64_t)r, (int64_t)n, c.x);
        for (size_t i = 0; i < n; i++)
            convert_row(p, &c, c.x + i * n_in, c.packed + i * row, c.gscale + (r + i) * g, c.scale + r + i, e);
        st = write_bytes(q, c.packed, n * row, err);
    }
    if (st == TL_OK && p->wtype == TL_W_INT4)
        st = write_bytes(q, c.gscale, rows * g, err);
    if (st == TL_OK && p->wtype >= TL_W_INT8)
        st = write_bytes(q, c.scale, rows * sizeof(float), err);
    tl_free(c.x);
    tl_free(c.packed);
    tl_free(c.gscale);
    tl_free(c.scale);
    tl_free(c.weight);
    tl_free(c.left);
    return st;
}

static const struct tl_bind *source_of(const struct tl_arch_binding *b, const struct tl_piece *p)
{
    enum tl_weight w = p->weight == TL_WT_HEAD && b->spec.tied_head ? TL_WT_EMBED : p->weight;
    for (int i = 0; i < b->n_binds; i++)
        if (b->binds[i].weight == w && b->binds[i].layer == p->layer)
            return &b->binds[i];
    return NULL;
}

static enum tl_status write_piece(struct quantize *q, int i, struct tl_error *err)
{
    const struct tl_piece *p = &q->pieces[i];
    const struct tl_bind *w = source_of(q->b, p);
    TL_ASSERT(w); /* both lists come from the same spec */
    enum tl_status st = p->row == 0 ? tl_bind_check(q->b, w, err) : TL_OK;
    if (st == TL_OK)
        st = p->n_in ? write_matrix(q, w, p, &q->errors[i], err) : write_vector(q, w, p, err);
    for (int j = 0; j < w->n_parts; j++)
        tl_tensors_drop(q->b->tensors, w->part[j].t);
    return st;
}

/* ---- the whole artifact ---- */

static enum tl_status plan(struct quantize *q, struct tl_error *err)
{
    enum tl_status st;
    q->spec = q->b->spec;
    q->spec.c2c_is_final_norm = false; /* our layout keeps a copy of the norm */
    if (q->own_head)
        q->spec.tied_head = false;
    snprintf(q->spec.model_type, sizeof(q->spec.model_type), "tinyloop");
    st = tl_pieces_list(&q->pieces, &q->n_pieces, &tl_arch_tinyloop, &q->spec, choose, q, err);
    if (st != TL_OK)
        return st;
    unify_parts(q->pieces, q->n_pieces);
    q->errors = tl_calloc((size_t)q->n_pieces, sizeof(*q->errors));
    if (!q->errors)
        return tl_fail_host_memory(err, (size_t)q->n_pieces * sizeof(*q->errors));
    for (int i = 0; i < q->n_pieces && st == TL_OK; i++)
        st = tl_artifact_declare_piece(q->a, &q->pieces[i], err);
    return st;
}

static enum tl_status write_files(struct quantize *q, struct tl_error *err)
{
    static const char *const copied[] = {"tokenizer.json",      "tokenizer_config.json", "special_tokens_map.json",
                                         "chat_template.jinja", "added_tokens.json",     "LICENSE"};
    char *config = NULL;
    enum tl_status st = tl_spec_write(&config, &q->spec, q->wtype >= TL_W_INT8 ? tl_wtype_name(q->wtype) : "none", err);
    if (st == TL_OK)
        st = tl_artifact_put_file(q->a, "config.json", config, strlen(config), err);
    for (size_t i = 0; i < sizeof(copied) / sizeof(copied[0]) && st == TL_OK; i++)
        st = tl_artifact_copy_file(q->a, q->model, copied[i], err);
    tl_free(config);
    return st;
}

static void report(const struct quantize *q)
{
    struct tl_quant_error all = {0};
    uint64_t params = 0, bytes = 0;
    if (!q->quiet)
        printf("%-40s %-5s %16s %12s %12s\n", "tensor", "type", "shape", "rms error %", "max error");
    for (int i = 0; i < q->n_pieces; i++) {
        const struct tl_piece *p = &q->pieces[i];
        const struct tl_quant_error *e = &q->errors[i];
        char shape[32];
        bytes += tl_piece_bytes(p);
        params += (uint64_t)p->rows * (uint64_t)(p->n_in ? p->n_in : 1);
        all.sum_sq += e->sum_sq;
        all.sum_sq_error += e->sum_sq_error;
        if (!p->n_in || q->quiet)
            continue;
        snprintf(shape, sizeof(shape), "%lld x %lld", (long long)p->rows, (long long)p->n_in);
        printf("%-40s %-5s %16s %12.3f %12.3g\n", p->name, tl_wtype_name(p->wtype), shape,
               e->sum_sq > 0 ? 100 * sqrt(e->sum_sq_error / e->sum_sq) : 0.0, (double)e->max_error);
    }
    printf("%s: %llu parameters, %llu bytes, %.2f bits per parameter, rms error %.3f %%\n", q->out,
           (unsigned long long)params, (unsigned long long)bytes, 8.0 * (double)bytes / (double)params,
           all.sum_sq > 0 ? 100 * sqrt(all.sum_sq_error / all.sum_sq) : 0.0);
}

static enum tl_status convert(struct quantize *q, struct tl_error *err)
{
    /* Keep what the original does at the start: whoever opens the result decides again. */
    const struct tl_arch_params params = {.start_state_random = true};
    struct tl_tokenizer *tokenizer = NULL;
    enum tl_status st = tl_arch_open(&q->b, q->model, &params, err);
    if (st == TL_OK) /* it is copied unread, and found damaged only when the work is done */
        st = tl_tokenizer_of_model(&tokenizer, q->model, q->b->spec.vocab_size, err);
    tl_tokenizer_free(tokenizer);
    if (st == TL_OK)
        st = tl_artifact_create(&q->a, q->out, err);
    if (st == TL_OK)
        st = plan(q, err);
    for (int i = 0; i < q->n_pieces && st == TL_OK; i++)
        st = write_piece(q, i, err);
    if (st == TL_OK)
        st = write_files(q, err);
    if (st == TL_OK)
        st = tl_artifact_finish(q->a, err);
    tl_progress_clear();
    return st;
}

static void release(struct quantize *q)
{
    tl_free(q->errors);
    tl_free(q->pieces);
    tl_artifact_free(q->a);
    tl_arch_free(q->b);
    tl_calibration_free(q->calibration);
}

static void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        (void)unlinkat(dirfd(d), e->d_name, 0); /* "." and ".." refuse */
    if (d)
        closedir(d);
    (void)rmdir(dir);
}

/* Measure on a plain INT8 copy: it needs half the memory of a released model, and finds the same large channels. */
static enum tl_status calibrate(struct quantize *q, struct tl_error *err)
{
    char dir[4096];
    struct quantize plain = {
        .model = q->model, .out = dir, .quiet = q->quiet, .wtype = TL_W_INT8, .embed_wtype = TL_W_INT8};
    if ((size_t)snprintf(dir, sizeof(dir), "%s.plain-XXXXXX", q->out) >= sizeof(dir))
        return tl_fail(err, TL_ERR_BAD_PARAM, "the output directory's name has %zu characters, allowed are %zu",
                       strlen(q->out), sizeof(dir) - 16);
    if (!mkdtemp(dir))
        return tl_fail_errno(err, "make a directory beside", q->out, errno);
    enum tl_status st = convert(&plain, err);
    if (st == TL_OK)
        st = tl_calibration_measure(&q->calibration, dir, q->calibrate, q->wtype == TL_W_INT4, err);
    release(&plain);
    remove_dir(dir);
    return st;
}

static enum tl_status run(struct quantize *q, struct tl_error *err)
{
    enum tl_status st = q->calibrate ? calibrate(q, err) : TL_OK;
    if (st == TL_OK)
        st = convert(q, err);
    if (st == TL_OK)
        report(q);
    release(q);
    return st;
}

int tl_cmd_quantize(int argc, char **argv)
{
    struct quantize q = {.to = "int8"};
    struct tl_error err;
    const char *text = NULL, *loops = "1,2,4,8";
    int depths[TL_QUALITY_DEPTHS_MAX];
    const struct tl_arg rows[] = {
        {"model", TL_ARG_STR, &q.model, "DIR", "model to convert; any supported architecture", true, 0, 0},
        {"out", TL_ARG_STR, &q.out, "DIR", "directory to make; must not exist", true, 0, 0},
        {"to", TL_ARG_STR, &q.to, "TYPE",
         "int8 (default: quality), int4 (speed), or f32, bf16 to change the layout only", false, 0, 0},
        {"embed", TL_ARG_STR, &q.embed, "TYPE", "embedding and head: int8 (default), int4, bf16 or f32", false, 0, 0},
        {"keep-int8", TL_ARG_LIST, &q.keep_int8, "PATTERN",
         "with --to int4: these tensors stay INT8, e.g. 'model.core.*.mlp.down*'", false, 0, 0},
        {"calibrate", TL_ARG_STR, &q.calibrate, "FILE",
         "run the beginning of this text and move large channels out of the activations: better INT8 and INT4 at the "
         "same "
         "speed; needs room for an INT8 copy of the model in memory and beside DIR",
         false, 0, 0},
        {"own-head", TL_ARG_FLAG, &q.own_head, NULL,
         "store a tied head as a matrix of its own, so that --calibrate can improve it, too; takes its memory, no time",
         false, 0, 0},
        {"text", TL_ARG_STR, &text, "FILE", "measure bits per byte of this text before and after; loads both models",
         false, 0, 0},
        {"loops", TL_ARG_STR, &loops, "LIST", "depths to measure (default 1,2,4,8)", false, 0, 0},
        {"quiet", TL_ARG_FLAG, &q.quiet, NULL, "the last line only", false, 0, 0},
    };
    const struct tl_args args = {
        "tinyloop quantize",
        "Convert a model to TinyLoop's layout with INT8 or INT4 weights, and report the error per tensor.",
        "tinyloop quantize --model Ouro-1.4B --to int4 --out ouro-int4 --text book.txt --loops 1,2,4",
        rows,
        sizeof(rows) / sizeof(rows[0]),
    };
    int rc = tl_args_parse(&args, argc, argv);
    if (rc != TL_ARGS_GO)
        return rc;
    if (!tl_wtype_parse(q.to, &q.wtype))
        return tl_args_wrong(&args, "--to: '%s' is not int8, int4, bf16 or f32", q.to);
    q.embed_wtype = q.wtype == TL_W_INT4 ? TL_W_INT8 : q.wtype;
    if (q.embed && !tl_wtype_parse(q.embed, &q.embed_wtype))
        return tl_args_wrong(&args, "--embed: '%s' is not int8, int4, bf16 or f32", q.embed);
    if (q.keep_int8.n && q.wtype != TL_W_INT4)
        return tl_args_wrong(&args, "--keep-int8 needs --to int4");
    int n_depths = tl_args_int_list(&args, "loops", loops, 1, TL_LOOPS_MAX, depths, TL_QUALITY_DEPTHS_MAX);
    if (n_depths < 0)
        return TL_EXIT_USAGE;
    if (text && access(text, R_OK) != 0)
        return tl_args_wrong(&args, "--text: '%s' cannot be read", text);
    if (q.calibrate && access(q.calibrate, R_OK) != 0)
        return tl_args_wrong(&args, "--calibrate: '%s' cannot be read", q.calibrate);
    enum tl_status st = run(&q, &err);
    if (st == TL_OK && text)
        st = tl_quality_report(&(struct tl_quality_params){q.model, q.out, text, depths, n_depths}, &err);
    if (st != TL_OK)
        fprintf(stderr, "tinyloop quantize: %s\n", err.msg);
    return st == TL_OK ? TL_EXIT_OK : st == TL_ERR_BAD_PARAM ? TL_EXIT_USAGE : TL_EXIT_FAILED;
}
