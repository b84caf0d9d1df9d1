/* engine/cli/progress.h - a progress bar on stderr, if that is a terminal. Thread: main. */
#ifndef TL_PROGRESS_H
#define TL_PROGRESS_H

/* Draw the bar for what is going on; fraction 0..1. Redraws at most 200 times on its way to 1. */
void tl_progress_show(const char *what, double fraction);
void tl_progress_clear(void); /* before other output */

#endif
