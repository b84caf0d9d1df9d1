#include "temp_dir.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void must(int ok, const char *what)
{
    if (ok)
        return;
    perror(what);
    abort();
}

void temp_dir_make(char path[TEMP_PATH])
{
    const char *base = getenv("TMPDIR");
    snprintf(path, TEMP_PATH, "%s/tinyloop-test-XXXXXX", base ? base : "/tmp");
    must(mkdtemp(path) != NULL, "mkdtemp");
}

static int remove_one(const char *path, const struct stat *sb, int kind, struct FTW *at)
{
    (void)sb;
    (void)kind;
    (void)at;
    return remove(path);
}

void temp_dir_remove(const char *path) { (void)nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS); }

void temp_file(const char *dir, const char *name, const void *data, size_t bytes)
{
    char path[2 * TEMP_PATH];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    must(f != NULL, path);
    must(fwrite(data, 1, bytes, f) == bytes && fclose(f) == 0, path);
}

uint8_t *make_safetensors(const char *header, const void *data, size_t n_data, size_t *bytes)
{
    size_t n = strlen(header);
    uint8_t *file = calloc(1, 8 + n + n_data + 1);
    must(file != NULL, "calloc");
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(file + 8, header, n);
    if (data)
        memcpy(file + 8 + n, data, n_data);
    *bytes = 8 + n + n_data;
    return file;
}

void temp_safetensors(const char *dir, const char *name, const char *header, const void *data, size_t n_data)
{
    size_t bytes;
    uint8_t *file = make_safetensors(header, data, n_data, &bytes);
    temp_file(dir, name, file, bytes);
    free(file);
}

char *read_text(const char *dir, const char *name, size_t *bytes)
{
    char path[2 * TEMP_PATH];
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    must(f != NULL, path);
    must(fseek(f, 0, SEEK_END) == 0, path);
    long n = ftell(f);
    must(n >= 0 && fseek(f, 0, SEEK_SET) == 0, path);
    char *text = malloc((size_t)n + 1);
    must(text != NULL && fread(text, 1, (size_t)n, f) == (size_t)n, path);
    text[n] = 0;
    fclose(f);
    *bytes = (size_t)n;
    return text;
}
