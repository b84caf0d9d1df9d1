#include "tokenizer_utf8.h"

#include <utf8proc.h>

int tl_utf8_step(const unsigned char *held, int n_held, unsigned char byte)
{
    unsigned char lead, lo = 0x80, hi = 0xBF;
    int need;
    if (n_held == 0) {
        if (byte < 0x80)
            return 1;
        return byte >= 0xC2 && byte <= 0xF4 ? 0 : -1;
    }
    lead = held[0];
    need = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (n_held == 1) {
        /* No overlong forms, no surrogates, nothing above U+10FFFF: all decided by the second byte. */
        lo = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        hi = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    }
    if (byte < lo || byte > hi)
        return -1;
    return n_held + 1 == need;
}

size_t tl_utf8_valid(const char *s, size_t n)
{
    const unsigned char *u = (const unsigned char *)s;
    size_t i = 0;
    while (i < n) {
        int held = 0, r = 0;
        if (u[i] < 0x80) {
            i++;
            continue;
        }
        while (i + (size_t)held < n && (r = tl_utf8_step(u + i, held, u[i + (size_t)held])) == 0)
            held++;
        if (r != 1)
            return i;
        i += (size_t)held + 1;
    }
    return n;
}

uint32_t tl_utf8_get(const char *s, int *len)
{
    const unsigned char *u = (const unsigned char *)s;
    if (u[0] < 0x80) {
        *len = 1;
        return u[0];
    }
    if (u[0] < 0xE0) {
        *len = 2;
        return (u[0] & 0x1Fu) << 6 | (u[1] & 0x3Fu);
    }
    if (u[0] < 0xF0) {
        *len = 3;
        return (u[0] & 0x0Fu) << 12 | (u[1] & 0x3Fu) << 6 | (u[2] & 0x3Fu);
    }
    *len = 4;
    return (u[0] & 0x07u) << 18 | (u[1] & 0x3Fu) << 12 | (u[2] & 0x3Fu) << 6 | (u[3] & 0x3Fu);
}

int tl_utf8_put(uint32_t cp, char *s) { return (int)utf8proc_encode_char((utf8proc_int32_t)cp, (utf8proc_uint8_t *)s); }

bool tl_unicode_is_space(uint32_t cp)
{
    if (cp < 0x80)
        return cp == ' ' || (cp >= 9 && cp <= 13);
    if (cp == 0x85)
        return true;
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP: return true;
    default: return false;
    }
}

bool tl_unicode_is_word(uint32_t cp)
{
    /* Circled and squared letters count as alphabetic although their category is "other symbol". */
    if ((cp >= 0x24B6 && cp <= 0x24E9) || (cp >= 0x1F130 && cp <= 0x1F149) || (cp >= 0x1F150 && cp <= 0x1F169) ||
        (cp >= 0x1F170 && cp <= 0x1F189))
        return true;
    if (cp == 0x200C || cp == 0x200D)
        return true;
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC: return true;
    default: return false;
    }
}

bool tl_unicode_is_numeric(uint32_t cp)
{
    switch (utf8proc_category((utf8proc_int32_t)cp)) {
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO: return true;
    default: return false;
    }
}
