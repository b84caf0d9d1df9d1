/* engine/json.h - JSON files, read strictly: a damaged or hostile file is refused before anything looks at its values.
 *
 * Refused: more bytes, depth or values than allowed, bad UTF-8, NUL (raw or escaped), raw control characters, lone
 * surrogates, numbers outside the JSON grammar, duplicate keys, anything after the value. What passes becomes a cJSON tree
 * whose strings are whole and whose keys are unique.
 *
 * Values are read through a tl_json_reader: each getter names its key, checks kind and range, and the first mistake sticks,
 * so a loader reads all its keys and asks once, at the end. Thread: any. */
#ifndef TL_JSON_H
#define TL_JSON_H

#include "status.h"

struct cJSON;

#define TL_JSON_DEPTH_MAX  32
#define TL_JSON_VALUES_MAX (2 * 1000 * 1000)

/* Parse text[0..bytes); what names it in messages (a path). Owner: caller, tl_json_free().
 * Errors: TL_ERR_BAD_FILE, TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_json_parse(struct cJSON **out, const char *text, size_t bytes, const char *what,
                             struct tl_error *err);
void tl_json_free(struct cJSON *json); /* NULL is fine */

/* A whole file of at most bytes_max as NUL-terminated text. Owner: caller, tl_free(). Errors: also TL_ERR_IO;
 * TL_ERR_NOT_FOUND if there is no such file. */
enum tl_status tl_file_read(char **out, size_t *out_bytes, const char *path, size_t bytes_max, struct tl_error *err);

/* A value as the file has it, for a message; returns buf[n]. */
const char *tl_json_shown(const struct cJSON *v, char *buf, size_t n);

struct tl_json_reader {
    const struct cJSON *obj;
    const char *what; /* for messages: the file, perhaps with a path inside it */
    struct tl_error *err;
    enum tl_status st; /* TL_OK until a getter fails; its message is in err */
};

/* Start reading json, which must be an object (else the reader starts failed). */
void tl_json_reader_init(struct tl_json_reader *r, const struct cJSON *json, const char *what, struct tl_error *err);
/* Fail the reader about one key, unless it has failed before. */
void tl_json_fail(struct tl_json_reader *r, const char *key, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

bool tl_json_has(const struct tl_json_reader *r, const char *key);                  /* there, and not null */
const struct cJSON *tl_json_value(const struct tl_json_reader *r, const char *key); /* NULL if absent or null */
/* Required values; on failure 0, false, "". Ranges are inclusive. */
int64_t tl_json_int(struct tl_json_reader *r, const char *key, int64_t min, int64_t max);
double tl_json_num(struct tl_json_reader *r, const char *key, double min, double max);
bool tl_json_bool(struct tl_json_reader *r, const char *key);
const char *tl_json_str(struct tl_json_reader *r, const char *key);
/* The same with a value for "absent or null". */
int64_t tl_json_int_or(struct tl_json_reader *r, const char *key, int64_t min, int64_t max, int64_t otherwise);
double tl_json_num_or(struct tl_json_reader *r, const char *key, double min, double max, double otherwise);
bool tl_json_bool_or(struct tl_json_reader *r, const char *key, bool otherwise);
const char *tl_json_str_or(struct tl_json_reader *r, const char *key, const char *otherwise);
/* One of names[0..n): its index; -1 on failure. */
int tl_json_enum(struct tl_json_reader *r, const char *key, const char *const *names, int n);
/* Numbers of an array (or one bare number), at most n_max. Returns how many; 0 if absent. */
int tl_json_ints(struct tl_json_reader *r, const char *key, int64_t min, int64_t max, int64_t *out, int n_max);
/* A reader of the object under key; false if absent (or failed). */
bool tl_json_object(struct tl_json_reader *r, const char *key, struct tl_json_reader *out);

#endif
