#include "progress.h"

#include <stdio.h>
#include <unistd.h>

static int g_shown = -1; /* half percents on the screen; -1 = no bar */

void tl_progress_show(const char *what, double fraction)
{
    int now = (int)(fraction * 200), bars = now / 5;
    if (now == g_shown || !isatty(2))
        return;
    g_shown = now;
    fprintf(stderr, "\r\033[K%-12s [%.*s%*s] %3d %%", what, bars, "########################################", 40 - bars,
            "", now / 2);
    fflush(stderr);
}

void tl_progress_clear(void)
{
    if (g_shown >= 0)
        fprintf(stderr, "\r\033[K");
    g_shown = -1;
}
