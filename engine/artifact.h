/* engine/artifact.h - writing a model directory: all of it or nothing.
 *
 * Everything goes to a temporary directory beside the target; tl_artifact_finish() flushes it to disk and renames it. Tensors are
 * declared first, which fixes the header, and then streamed in the order of declaration, so memory does not grow with the model.
 *
 *   create -> declare ... -> write ... (and put_file, copy_file at any time) -> finish -> free
 *
 * Thread: one per artifact. */
#ifndef TL_ARTIFACT_H
#define TL_ARTIFACT_H

#include "arch_bind.h"

struct tl_artifact;

/* dir must not exist yet, or be empty. Owner: caller, tl_artifact_free(). Errors: TL_ERR_IO, TL_ERR_BAD_PARAM,
 * TL_ERR_NO_HOST_MEMORY. */
enum tl_status tl_artifact_create(struct tl_artifact **out, const char *dir, struct tl_error *err);
void tl_artifact_free(struct tl_artifact *a); /* removes what was not finished. NULL is fine */

enum tl_status tl_artifact_declare(struct tl_artifact *a, const char *name, enum tl_dtype dtype, int n_dims,
                                   const int64_t *dims, struct tl_error *err);
/* The next bytes of the tensors, in order of declaration; pieces may be of any size. */
enum tl_status tl_artifact_write(struct tl_artifact *a, const void *data, size_t bytes, struct tl_error *err);
enum tl_status tl_artifact_put_file(struct tl_artifact *a, const char *name, const void *data, size_t bytes,
                                    struct tl_error *err);
/* Copy from_dir/name if it is there. */
enum tl_status tl_artifact_copy_file(struct tl_artifact *a, const char *from_dir, const char *name,
                                     struct tl_error *err);
uint64_t tl_artifact_bytes(const struct tl_artifact *a); /* of all declared tensors */
/* Errors also TL_ERR_INTERNAL if bytes are missing. */
enum tl_status tl_artifact_finish(struct tl_artifact *a, struct tl_error *err);

/* ---- weights as tensors ---- */

/* One stored piece of a weight: a part of it, or all of it where the layout fuses its parts. */
struct tl_piece {
    enum tl_weight weight;
    int layer;
    char name[128];
    int64_t row;         /* of the weight, where the piece begins */
    int64_t rows, n_in;  /* n_in 0 = vector */
    enum tl_wtype wtype; /* matrices */
};

/* How a matrix is stored; called once per piece with its name and width. */
typedef enum tl_wtype tl_choose_wtype(void *arg, const struct tl_piece *p);
/* All pieces of a model of this spec under a layout's names, in a sensible order. Owner: caller, tl_free(*out). */
enum tl_status tl_pieces_list(struct tl_piece **out, int *n_out, const struct tl_arch *layout,
                              const struct tl_arch_spec *s, tl_choose_wtype *choose, void *arg, struct tl_error *err);
/* Declare the tensors of a piece: X, or X_q4 / X, X_gscale and X_scale. */
enum tl_status tl_artifact_declare_piece(struct tl_artifact *a, const struct tl_piece *p, struct tl_error *err);
uint64_t tl_piece_bytes(const struct tl_piece *p);

#endif
