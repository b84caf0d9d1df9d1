#include "calibrate.h"

#include "gram.h"
#include "json.h"
#include "mem.h"
#include "model.h"
#include "progress.h"

#include <math.h>
#include <pthread.h>
#include <string.h>

enum site { QKV, O, UP, DOWN, N_SITES };

#define PIECE_BYTES    1024         /* of text, run at once */
#define GRAM_WIDTH_MAX 512          /* inputs whose errors can make each other good */
#define GRAM_BYTES_MAX (512u << 20) /* of all layers: larger models get narrower blocks */

/* Per layer: largest magnitude of each input channel, later its scale. */
struct tl_calibration {
    struct tl_arch_spec spec;
    int n_layers;
    float **channel;                 /* [n_layers][N_SITES], then the head's */
    struct tl_gram **gram;           /* [n_layers][N_SITES]; NULL: none, or not for this width */
    struct tl_compensation *at_hand; /* of site at_hand_site */
    int at_hand_site;
    /* While measuring: */
    const struct tl_net *net;
    pthread_mutex_t lock;
};

static int64_t width(const struct tl_arch_spec *s, int i)
{
    switch (i % N_SITES) {
    case O: return tl_q_dim(s);
    case DOWN: return s->d_ff;
    default: return s->d_model;
    }
}

static float *channels_of(const struct tl_calibration *c, int layer, enum site site)
{
    return c->channel[layer * N_SITES + (int)site];
}

static float *head_channels(const struct tl_calibration *c) { return c->channel[c->n_layers * N_SITES]; }

void tl_calibration_free(struct tl_calibration *c)
{
    if (!c)
        return;
    for (int i = 0; c->channel && i <= c->n_layers * N_SITES; i++)
        tl_free(c->channel[i]);
    for (int i = 0; c->gram && i < c->n_layers * N_SITES; i++)
        tl_gram_free(c->gram[i]);
    tl_compensation_free(c->at_hand);
    tl_free(c->gram);
    tl_free(c->channel);
    pthread_mutex_destroy(&c->lock);
    tl_free(c);
}

static enum tl_status create(struct tl_calibration **out, const struct tl_net *net, struct tl_error *err)
{
    struct tl_calibration *c = tl_calloc(1, sizeof(*c));
    *out = NULL;
    if (!c)
        return tl_fail_host_memory(err, sizeof(*c));
    pthread_mutex_init(&c->lock, NULL);
    c->spec = net->spec;
    c->net = net;
    c->n_layers = tl_n_layers(&net->spec);
    int n = c->n_layers * N_SITES + 1;
    size_t bytes = (size_t)n * sizeof(*c->channel);
    c->channel = tl_calloc((size_t)n, sizeof(*c->channel));
    for (int i = 0; c->channel && i < n; i++) {
        bytes = (size_t)width(&c->spec, i) * sizeof(float);
        if (!(c->channel[i] = tl_calloc(1, bytes)))
            break;
    }
    if (!c->channel || !c->channel[n - 1]) {
        tl_calibration_free(c);
        return tl_fail_host_memory(err, bytes);
    }
    *out = c;
    return TL_OK;
}

static enum tl_status create_grams(struct tl_calibration *c, struct tl_error *err)
{
    int n = c->n_layers * N_SITES, most = GRAM_WIDTH_MAX * 2;
    size_t bytes;
    enum tl_status st = TL_OK;
    do {
        most /= 2;
        bytes = 0;
        for (int i = 0; i < n; i++)
            bytes += tl_gram_bytes(width(&c->spec, i), tl_gram_width(width(&c->spec, i), most));
    } while (bytes > GRAM_BYTES_MAX && most > TL_Q4_GROUP);
    if (!(c->gram = tl_calloc((size_t)n, sizeof(*c->gram))))
        return tl_fail_host_memory(err, (size_t)n * sizeof(*c->gram));
    for (int i = 0; i < n && st == TL_OK; i++)
        if (width(&c->spec, i) % TL_Q4_GROUP == 0)
            st = tl_gram_create(&c->gram[i], width(&c->spec, i), tl_gram_width(width(&c->spec, i), most), err);
    return st;
}

/* ---- measuring ---- */

/* Index of what a matrix reads; -1: it is not watched. */
static int site_of_matrix(const struct tl_calibration *c, const struct tl_mat *m)
{
    for (int i = 0; i < c->n_layers; i++) {
        const struct tl_layer *l = &c->net->layers[i];
        const struct tl_mat *const at[N_SITES] = {l->qkv, l->o, l->up, l->down};
        for (int site = 0; site < N_SITES; site++)
            if (at[site] == m)
                return i * N_SITES + site;
    }
    return m == c->net->head ? c->n_layers * N_SITES : -1;
}

/* Called by every thread of the backend. */
static void observe(void *arg, const struct tl_mat *m, const float *x, int64_t n)
{
    struct tl_calibration *c = arg;
    int site = site_of_matrix(c, m);
    if (site < 0)
        return;
    float *most = c->channel[site];
    pthread_mutex_lock(&c->lock);
    for (int64_t i = 0; i < n; i++)
        most[i] = fabsf(x[i]) > most[i] ? fabsf(x[i]) : most[i];
    if (c->gram && site < c->n_layers * N_SITES && c->gram[site])
        tl_gram_add(c->gram[site], x);
    pthread_mutex_unlock(&c->lock);
}

/* Where the piece of a text that begins at `at` ends: before a character, and no scrap is left behind it. */
static size_t piece_end(const char *text, size_t at, size_t n)
{
    size_t end = at + PIECE_BYTES;
    if (n < end + PIECE_BYTES / 4)
        return n;
    while (end > at + PIECE_BYTES / 2 && ((uint8_t)text[end] & 0xC0) == 0x80)
        end--;
    return end;
}

static enum tl_status run_text(const struct tl_calibration *c, struct tl_model *m, const char *text, size_t n,
                               struct tl_error *err)
{
    int loops = c->spec.loops_default < m->info.max_loops ? c->spec.loops_default : m->info.max_loops;
    struct tl_eval unused;
    enum tl_status st = TL_OK;
    size_t at = 0, end;
    do {
        tl_progress_show("calibrating", (double)at / (double)(n + 1));
        end = piece_end(text, at, n);
        st = tl_eval_text(m, NULL, text + at, end - at, loops, &unused, err);
        if (st == TL_ERR_EMPTY_PROMPT && at > 0) /* a piece that is one token */
            st = TL_OK;
        at = end;
    } while (at < n && st == TL_OK);
    tl_progress_clear();
    return st;
}

/* Query heads that share a value share its scale. */
static void share_values(const struct tl_arch_spec *s, float *most)
{
    int64_t d = s->d_head, per = s->n_heads / s->n_kv_heads;
    for (int64_t i = 0; i < tl_kv_dim(s); i++) {
        float *group = most + i / d * per * d + i % d, top = 0;
        for (int64_t h = 0; h < per; h++)
            top = group[h * d] > top ? group[h * d] : top;
        for (int64_t h = 0; h < per; h++)
            group[h * d] = top;
    }
}

static enum tl_status to_scales(float *most, int64_t n, struct tl_error *err)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)most[i];
    if (!(sum < (double)INFINITY))
        return tl_fail(err, TL_ERR_BAD_FILE,
                       "the model computes values that are not finite, so it cannot be calibrated");
    for (int64_t i = 0; i < n; i++) {
        float relative = sum > 0 ? most[i] / (float)(sum / (double)n) : 1;
        relative = relative < 1e-4f ? 1e-4f : relative > 1e4f ? 1e4f : relative;
        most[i] = sqrtf(relative);
    }
    return TL_OK;
}

enum tl_status tl_calibration_measure(struct tl_calibration **out, const char *dir, const char *text_path, bool pairs,
                                      struct tl_error *err)
{
    struct tl_model *m = NULL;
    struct tl_calibration *c = NULL;
    struct tl_model_params params = {.dir = dir, .device = "cpu", .n_threads = pairs};
    char *text = NULL;
    size_t n = 0;
    enum tl_status st = tl_file_read(&text, &n, text_path, 64u << 20, err);
    *out = NULL;
    if (n > TL_CALIBRATION_BYTES)
        for (n = TL_CALIBRATION_BYTES; n > 0 && ((uint8_t)text[n] & 0xC0) == 0x80;)
            n--; /* before a character, not within */
    if (st == TL_OK)
        st = tl_model_open(&m, &params, err);
    if (st == TL_OK)
        st = create(&c, &m->net, err);
    if (st == TL_OK && pairs)
        st = create_grams(c, err);
    if (st == TL_OK) {
        m->be->observe = observe;
        m->be->observe_arg = c;
        st = run_text(c, m, text, n, err);
        m->be->observe = NULL;
        c->net = NULL;
    }
    for (int i = 0; st == TL_OK && i <= c->n_layers * N_SITES; i++) {
        if (i < c->n_layers * N_SITES && i % N_SITES == O)
            share_values(&c->spec, c->channel[i]);
        st = to_scales(c->channel[i], width(&c->spec, i), err);
    }
    if (st == TL_OK) {
        *out = c;
        c = NULL;
    }
    tl_calibration_free(c);
    tl_model_free(m);
    tl_free(text);
    return st;
}

/* ---- folding ---- */

/* Scale of value channel i of all kv heads: that of the first query head that reads it. */
static float value_scale(const struct tl_calibration *c, int layer, int64_t i)
{
    int64_t d = c->spec.d_head, per = c->spec.n_heads / c->spec.n_kv_heads;
    return channels_of(c, layer, O)[i / d * per * d + i % d];
}

static void fold_vector(const struct tl_calibration *c, const struct tl_piece *p, bool own_head, int64_t row, int64_t n,
                        float *x)
{
    int64_t values = (int64_t)tl_q_dim(&c->spec) + tl_kv_dim(&c->spec);
    for (int64_t i = 0; i < n; i++)
        switch (p->weight) {
        case TL_WT_N1: x[i] /= channels_of(c, p->layer, QKV)[row + i]; break;
        case TL_WT_N4: x[i] /= channels_of(c, p->layer, UP)[row + i]; break;
        case TL_WT_FINAL_NORM:
            if (own_head)
                x[i] /= head_channels(c)[row + i];
            break;
        case TL_WT_QKV_BIAS:
            if (row + i >= values)
                x[i] /= value_scale(c, p->layer, row + i - values);
            break;
        case TL_WT_VALUE_GATE: /* reads what n1 puts out, as qkv does */
            if (c->spec.norms & TL_N1)
                x[i] *= channels_of(c, p->layer, QKV)[(row + i) % TL_VALUE_GATE_IN];
            break;
        default: break;
        }
}

/* What the columns of a matrix are multiplied by; NULL = they stay. */
static const float *column_scales(const struct tl_calibration *c, const struct tl_piece *p, bool own_head)
{
    switch (p->weight) {
    case TL_WT_QKV: return c->spec.norms & TL_N1 ? channels_of(c, p->layer, QKV) : NULL;
    case TL_WT_O: return channels_of(c, p->layer, O);
    case TL_WT_UP: return c->spec.norms & TL_N4 ? channels_of(c, p->layer, UP) : NULL;
    case TL_WT_DOWN: return channels_of(c, p->layer, DOWN);
    case TL_WT_HEAD: return own_head && c->spec.final_norm ? head_channels(c) : NULL;
    default: return NULL;
    }
}

/* What row i of a matrix is divided by. */
static float row_scale(const struct tl_calibration *c, const struct tl_piece *p, int64_t i)
{
    const struct tl_arch_spec *s = &c->spec;
    int64_t values = (int64_t)tl_q_dim(s) + tl_kv_dim(s);
    if (p->weight == TL_WT_QKV && i >= values)
        return value_scale(c, p->layer, i - values);
    if (p->weight == TL_WT_UP && s->mlp == TL_MLP_RELU2)
        return sqrtf(channels_of(c, p->layer, DOWN)[i]); /* what comes out is squared */
    if (p->weight == TL_WT_UP && i >= s->d_ff)
        return channels_of(c, p->layer, DOWN)[i - s->d_ff];
    return 1;
}

void tl_calibration_weights(const struct tl_calibration *c, const struct tl_piece *p, bool own_head, float *out)
{
    const float *s = column_scales(c, p, own_head);
    for (int64_t j = 0; j < p->n_in; j++)
        out[j] = s ? s[j] * s[j] : 1;
}

enum tl_status tl_calibration_compensation(struct tl_calibration *c, const struct tl_piece *p, bool own_head,
                                           const struct tl_compensation **out, struct tl_error *err)
{
    static const struct {
        enum tl_weight weight;
        enum site site;
    } sites[] = {{TL_WT_QKV, QKV}, {TL_WT_O, O}, {TL_WT_UP, UP}, {TL_WT_DOWN, DOWN}};
    int at = -1;
    enum tl_status st = TL_OK;
    *out = NULL;
    for (size_t i = 0; i < sizeof(sites) / sizeof(sites[0]); i++)
        if (sites[i].weight == p->weight)
            at = p->layer * N_SITES + (int)sites[i].site;
    if (at < 0 || !c->gram || !c->gram[at])
        return TL_OK;
    if (!c->at_hand || c->at_hand_site != at) {
        tl_compensation_free(c->at_hand);
        c->at_hand = NULL;
        c->at_hand_site = at;
        st = tl_gram_compensation(c->gram[at], column_scales(c, p, own_head), &c->at_hand, err);
    }
    *out = c->at_hand;
    return st;
}

void tl_calibration_fold(const struct tl_calibration *c, const struct tl_piece *p, bool own_head, int64_t row,
                         int64_t n, float *x)
{
    const float *s = column_scales(c, p, own_head);
    if (!p->n_in)
        fold_vector(c, p, own_head, row, n, x);
    for (int64_t i = 0; i < n && p->n_in; i++) {
        float *w = x + i * p->n_in, divisor = row_scale(c, p, row + i);
        for (int64_t j = 0; j < p->n_in; j++) {
            float v = s ? w[j] * s[j] : w[j];
            w[j] = v / (p->weight == TL_WT_VALUE_EMBED ? value_scale(c, p->layer, j) : divisor);
        }
    }
}
