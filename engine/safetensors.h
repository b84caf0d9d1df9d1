/* engine/safetensors.h - the tensors of a model directory, mapped and checked.
 *
 * Opens model.safetensors, or the shards that model.safetensors.index.json names, and maps them read-only. Before anything
 * is used, every header is checked with overflow-safe arithmetic: its length, every shape, that dtype x shape gives exactly
 * the bytes between the offsets, that the tensors fill the data section without overlap or hole, and that no name appears
 * twice. A tensor of an unknown dtype is an error only for whoever wants to use it.
 *
 * Data may lie unaligned. Nothing is copied; tl_tensors_drop() gives the pages of a tensor back after use.
 * Units: sizes and offsets are bytes. Thread: immutable after opening, any. */
#ifndef TL_SAFETENSORS_H
#define TL_SAFETENSORS_H

#include "status.h"

#define TL_TENSOR_DIMS_MAX   8
#define TL_TENSOR_HEADER_MAX (64u << 20)

enum tl_dtype { TL_DT_F32, TL_DT_BF16, TL_DT_F16, TL_DT_I8, TL_DT_U8, TL_DT_OTHER };

struct tl_tensor {
    const char *name;
    enum tl_dtype dtype;
    char dtype_name[16]; /* as the file says it */
    int n_dims;
    int64_t dim[TL_TENSOR_DIMS_MAX];
    int64_t n_elements;
    const uint8_t *data;
    size_t bytes;
    int file;      /* index of the shard */
    size_t offset; /* of data in the shard */
};

struct tl_tensors;

/* Owner: caller, tl_tensors_free(). Errors: TL_ERR_NOT_FOUND (no such file), TL_ERR_IO, TL_ERR_BAD_FILE (names the file,
 * the tensor and the numbers), TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_tensors_open(struct tl_tensors **out, const char *dir, struct tl_error *err);
/* The same over one file's bytes in memory, which must outlive *out. */
enum tl_status tl_tensors_open_bytes(struct tl_tensors **out, const uint8_t *bytes, size_t n_bytes,
                                     struct tl_error *err);
void tl_tensors_free(struct tl_tensors *ts); /* NULL is fine */

int tl_tensors_count(const struct tl_tensors *ts);
const struct tl_tensor *tl_tensors_at(const struct tl_tensors *ts, int i);              /* in order of name */
const struct tl_tensor *tl_tensors_find(const struct tl_tensors *ts, const char *name); /* NULL if there is none */
const char *tl_tensors_file(const struct tl_tensors *ts, int file); /* path of a shard, for messages */
uint64_t tl_tensors_file_bytes(const struct tl_tensors *ts);        /* of all shards */
/* Tell the system that the pages of t are not needed any more. They come back when read again. */
void tl_tensors_drop(const struct tl_tensors *ts, const struct tl_tensor *t);

/* "[out, in]" for messages. Returns buf. */
const char *tl_tensor_shape(const struct tl_tensor *t, char *buf, size_t n);

#endif
