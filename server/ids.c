#include "ids.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

double tl_now_mono(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

double tl_now_wall(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

/* One system call fills many ids: a health check must not cost one each. */
uint64_t tl_random64(void)
{
    static uint64_t pool[512];
    static size_t left;
    if (left == 0) {
        size_t have = 0;
        while (have < sizeof(pool)) {
            ssize_t n = getrandom((char *)pool + have, sizeof(pool) - have, 0);
            if (n > 0)
                have += (size_t)n;
        }
        left = sizeof(pool) / sizeof(pool[0]);
    }
    uint64_t v = pool[--left];
    pool[left] = 0;
    return v;
}

void tl_ulid(char out[TL_ULID_CHARS + 1])
{
    static const char alphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    uint64_t ms = (uint64_t)(tl_now_wall() * 1000.0), a = tl_random64(), b = tl_random64();
    for (int i = 9; i >= 0; i--, ms >>= 5)
        out[i] = alphabet[ms & 31];
    for (int i = 10; i < 18; i++, a >>= 5)
        out[i] = alphabet[a & 31];
    for (int i = 18; i < 26; i++, b >>= 5)
        out[i] = alphabet[b & 31];
    out[26] = '\0';
}

bool tl_request_id_ok(const char *s)
{
    size_t n = strlen(s);
    if (n == 0 || n > TL_REQUEST_ID_MAX)
        return false;
    for (size_t i = 0; i < n; i++) {
        char c = s[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || strchr("._:-", c)))
            return false;
    }
    return true;
}

static bool hex_field(const char *s, size_t n, bool *any)
{
    *any = false;
    for (size_t i = 0; i < n; i++) {
        if (!((s[i] >= '0' && s[i] <= '9') || (s[i] >= 'a' && s[i] <= 'f')))
            return false;
        if (s[i] != '0')
            *any = true;
    }
    return true;
}

bool tl_traceparent(const char *s, char trace_id[33], char parent_id[17])
{
    bool version, trace, parent, flags;
    size_t n = strlen(s);
    if (n < 55 || s[2] != '-' || s[35] != '-' || s[52] != '-')
        return false;
    if (!hex_field(s, 2, &version) || !hex_field(s + 3, 32, &trace) || !hex_field(s + 36, 16, &parent) ||
        !hex_field(s + 53, 2, &flags))
        return false;
    if (!trace || !parent || memcmp(s, "ff", 2) == 0 || (!version && n != 55))
        return false;
    memcpy(trace_id, s + 3, 32);
    trace_id[32] = '\0';
    memcpy(parent_id, s + 36, 16);
    parent_id[16] = '\0';
    return true;
}
