/* server/config.h - every setting of the daemon, in one option table.
 *
 * A setting has one name: key `max_body_bytes` of a section in the file, TINYLOOP_MAX_BODY_BYTES in the environment,
 * --max-body-bytes on the command line. A later source wins: default < file < environment < flag. What is unknown, twice,
 * or out of range is an error with its place. Thread: main, before the others start; immutable afterwards. */
#ifndef TL_SERVER_CONFIG_H
#define TL_SERVER_CONFIG_H

#include <stdio.h>

#include "../engine/tinyloop.h"

struct tl_config {
    /* [server] */
    char *host, *admin_host, *api_keys, *allowed_hosts, *cors_origins, *state_dir, *boot_manifest;
    int64_t port, admin_port;
    bool insecure, half_close_cancels;
    /* [model] */
    char *model, *model_name, *device;
    int64_t threads, memory_bytes, max_seq_len, max_loops, step_rows, start_seed;
    bool random_start_state;
    /* [limits] */
    int64_t max_connections, max_body_bytes, max_bodies_bytes, connection_bytes, max_running, max_waiting,
        max_waiting_tokens, max_choices;
    int64_t max_prompt_bytes_inline, outbox_bytes;
    /* [reuse] */
    int64_t max_entries, tenant_entries, tenant_bytes, gone_entries, pool_capacity, pool_bytes, default_ttl_seconds;
    bool pool_auto, rebuild_at_start;
    /* [limits], continued */
    double header_seconds, body_seconds, idle_seconds, slow_reader_seconds, request_seconds;
    /* [stream] */
    double stream_hold_seconds, ping_seconds;
    bool stream_timestamps;
    /* [process] */
    double shutdown_timeout, worker_stall_seconds;
    char *log_level, *log_format;
    bool log_health;
};

enum tl_config_action { TL_RUN, TL_SHOW_HELP, TL_SHOW_VERSION, TL_CHECK_CONFIG, TL_PRINT_CONFIG, TL_HEALTHCHECK };

/* Read all sources. Owner: the caller, tl_config_clear() (also after an error).
 * Errors: TL_ERR_BAD_PARAM and others; the message says where (file:line, variable or flag). */
enum tl_status tl_config_read(struct tl_config *c, int argc, char **argv, char **envp, enum tl_config_action *action,
                              struct tl_error *err);
void tl_config_clear(struct tl_config *c);

void tl_config_help(FILE *f);                             /* the flags with their meaning and defaults */
void tl_config_print(const struct tl_config *c, FILE *f); /* as a file that reads back to the same */

/* The rows of the option table and the flags that are no settings, for the manual. False past the end. */
struct tl_config_option {
    const char *section, *key, *otherwise, *choices, *help;
    const char *value; /* word for it: TEXT, WORD, N, BYTES, SECONDS; NULL = true or false */
    double min, max;   /* of a number; both 0 = none */
};
bool tl_config_option_at(size_t i, struct tl_config_option *out);
bool tl_config_action_at(size_t i, const char **flag, const char **help);

/* One source at a time, for tests: defaults, then the text of a file (name for messages). */
enum tl_status tl_config_defaults(struct tl_config *c, struct tl_error *err);
enum tl_status tl_config_file_text(struct tl_config *c, const char *text, size_t bytes, const char *name,
                                   struct tl_error *err);

#endif
