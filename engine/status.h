/* engine/status.h - every way in which a call can end, and the sentence that says why.
 *
 * A command returns enum tl_status; TL_OK is 0. The name beside a status is the error code that a client sees.
 * Nothing here aborts: a caller's mistake, a refusing world (memory, device, file) and an internal fault are all
 * answers. TL_ASSERT is for broken invariants alone, which no file, flag or request can reach.
 * Thread: any. */
#ifndef TL_STATUS_H
#define TL_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TL_STATUS_MAP(X)                                                                                               \
    X(TL_ERR_BAD_PARAM, "bad_param")                                                                                   \
    X(TL_ERR_OUT_OF_RANGE, "out_of_range")                                                                             \
    X(TL_ERR_EMPTY_PROMPT, "empty_prompt")                                                                             \
    X(TL_ERR_TOKEN_OUT_OF_VOCAB, "token_out_of_vocab")                                                                 \
    X(TL_ERR_CONTEXT_LENGTH, "context_length_exceeded")                                                                \
    X(TL_ERR_LOOPS_RANGE, "loops_out_of_range")                                                                        \
    X(TL_ERR_LOOP_DEPTH, "loop_depth_mismatch")                                                                        \
    X(TL_ERR_LOOPS_USED_RANGE, "loops_used_out_of_range")                                                              \
    X(TL_ERR_MAX_LOOPS, "max_loops_exceeded")                                                                          \
    X(TL_ERR_RESUME_DEPTH, "resume_depth_out_of_range")                                                                \
    X(TL_ERR_DECODE_DEPTH, "decode_depth_unpopulated")                                                                 \
    X(TL_ERR_WINDOW_RANGE, "cache_window_out_of_range")                                                                \
    X(TL_ERR_WINDOW_MISMATCH, "cache_window_mismatch")                                                                 \
    X(TL_ERR_MODEL_MISMATCH, "model_mismatch")                                                                         \
    X(TL_ERR_NO_POOL_MATCH, "no_pool_match")                                                                           \
    X(TL_ERR_EXCEEDS_MEMORY, "request_exceeds_memory")                                                                 \
    X(TL_ERR_NO_DEVICE_MEMORY, "out_of_device_memory")                                                                 \
    X(TL_ERR_NO_HOST_MEMORY, "out_of_host_memory")                                                                     \
    X(TL_ERR_OVERLOADED, "server_overloaded")                                                                          \
    X(TL_ERR_CANCELLED, "request_cancelled")                                                                           \
    X(TL_ERR_NON_FINITE, "non_finite_logits")                                                                          \
    X(TL_ERR_NOT_FOUND, "not_found")                                                                                   \
    X(TL_ERR_BAD_FILE, "bad_file")                                                                                     \
    X(TL_ERR_UNSUPPORTED, "unsupported")                                                                               \
    X(TL_ERR_IO, "io_error")                                                                                           \
    X(TL_ERR_DEVICE, "gpu_failed")                                                                                     \
    X(TL_ERR_INVALID_GRAMMAR, "invalid_grammar")                                                                       \
    X(TL_ERR_UNSUPPORTED_SCHEMA, "unsupported_schema")                                                                 \
    X(TL_ERR_GRAMMAR_PREFIX_CONFLICT, "grammar_prefix_conflict")                                                       \
    X(TL_ERR_GRAMMAR_NO_CONTINUATION, "grammar_no_continuation")                                                       \
    X(TL_ERR_INTERNAL, "internal_error")

#define X(code, name) code,
enum tl_status { TL_OK = 0, TL_STATUS_MAP(X) TL_STATUS_COUNT };
#undef X

#define TL_ERROR_NUMS 4

/* One sentence, the field it is about ("" if none) and the numbers that disagree. */
struct tl_error {
    enum tl_status status;
    char msg[320];
    char param[48];
    int n_nums;
    struct {
        const char *key; /* static string: becomes a key of the error's details */
        int64_t value;
    } num[TL_ERROR_NUMS];
};

/* The code of a status, e.g. "loop_depth_mismatch"; "ok" for TL_OK. Never NULL. */
const char *tl_status_name(enum tl_status st);

/* Fill *err (which may be NULL) with a formatted sentence and return st. Resets param and numbers. */
enum tl_status tl_fail(struct tl_error *err, enum tl_status st, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* Name the field / add a number to an error filled by tl_fail. err may be NULL; more than TL_ERROR_NUMS are dropped. */
void tl_error_param(struct tl_error *err, const char *param);
void tl_error_num(struct tl_error *err, const char *key, int64_t value);

/* The two errors that need no thought. */
enum tl_status tl_fail_host_memory(struct tl_error *err, size_t bytes);
enum tl_status tl_fail_errno(struct tl_error *err, const char *what, const char *path, int errnum);

void tl_assert_failed(const char *expr, const char *file, int line) __attribute__((noreturn));
#define TL_ASSERT(e) ((e) ? (void)0 : tl_assert_failed(#e, __FILE__, __LINE__))

#endif
