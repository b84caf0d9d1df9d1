/* engine/model.h - what an open model is made of. Internal; the public face is tinyloop.h.
 * Owner: the caller of tl_model_open. Thread: worker, but for info and tokenizer, which never change. */
#ifndef TL_MODEL_H
#define TL_MODEL_H

#include "forward.h"
#include "kv_store.h"
#include "tinyloop.h"

struct tl_model {
    struct tl_backend *be;
    struct tl_net net;
    struct tl_tokenizer *tokenizer; /* NULL if the artifact has none */
    struct tl_chat_template *chat;  /* NULL if it has none, or chat_error says why not */
    struct tl_error chat_error;
    struct tl_kv *kv;
    struct tl_forward *fwd;
    struct tl_model_info info;
    uint64_t scratch_bytes;
    int64_t seq_reserve_pages; /* one sequence of max_seq_len at the default depth: named entries never eat it */
    struct tl_pool *pools;     /* list of the pools made from it, for eviction when memory runs short */
};

/* Take n pages' promise, evicting idle pool entries if that makes room. */
bool tl_model_reserve(struct tl_model *m, int64_t n);

#endif
