/* engine/tokenizer_utf8.h - the little that the tokenizer needs to know about UTF-8 and Unicode. Thread: any. */
#ifndef TL_TOKENIZER_UTF8_H
#define TL_TOKENIZER_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Length of the longest valid UTF-8 prefix of s[n] that ends at a character: n if all is valid. */
size_t tl_utf8_valid(const char *s, size_t n);

/* Feed one byte to a character that so far is held[n_held] (0..3 bytes, a valid beginning).
 * 1: the byte completes it. 0: it goes on. -1: held + byte can never become valid. */
int tl_utf8_step(const unsigned char *held, int n_held, unsigned char byte);

/* The character at s of text known to be valid; *len is its 1..4 bytes. */
uint32_t tl_utf8_get(const char *s, int *len);
int tl_utf8_put(uint32_t cp, char *s); /* returns the bytes written, 1..4 */

bool tl_unicode_is_space(uint32_t cp);   /* White_Space */
bool tl_unicode_is_word(uint32_t cp);    /* letters, marks, digits, connectors: \w of Unicode regular expressions */
bool tl_unicode_is_numeric(uint32_t cp); /* general category N */

#endif
