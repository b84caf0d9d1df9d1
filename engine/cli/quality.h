/* engine/cli/quality.h - what a conversion costs, measured on text. Thread: main. */
#ifndef TL_QUALITY_H
#define TL_QUALITY_H

#include "status.h"

#define TL_QUALITY_DEPTHS_MAX 16

struct tl_quality_params {
    const char *before, *after; /* model directories */
    const char *text_path;
    const int *loops; /* depths; those that the model does not have are left out */
    int n_loops;
};

/* Print bits per byte of the text under both models at every depth, how often they would choose the same token, and the mean KL
 * divergence. Both are loaded at once. */
enum tl_status tl_quality_report(const struct tl_quality_params *p, struct tl_error *err);

#endif
