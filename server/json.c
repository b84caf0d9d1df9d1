#include "json.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "http_status.h"
#include "prescan.h"

/* 80 bytes each once parsed; the longest prompt as ids and a batch of them fit. */
#define VALUES_MAX 400000

int tl_fields_open(struct tl_fields *f, const char *body, size_t bytes, struct tl_error *err)
{
    memset(f, 0, sizeof(*f));
    f->path = "";
    f->err = err;
    enum tl_status st = tl_prescan(body ? body : "", bytes, VALUES_MAX, err);
    if (st == TL_ERR_BAD_PARAM)
        err->status = (enum tl_status)TL_CODE_INVALID_JSON;
    if (st != TL_OK)
        return f->code = (int)err->status;
    f->obj = cJSON_ParseWithLength(body, bytes);
    if (!f->obj)
        f->code = (int)tl_fail(err, TL_ERR_NO_HOST_MEMORY, "No memory to read the body of %zu bytes.", bytes);
    return f->code;
}

void tl_fields_close(struct tl_fields *f)
{
    cJSON_Delete(f->obj);
    f->obj = NULL;
}

bool tl_field_fail(struct tl_fields *f, int code, const char *name, const char *fmt, ...)
{
    char msg[256], param[80];
    va_list ap;
    if (f->code)
        return false;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    snprintf(param, sizeof(param), "%s%s", f->path, name);
    f->code = tl_refuse(f->err, code, param, "%s %s", param, msg);
    return true;
}

struct cJSON *tl_field(const struct tl_fields *f, const char *name)
{
    cJSON *v = cJSON_GetObjectItemCaseSensitive(f->obj, name);
    return cJSON_IsNull(v) ? NULL : v;
}

bool tl_json_whole(const struct cJSON *v, int64_t min, int64_t max, int64_t *out)
{
    if (!cJSON_IsNumber(v))
        return false;
    double d = v->valuedouble;
    if (!(d >= -(double)TL_JSON_INT_MAX && d <= (double)TL_JSON_INT_MAX) || d != floor(d))
        return false;
    *out = (int64_t)d;
    return *out >= min && *out <= max;
}

int64_t tl_field_int(struct tl_fields *f, const char *name, int64_t min, int64_t max, int64_t otherwise)
{
    int64_t out = otherwise;
    const cJSON *v = tl_field(f, name);
    if (!v)
        return otherwise;
    if (!cJSON_IsNumber(v)) {
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be a whole number.");
    } else if (!tl_json_whole(v, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &out)) {
        bool whole = v->valuedouble == floor(v->valuedouble);
        tl_field_fail(f, whole ? TL_ERR_OUT_OF_RANGE : TL_CODE_INVALID_TYPE, name,
                      whole ? "must be %lld..%lld." : "must be a whole number (%lld..%lld).", (long long)min,
                      (long long)max);
    } else if (out < min || out > max) {
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, name, "is %lld; it must be %lld..%lld.", (long long)out, (long long)min,
                      (long long)max);
    }
    return f->code ? otherwise : out;
}

double tl_field_num(struct tl_fields *f, const char *name, double min, double max, double otherwise)
{
    const cJSON *v = tl_field(f, name);
    if (!v)
        return otherwise;
    if (!cJSON_IsNumber(v))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be a number.");
    else if (!(v->valuedouble >= min && v->valuedouble <= max))
        tl_field_fail(f, TL_ERR_OUT_OF_RANGE, name, "is %g; it must be %g..%g.", v->valuedouble, min, max);
    return f->code ? otherwise : v->valuedouble;
}

bool tl_field_bool(struct tl_fields *f, const char *name, bool otherwise)
{
    const cJSON *v = tl_field(f, name);
    if (!v)
        return otherwise;
    if (!cJSON_IsBool(v))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be true or false.");
    return f->code ? otherwise : cJSON_IsTrue(v);
}

const char *tl_field_str(struct tl_fields *f, const char *name, const char *otherwise)
{
    const cJSON *v = tl_field(f, name);
    if (!v)
        return otherwise;
    if (!cJSON_IsString(v))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be a string.");
    return f->code ? otherwise : v->valuestring;
}

bool tl_field_object(struct tl_fields *f, const char *name, const char *path, struct tl_fields *out)
{
    cJSON *v = tl_field(f, name);
    if (!v)
        return false;
    if (!cJSON_IsObject(v))
        tl_field_fail(f, TL_CODE_INVALID_TYPE, name, "must be an object.");
    if (f->code)
        return false;
    *out = (struct tl_fields){.obj = v, .path = path, .err = f->err};
    return true;
}

void tl_fields_only(struct tl_fields *f, const char *const *known)
{
    const cJSON *v;
    cJSON_ArrayForEach(v, f->obj)
    {
        const char *const *k = known;
        while (*k && strcmp(*k, v->string) != 0)
            k++;
        if (*k)
            continue;
        char name[40];
        snprintf(name, sizeof(name), "%.36s", v->string);
        tl_field_fail(f, TL_CODE_UNKNOWN_FIELD, name, "is no field of this request.");
        return;
    }
}

void tl_field_tokens(struct tl_fields *f, const char *name, const struct cJSON *array, int vocab_size, int32_t **ids,
                     int *n_ids)
{
    const cJSON *v;
    int n = cJSON_GetArraySize(array), i = 0;
    int64_t id;
    *ids = NULL;
    *n_ids = 0;
    int32_t *out = malloc((size_t)(n > 0 ? n : 1) * sizeof(*out));
    if (!out) {
        tl_field_fail(f, TL_ERR_NO_HOST_MEMORY, name, "does not fit into memory.");
        return;
    }
    cJSON_ArrayForEach(v, array)
    {
        if (!tl_json_whole(v, -TL_JSON_INT_MAX, TL_JSON_INT_MAX, &id)) {
            if (tl_field_fail(f, TL_CODE_INVALID_TOKEN, name, "holds something that is no token id, at index %d.", i))
                tl_error_num(f->err, "index", i);
            break;
        }
        if (id < 0 || id >= vocab_size) {
            if (tl_field_fail(f, TL_ERR_TOKEN_OUT_OF_VOCAB, name,
                              "holds token %lld at index %d; the vocabulary has %d.", (long long)id, i, vocab_size)) {
                tl_error_num(f->err, "index", i);
                tl_error_num(f->err, "value", id);
                tl_error_num(f->err, "vocab_size", vocab_size);
            }
            break;
        }
        out[i++] = (int32_t)id;
    }
    if (f->code) {
        free(out);
        return;
    }
    *ids = out;
    *n_ids = n;
}
