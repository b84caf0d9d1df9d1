#include "artifact.h"

#include "mem.h"
#include "quant.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PATH_BYTES 4096

struct tl_artifact {
    char dir[PATH_BYTES - 256]; /* the target */
    char tmp[PATH_BYTES - 128]; /* where it is made; empty once finished */
    int fd;                     /* model.safetensors in tmp */
    char *header;               /* JSON so far; NULL once written */
    size_t header_bytes, header_cap;
    uint64_t declared, written; /* bytes of tensor data */
};

static const struct {
    const char *name;
    int bytes;
} dtypes[] = {
    [TL_DT_F32] = {"F32", 4}, [TL_DT_BF16] = {"BF16", 2}, [TL_DT_F16] = {"F16", 2},
    [TL_DT_I8] = {"I8", 1},   [TL_DT_U8] = {"U8", 1},
};

/* ---- files ---- */

static enum tl_status write_all(int fd, const void *data, size_t bytes, const char *path, struct tl_error *err)
{
    const char *p = data;
    while (bytes) {
        ssize_t n = write(fd, p, bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return tl_fail_errno(err, "write", path, n < 0 ? errno : ENOSPC);
        p += n;
        bytes -= (size_t)n;
    }
    return TL_OK;
}

static enum tl_status check_target(const char *dir, struct tl_error *err)
{
    struct stat sb;
    if (lstat(dir, &sb) != 0)
        return errno == ENOENT ? TL_OK : tl_fail_errno(err, "look at", dir, errno);
    DIR *d = S_ISDIR(sb.st_mode) ? opendir(dir) : NULL;
    int n = 0;
    if (d) {
        while (readdir(d))
            n++;
        closedir(d);
    }
    return n == 2 ? TL_OK : tl_fail(err, TL_ERR_BAD_PARAM, "'%s' exists already", dir); /* "." and ".." */
}

enum tl_status tl_artifact_create(struct tl_artifact **out, const char *dir, struct tl_error *err)
{
    enum tl_status st;
    struct tl_artifact *a = NULL;
    size_t n = strlen(dir);
    char path[PATH_BYTES];
    *out = NULL;
    while (n > 1 && dir[n - 1] == '/')
        n--;
    if (n == 0 || n >= sizeof(a->dir))
        return tl_fail(err, TL_ERR_BAD_PARAM, "the output directory's name has %zu characters, allowed are 1 to %zu", n,
                       sizeof(a->dir) - 1);
    a = tl_calloc(1, sizeof(*a));
    if (!a)
        return tl_fail_host_memory(err, sizeof(*a));
    a->fd = -1;
    memcpy(a->dir, dir, n);
    st = check_target(a->dir, err);
    if (st != TL_OK)
        goto out;
    snprintf(a->tmp, sizeof(a->tmp), "%s.tmp-XXXXXX", a->dir);
    if (!mkdtemp(a->tmp)) {
        st = tl_fail_errno(err, "make a directory beside", a->dir, errno);
        a->tmp[0] = 0;
        goto out;
    }
    snprintf(path, sizeof(path), "%s/model.safetensors", a->tmp);
    a->fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (a->fd < 0) {
        st = tl_fail_errno(err, "create", path, errno);
        goto out;
    }
    a->header_cap = 4096;
    a->header = tl_malloc(a->header_cap);
    if (!a->header) {
        st = tl_fail_host_memory(err, a->header_cap);
        goto out;
    }
    a->header_bytes = (size_t)snprintf(a->header, a->header_cap, "{\"__metadata__\":{\"format\":\"pt\"}");
    *out = a;
    a = NULL;
out:
    tl_artifact_free(a);
    return st;
}

void tl_artifact_free(struct tl_artifact *a)
{
    if (!a)
        return;
    if (a->fd >= 0)
        close(a->fd);
    DIR *d = a->tmp[0] ? opendir(a->tmp) : NULL;
    if (d) {
        for (struct dirent *e; (e = readdir(d));)
            (void)unlinkat(dirfd(d), e->d_name, 0); /* "." and ".." refuse */
        closedir(d);
        (void)rmdir(a->tmp);
    }
    tl_free(a->header);
    tl_free(a);
}

static bool plain(const char *name)
{
    for (; *name; name++)
        if (*name < 0x20 || *name == '"' || *name == '\\' || *name > 0x7E)
            return false;
    return true;
}

enum tl_status tl_artifact_declare(struct tl_artifact *a, const char *name, enum tl_dtype dtype, int n_dims,
                                   const int64_t *dims, struct tl_error *err)
{
    int64_t bytes = dtypes[dtype].bytes;
    size_t len = strlen(name);
    TL_ASSERT(a->header && dtype < TL_DT_OTHER && plain(name));
    if (a->header_cap - a->header_bytes < len + 300) {
        size_t cap = 2 * a->header_cap + len + 300;
        char *grown = tl_realloc(a->header, cap);
        if (!grown)
            return tl_fail_host_memory(err, cap);
        a->header = grown;
        a->header_cap = cap;
    }
    char *p = a->header + a->header_bytes;
    size_t room = a->header_cap - a->header_bytes, n = 0;
    n += (size_t)snprintf(p + n, room - n, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtypes[dtype].name);
    for (int i = 0; i < n_dims; i++) {
        if (dims[i] < 0 || __builtin_mul_overflow(bytes, dims[i], &bytes))
            return tl_fail(err, TL_ERR_BAD_PARAM, "tensor '%s' would have more than 2^63 bytes", name);
        n += (size_t)snprintf(p + n, room - n, "%s%lld", i ? "," : "", (long long)dims[i]);
    }
    n += (size_t)snprintf(p + n, room - n, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)a->declared,
                          (unsigned long long)a->declared + (unsigned long long)bytes);
    TL_ASSERT(n < room);
    a->header_bytes += n;
    a->declared += (uint64_t)bytes;
    return TL_OK;
}

/* The first write ends the header: padded with blanks, so that tensors begin at a multiple of 64 bytes. */
static enum tl_status end_header(struct tl_artifact *a, struct tl_error *err)
{
    uint64_t n = (8 + a->header_bytes + 1 + 63) / 64 * 64 - 8;
    uint8_t length[8];
    enum tl_status st;
    char *grown = tl_realloc(a->header, n);
    if (!grown)
        return tl_fail_host_memory(err, n);
    a->header = grown;
    memset(a->header + a->header_bytes, ' ', n - a->header_bytes);
    a->header[a->header_bytes] = '}';
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(n >> (8 * i));
    st = write_all(a->fd, length, 8, "model.safetensors", err);
    if (st == TL_OK)
        st = write_all(a->fd, a->header, n, "model.safetensors", err);
    tl_free(a->header);
    a->header = NULL;
    return st;
}

enum tl_status tl_artifact_write(struct tl_artifact *a, const void *data, size_t bytes, struct tl_error *err)
{
    enum tl_status st = a->header ? end_header(a, err) : TL_OK;
    if (st != TL_OK)
        return st;
    if (bytes > a->declared - a->written)
        return tl_fail(err, TL_ERR_INTERNAL,
                       "%zu bytes of tensors were written, but only %llu are left of those declared", bytes,
                       (unsigned long long)(a->declared - a->written));
    a->written += bytes;
    return write_all(a->fd, data, bytes, "model.safetensors", err);
}

enum tl_status tl_artifact_put_file(struct tl_artifact *a, const char *name, const void *data, size_t bytes,
                                    struct tl_error *err)
{
    char path[PATH_BYTES + 256];
    snprintf(path, sizeof(path), "%s/%s", a->tmp, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (fd < 0)
        return tl_fail_errno(err, "create", path, errno);
    enum tl_status st = write_all(fd, data, bytes, path, err);
    if (st == TL_OK && fsync(fd) != 0)
        st = tl_fail_errno(err, "flush", path, errno);
    close(fd);
    return st;
}

enum tl_status tl_artifact_copy_file(struct tl_artifact *a, const char *from_dir, const char *name,
                                     struct tl_error *err)
{
    char path[PATH_BYTES], *text = NULL;
    size_t n = 0;
    if ((size_t)snprintf(path, sizeof(path), "%s/%s", from_dir, name) >= sizeof(path))
        return tl_fail(err, TL_ERR_BAD_PARAM, "the directory name has %zu characters, allowed are %d", strlen(from_dir),
                       PATH_BYTES - 256);
    enum tl_status st = tl_file_read(&text, &n, path, 256u << 20, err);
    if (st == TL_ERR_NOT_FOUND)
        return TL_OK;
    if (st == TL_OK)
        st = tl_artifact_put_file(a, name, text, n, err);
    tl_free(text);
    return st;
}

uint64_t tl_artifact_bytes(const struct tl_artifact *a) { return a->declared; }

/* A rename is durable once the directory that holds the name is on disk. */
static void flush_parent(const char *dir)
{
    char parent[PATH_BYTES];
    const char *slash = strrchr(dir, '/');
    snprintf(parent, sizeof(parent), "%.*s", slash ? (int)(slash - dir) + 1 : 1, slash ? dir : ".");
    int fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
}

enum tl_status tl_artifact_finish(struct tl_artifact *a, struct tl_error *err)
{
    enum tl_status st = a->header ? end_header(a, err) : TL_OK;
    if (st == TL_OK && a->written != a->declared)
        st = tl_fail(err, TL_ERR_INTERNAL, "%llu bytes of tensors were written, but %llu declared",
                     (unsigned long long)a->written, (unsigned long long)a->declared);
    if (st == TL_OK && fsync(a->fd) != 0)
        st = tl_fail_errno(err, "flush", a->tmp, errno);
    if (st == TL_OK && chmod(a->tmp, 0755) != 0)
        st = tl_fail_errno(err, "open up", a->tmp, errno);
    if (st == TL_OK && rename(a->tmp, a->dir) != 0)
        st = tl_fail_errno(err, "move the finished artifact to", a->dir, errno);
    if (st != TL_OK)
        return st;
    a->tmp[0] = 0;
    flush_parent(a->dir);
    return TL_OK;
}

/* ---- weights as tensors ---- */

static void add_pieces(struct tl_piece *out, int *n, const struct tl_arch *layout, const struct tl_arch_spec *s,
                       enum tl_weight w, int layer)
{
    struct tl_weight_shape shape = tl_weight_shape(s, w);
    bool fused = tl_arch_fuses(layout, w);
    int64_t row = 0, all = 0;
    if (!tl_weight_needed(s, w, layer) || (w == TL_WT_CODA_NORM && s->c2c_is_final_norm))
        return;
    for (int i = 0; i < shape.n_parts; i++)
        all += shape.rows[i];
    for (int i = 0; i < (fused ? 1 : shape.n_parts); i++) {
        struct tl_piece *p = &out[(*n)++];
        memset(p, 0, sizeof(*p));
        p->weight = w;
        p->layer = layer;
        p->row = row;
        p->rows = fused ? all : shape.rows[i];
        p->n_in = shape.n_in;
        tl_arch_tensor_name(layout, s, w, layer, i, p->name, sizeof(p->name));
        row += p->rows;
    }
}

enum tl_status tl_pieces_list(struct tl_piece **out, int *n_out, const struct tl_arch *layout,
                              const struct tl_arch_spec *s, tl_choose_wtype *choose, void *arg, struct tl_error *err)
{
    int n_layers = tl_n_layers(s), n = 0;
    size_t cap = ((size_t)n_layers * TL_WT_LAYER_COUNT + TL_WT_COUNT) * 3;
    struct tl_piece *p = tl_array(cap, sizeof(*p));
    *out = NULL;
    if (!p)
        return tl_fail_host_memory(err, cap * sizeof(*p));
    add_pieces(p, &n, layout, s, TL_WT_EMBED, -1);
    for (int layer = 0; layer < n_layers; layer++)
        for (int w = 0; w < TL_WT_LAYER_COUNT; w++)
            add_pieces(p, &n, layout, s, (enum tl_weight)w, layer);
    for (int w = TL_WT_EMBED + 1; w < TL_WT_COUNT; w++)
        add_pieces(p, &n, layout, s, (enum tl_weight)w, -1);
    for (int i = 0; i < n; i++)
        if (p[i].n_in)
            p[i].wtype = choose(arg, &p[i]);
    *out = p;
    *n_out = n;
    return TL_OK;
}

enum tl_status tl_artifact_declare_piece(struct tl_artifact *a, const struct tl_piece *p, struct tl_error *err)
{
    char name[160];
    int64_t dims[2] = {p->rows, p->n_in};
    enum tl_dtype dtype = p->wtype == TL_W_INT8 ? TL_DT_I8 : p->wtype == TL_W_BF16 ? TL_DT_BF16 : TL_DT_F32;
    enum tl_status st;
    if (!p->n_in)
        return tl_artifact_declare(a, p->name, TL_DT_F32, 1, dims, err);
    if (p->wtype != TL_W_INT4) {
        st = tl_artifact_declare(a, p->name, dtype, 2, dims, err);
    } else {
        dims[1] = (int64_t)tl_q4_row_bytes(p->n_in);
        snprintf(name, sizeof(name), "%s_q4", p->name);
        st = tl_artifact_declare(a, name, TL_DT_U8, 2, dims, err);
        dims[1] = (int64_t)tl_q4_gscale_bytes(p->n_in);
        snprintf(name, sizeof(name), "%s_gscale", p->name);
        if (st == TL_OK)
            st = tl_artifact_declare(a, name, TL_DT_U8, 2, dims, err);
    }
    snprintf(name, sizeof(name), "%s_scale", p->name);
    if (st == TL_OK && p->wtype >= TL_W_INT8)
        st = tl_artifact_declare(a, name, TL_DT_F32, 1, dims, err);
    return st;
}

uint64_t tl_piece_bytes(const struct tl_piece *p)
{
    uint64_t rows = (uint64_t)p->rows, n = rows * (uint64_t)p->n_in;
    if (!p->n_in)
        return 4 * rows;
    switch (p->wtype) {
    case TL_W_F32: return 4 * n;
    case TL_W_BF16: return 2 * n;
    case TL_W_INT8: return n + 4 * rows;
    default: return rows * (tl_q4_row_bytes(p->n_in) + tl_q4_gscale_bytes(p->n_in) + 4);
    }
}
