/* tests/support/temp_dir.h - a directory for one test, and files in it. Failures abort the test program. */
#ifndef TEMP_DIR_H
#define TEMP_DIR_H

#include <stddef.h>
#include <stdint.h>

#define TEMP_PATH 512

void temp_dir_make(char path[TEMP_PATH]);
void temp_dir_remove(const char *path); /* with everything in it */
void temp_file(const char *dir, const char *name, const void *data, size_t bytes);
/* A safetensors file: the header's text, then n_data bytes (zeros if data is NULL). */
void temp_safetensors(const char *dir, const char *name, const char *header, const void *data, size_t n_data);
/* The same in memory; release with free(). */
uint8_t *make_safetensors(const char *header, const void *data, size_t n_data, size_t *bytes);
char *read_text(const char *dir, const char *name, size_t *bytes); /* release with free() */

#endif
