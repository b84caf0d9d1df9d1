/* server/json.h - request bodies as typed fields.
 *
 * Every getter names its field, checks type and range, and the first mistake sticks: a parser reads all it knows and asks
 * once, at the end. null counts as absent, as clients of this API expect. Thread: any. */
#ifndef TL_SERVER_JSON_H
#define TL_SERVER_JSON_H

#include "../engine/tinyloop.h"

struct cJSON;

#define TL_JSON_INT_MAX 9007199254740991 /* 2^53 - 1: beyond it a JSON number is not exact everywhere */

struct tl_fields {
    struct cJSON *obj;
    const char *path; /* in front of names in messages: "" or "stream_options." */
    struct tl_error *err;
    int code; /* 0 until something is wrong; then an enum tl_code, and err says what */
};

/* Scan and parse a body that must be one object. Owner: caller, tl_fields_close(). Returns 0 or the code. */
int tl_fields_open(struct tl_fields *f, const char *body, size_t bytes, struct tl_error *err);
void tl_fields_close(struct tl_fields *f);

/* The first mistake counts: true, and numbers may be added to it, if this is the first. */
bool tl_field_fail(struct tl_fields *f, int code, const char *name, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));
struct cJSON *tl_field(const struct tl_fields *f, const char *name); /* NULL if absent or null */
int64_t tl_field_int(struct tl_fields *f, const char *name, int64_t min, int64_t max, int64_t otherwise);
double tl_field_num(struct tl_fields *f, const char *name, double min, double max, double otherwise);
bool tl_field_bool(struct tl_fields *f, const char *name, bool otherwise);
const char *tl_field_str(struct tl_fields *f, const char *name, const char *otherwise);
/* The object under name as fields of its own (path must outlive it); false if absent or wrong. */
bool tl_field_object(struct tl_fields *f, const char *name, const char *path, struct tl_fields *out);
/* Refuse names that are not in the NULL-terminated list. */
void tl_fields_only(struct tl_fields *f, const char *const *known);

/* A whole number in [min, max]? For elements of arrays. */
bool tl_json_whole(const struct cJSON *v, int64_t min, int64_t max, int64_t *out);
/* An array of token ids, each below vocab_size. Owner: caller, free(). */
void tl_field_tokens(struct tl_fields *f, const char *name, const struct cJSON *array, int vocab_size, int32_t **ids,
                     int *n_ids);

#endif
