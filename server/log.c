#include "log.h"

#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ids.h"

/* A burst of this many lines is written in full, then this many per second; errors always pass. */
#define LINES_BURST      2000.0
#define LINES_PER_SECOND 500.0

static struct {
    pthread_mutex_t lock;
    enum tl_log_level level;
    bool json;
    double credit, last;
    int64_t dropped;
} out = {.lock = PTHREAD_MUTEX_INITIALIZER, .level = TL_LOG_INFO, .credit = LINES_BURST};

static const char *const level_names[] = {"error", "warn", "info", "debug"};

void tl_log_setup(enum tl_log_level level, bool json)
{
    pthread_mutex_lock(&out.lock);
    out.level = level;
    out.json = json;
    pthread_mutex_unlock(&out.lock);
}

bool tl_log_on(enum tl_log_level level) { return level <= out.level; }

/* May this line go out? *dropped: lines lost since the last that did. */
static bool take_credit(enum tl_log_level level, int64_t *dropped)
{
    double now = tl_now_mono();
    pthread_mutex_lock(&out.lock);
    out.credit += (now - out.last) * LINES_PER_SECOND;
    if (out.credit > LINES_BURST)
        out.credit = LINES_BURST;
    out.last = now;
    bool ok = level == TL_LOG_ERROR || out.credit >= 1.0;
    if (ok) {
        out.credit -= 1.0;
        *dropped = out.dropped;
        out.dropped = 0;
    } else {
        out.dropped++;
    }
    pthread_mutex_unlock(&out.lock);
    return ok;
}

void tl_log_begin(struct tl_log_line *l, enum tl_log_level level, const char *msg)
{
    char when[40];
    double now = tl_now_wall();
    time_t seconds = (time_t)now;
    struct tm tm;
    gmtime_r(&seconds, &tm);
    size_t n = strftime(when, sizeof(when), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(when + n, sizeof(when) - n, ".%03dZ", (int)((now - (double)seconds) * 1000.0));
    memset(l, 0, sizeof(*l));
    l->level = level;
    l->w.b = &l->b;
    if (out.json) {
        tl_jw_obj(&l->w, NULL);
        tl_jw_str(&l->w, "time", when);
        tl_jw_str(&l->w, "level", level_names[level]);
        tl_jw_str(&l->w, "msg", msg);
    } else {
        tl_bytes_fmt(&l->b, "%s %-5s ", when, level_names[level]);
        tl_bytes_json(&l->b, msg, strlen(msg));
    }
}

void tl_log_str(struct tl_log_line *l, const char *key, const char *value)
{
    if (out.json) {
        tl_jw_str(&l->w, key, value);
        return;
    }
    bool quote = value[0] == '\0' || strpbrk(value, " =\"") != NULL;
    tl_bytes_fmt(&l->b, " %s=%s", key, quote ? "\"" : "");
    tl_bytes_json(&l->b, value, strlen(value));
    if (quote)
        tl_bytes_str(&l->b, "\"");
}

void tl_log_int(struct tl_log_line *l, const char *key, int64_t value)
{
    if (out.json)
        tl_jw_int(&l->w, key, value);
    else
        tl_bytes_fmt(&l->b, " %s=%lld", key, (long long)value);
}

void tl_log_num(struct tl_log_line *l, const char *key, double value)
{
    if (out.json)
        tl_jw_num(&l->w, key, value, 3);
    else
        tl_bytes_fmt(&l->b, " %s=%.3f", key, value);
}

void tl_log_end(struct tl_log_line *l)
{
    int64_t dropped = 0;
    if (tl_log_on(l->level) && take_credit(l->level, &dropped)) {
        if (dropped > 0)
            tl_log_int(l, "lines_dropped_before", dropped);
        if (out.json)
            tl_jw_obj_end(&l->w);
        tl_bytes_str(&l->b, "\n");
        if (!l->b.failed) {
            /* A log that cannot be written at once is lost, nothing else: nobody reading our pipe must not stop us. */
            struct pollfd can = {.fd = STDOUT_FILENO, .events = POLLOUT};
            if (poll(&can, 1, 0) == 1 && (can.revents & POLLOUT)) {
                ssize_t n = write(STDOUT_FILENO, l->b.data, l->b.n);
                (void)n;
            }
        }
    }
    tl_bytes_free(&l->b);
}

void tl_log(enum tl_log_level level, const char *fmt, ...)
{
    if (!tl_log_on(level))
        return;
    char msg[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    struct tl_log_line l;
    tl_log_begin(&l, level, msg);
    tl_log_end(&l);
}
