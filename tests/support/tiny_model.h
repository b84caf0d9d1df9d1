/* tests/support/tiny_model.h - a small random model for tests, made on the spot in a temporary directory. */
#ifndef TL_TINY_MODEL_H
#define TL_TINY_MODEL_H

#include "tinyloop.h"

/* Write a model of a synth preset ("tiny", "tiny-plain") with the given weights ("f32", "bf16", "int8", "int4") and return its
 * directory, NULL on failure. The directory goes when the process ends. */
const char *tiny_model_dir(const char *preset, const char *weights);

struct tiny {
    struct tl_model *m;
    struct tl_sched *s;
};
/* Open with a KV budget of `pages` pages (0 = plenty); ck_asserts on failure. */
void tiny_open(struct tiny *t, const char *dir, int pages);
void tiny_open_with(struct tiny *t, const struct tl_model_params *p, const struct tl_sched_params *sp);
struct tl_job *tiny_submit(struct tiny *t, const struct tl_request *r); /* ck_asserts on failure, as all of these */
bool tiny_step(struct tiny *t);                                         /* is there more to do? */
void tiny_run(struct tiny *t);                                          /* until nobody has anything to do */
/* Close; asserts that no KV memory is left in use or promised. */
void tiny_close(struct tiny *t);
uint64_t tiny_kv_used(const struct tiny *t);

#endif
