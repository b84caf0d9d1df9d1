#include "quality.h"

#include "json.h"
#include "mem.h"
#include "progress.h"
#include "tinyloop.h"

#include <stdio.h>

#define TEXT_BYTES_MAX (64u << 20)

/* Bits per byte at each depth; -1 where the model has no such depth. */
static enum tl_status measure(const char *dir, const struct tl_quality_params *p, const char *text, size_t n_text,
                              double *bits, struct tl_error *err)
{
    struct tl_model *m = NULL;
    enum tl_status st = tl_model_open(&m, &(struct tl_model_params){.dir = dir}, err);
    if (st != TL_OK)
        return st;
    for (int i = 0; i < p->n_loops && st == TL_OK; i++) {
        tl_progress_show("measuring", (double)i / p->n_loops);
        bits[i] = -1;
        if (p->loops[i] <= tl_model_info(m)->max_loops)
            st = tl_eval_bits_per_byte(m, text, n_text, p->loops[i], &bits[i], err);
    }
    tl_progress_clear();
    tl_model_free(m);
    return st;
}

enum tl_status tl_quality_report(const struct tl_quality_params *p, struct tl_error *err)
{
    double before[TL_QUALITY_DEPTHS_MAX], after[TL_QUALITY_DEPTHS_MAX];
    char *text = NULL;
    size_t n_text = 0;
    TL_ASSERT(p->n_loops <= TL_QUALITY_DEPTHS_MAX);
    enum tl_status st = tl_file_read(&text, &n_text, p->text_path, TEXT_BYTES_MAX, err);
    if (st == TL_OK)
        st = measure(p->before, p, text, n_text, before, err);
    if (st == TL_OK)
        st = measure(p->after, p, text, n_text, after, err);
    if (st == TL_OK)
        printf("bits per byte of %s\n%5s %10s %10s %10s\n", p->text_path, "loops", "before", "after", "change");
    for (int i = 0; i < p->n_loops && st == TL_OK; i++)
        if (before[i] >= 0 && after[i] >= 0)
            printf("%5d %10.4f %10.4f %+10.4f\n", p->loops[i], before[i], after[i], after[i] - before[i]);
    tl_free(text);
    return st;
}
