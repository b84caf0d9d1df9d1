/* server/boot_manifest.h - named entries that stand before the server is ready.
 *
 * A file with a JSON list. Each element is the body of a creation request, read by the same parser, and three fields that
 * such a request has elsewhere:
 *
 *   [{"kind": "prefix_cache", "id": "rules", "tenant": "acme", "prompt": "Answer in one word.", "loops": 8}, ...]
 *
 * kind is prefix_cache, resume_handle or pool_entry; tenant is that of an API key, absent without keys. Entries never expire
 * unless they say so. The file is the truth about them: they are made anew at each start, not kept in the state directory, and
 * an entry of that directory that has the same name gives way. What cannot be made ends the start. */
#ifndef TL_SERVER_BOOT_MANIFEST_H
#define TL_SERVER_BOOT_MANIFEST_H

#include "config.h"
#include "definitions.h"
#include "registry.h"

struct tl_boot_manifest;

/* Read and check all that can be told without the model: form, kinds, names. Owner: caller, tl_boot_manifest_free().
 * Errors: TL_ERR_IO, TL_ERR_BAD_PARAM with path and entry, TL_ERR_NO_HOST_MEMORY. Blocking; any thread. */
enum tl_status tl_boot_manifest_read(struct tl_boot_manifest **out, const char *path, struct tl_error *err);
void tl_boot_manifest_free(struct tl_boot_manifest *b); /* NULL is fine */
/* Check every entry against the model and encode its prompt. Errors: those of a creation request, with path and entry. */
enum tl_status tl_boot_manifest_resolve(struct tl_boot_manifest *b, const struct tl_config *cfg, struct tl_model *m,
                                        struct tl_error *err);
/* After resolve: does d have the name of an entry, or, as a pool entry, its content? */
bool tl_boot_manifest_replaces(const struct tl_boot_manifest *b, const struct tl_definition *d);
/* Compute all entries, one after the other. progress (may be NULL): before each. Thread: worker, before it serves. */
enum tl_status tl_boot_manifest_build(struct tl_boot_manifest *b, struct tl_registry *r, struct tl_sched *s,
                                      void (*progress)(void *arg, const char *what, double fraction), void *arg,
                                      struct tl_error *err);

#endif
