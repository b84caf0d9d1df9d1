/* server/prescan.h - the strict look at a request body before any JSON library sees it.
 *
 * Accepts exactly RFC 8259 with one object at the top and nothing but white space around it, and beyond that refuses what
 * would be read differently by different parsers: bytes that are not UTF-8, NUL (raw or escaped), lone surrogates, endless numbers,
 * duplicate keys (compared after unescaping), more depth or values than allowed. Numbers too large for a double pass: the
 * typed getters refuse them by name.
 * Iterative: its stack use does not depend on the input. Thread: any. */
#ifndef TL_SERVER_PRESCAN_H
#define TL_SERVER_PRESCAN_H

#include "../engine/tinyloop.h"

#define TL_PRESCAN_DEPTH_MAX 32

/* Errors: TL_ERR_BAD_PARAM with a sentence and the byte offset; TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_prescan(const char *text, size_t bytes, size_t values_max, struct tl_error *err);

#endif
