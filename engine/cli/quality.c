#include "quality.h"

#include "json.h"
#include "mem.h"
#include "progress.h"
#include "tinyloop.h"

#include <stdio.h>

#define TEXT_BYTES_MAX (64u << 20)

static enum tl_status report_depth(struct tl_model *before, struct tl_model *after, const char *text, size_t n_text,
                                   int loops, struct tl_error *err)
{
    struct tl_eval e;
    enum tl_status st = tl_eval_text(after, before, text, n_text, loops, &e, err);
    tl_progress_clear();
    if (st == TL_OK)
        printf("%5d %10.4f %10.4f %+10.4f %9.2f %% %12.3g\n", loops, e.ref_bits_per_byte, e.bits_per_byte,
               e.bits_per_byte - e.ref_bits_per_byte, e.top1_agreement * 100, e.kl);
    return st;
}

enum tl_status tl_quality_report(const struct tl_quality_params *p, struct tl_error *err)
{
    struct tl_model *before = NULL, *after = NULL;
    char *text = NULL;
    size_t n_text = 0;
    enum tl_status st = tl_file_read(&text, &n_text, p->text_path, TEXT_BYTES_MAX, err);

    TL_ASSERT(p->n_loops <= TL_QUALITY_DEPTHS_MAX);
    if (st == TL_OK)
        st = tl_model_open(&before, &(struct tl_model_params){.dir = p->before}, err);
    if (st == TL_OK)
        st = tl_model_open(&after, &(struct tl_model_params){.dir = p->after}, err);
    if (st == TL_OK)
        printf("text %s; bits per byte, agreement on the most likely token, KL divergence in nats per token\n%5s %10s "
               "%10s %10s %11s %12s\n",
               p->text_path, "loops", "before", "after", "change", "agreement", "divergence");
    for (int i = 0; i < p->n_loops && st == TL_OK; i++) {
        tl_progress_show("measuring", (double)i / p->n_loops);
        if (p->loops[i] <= tl_model_info(before)->max_loops && p->loops[i] <= tl_model_info(after)->max_loops)
            st = report_depth(before, after, text, n_text, p->loops[i], err);
    }
    tl_progress_clear();
    tl_model_free(after);
    tl_model_free(before);
    tl_free(text);
    return st;
}
