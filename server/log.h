/* server/log.h - one line per event, as text or JSON, one write each, rate-limited.
 *
 * Never holds prompts, outputs or keys. A log that cannot be written (full disk, closed pipe) is dropped and never stops
 * serving. Thread: any. */
#ifndef TL_SERVER_LOG_H
#define TL_SERVER_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "bytes.h"

enum tl_log_level { TL_LOG_ERROR, TL_LOG_WARN, TL_LOG_INFO, TL_LOG_DEBUG };

void tl_log_setup(enum tl_log_level level, bool json); /* lines go to standard output */
bool tl_log_on(enum tl_log_level level);
void tl_log(enum tl_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A line with fields: begin, add, end. */
struct tl_log_line {
    enum tl_log_level level;
    struct tl_bytes b;
    struct tl_jw w;
};
void tl_log_begin(struct tl_log_line *l, enum tl_log_level level, const char *msg);
void tl_log_str(struct tl_log_line *l, const char *key, const char *value);
void tl_log_int(struct tl_log_line *l, const char *key, int64_t value);
void tl_log_num(struct tl_log_line *l, const char *key, double value);
void tl_log_end(struct tl_log_line *l);

#endif
