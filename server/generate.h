/* server/generate.h - one generation request: what was asked, how the worker does it, what comes back.
 *
 * A request is a batch of prompts times n choices. Prompts with the same tokens are computed once: the first choice of such
 * a group (its leader) keeps its prompt state as a handle and the others start from that. Where there is no memory for such
 * a handle every choice computes its prompt for itself.
 *
 * store_resume: the prompt's state becomes a resume handle (a making, registry.h). Its definition is written while tokens are
 * generated, it is committed when the last one is there, and the end of the first choice is told only then.
 *
 * Output waits in an outbox, under the lock. For a stream it is bounded in bytes: a choice that finds it full pauses until
 * the loop has taken it. Without a stream it is bounded by max_tokens, and the loop hears of it at the end only. */
#ifndef TL_SERVER_GENERATE_H
#define TL_SERVER_GENERATE_H

#include <pthread.h>

#include "../engine/tinyloop.h"
#include "bytes.h"
#include "job.h"
#include "registry.h"
#include "form_ask.h"
#include "reuse_ask.h"

#define TL_STOPS_MAX         4
#define TL_STOP_IDS_USER_MAX 16

struct tl_prompt {
    char *text; /* as sent; NULL if it came as ids. Owned */
    size_t n_text;
    int32_t *ids; /* owned */
    int n_ids;
    int same_as; /* index of the first prompt with these tokens; its own index if it is that */
};

/* What was asked, checked as far as it can be without the worker. Immutable once submitted. */
struct tl_ask {
    struct tl_prompt *prompts;
    int n_prompts, n;            /* choices = n_prompts * n */
    struct tl_sampling sampling; /* its arrays point into this struct */
    struct tl_logit_bias *bias;  /* owned */
    int32_t stop_ids[TL_STOP_IDS_USER_MAX + TL_STOP_IDS_MAX];
    int n_user_stop_ids;       /* the first ones of stop_ids */
    char *stops[TL_STOPS_MAX]; /* owned */
    int n_stops;
    int loops, cache_window, max_tokens; /* 0, -1, -1: not given */
    bool max_tokens_given, seed_given;
    bool chat;       /* the one prompt's text is the variables of a chat template (chat_parse.h) */
    bool think_open; /* chat, once encoded: the prompt ends inside <think> */
    bool stream, include_usage, echo, logprobs, return_tokens, return_progress, return_logits_hash;
    struct tl_reuse_ask reuse;
    struct tl_form_ask form;
    bool adaptive;                 /* loops: "auto" */
    float exit_threshold;          /* 0 = the default of the model's criterion */
    double max_queue_s, timeout_s; /* 0 = none */
};
void tl_ask_clear(struct tl_ask *a);

/* ---- results ------------------------------------------------------------------------------------------------------ */

struct tl_out_token {
    int choice;
    int32_t token; /* -1: only text, the last that was held back */
    bool prompt;   /* scored, not generated */
    float logprob;
    int n_top;
    size_t top_at; /* first alternative in tl_batch.top */
    size_t n_text; /* bytes that became certain; they follow those of the token before, over all choices */
    double at;     /* monotonic */
};

struct tl_out_end {
    int choice;
    bool leader;
    bool durable;                       /* the resume handle that was asked for outlasts this process */
    enum tl_reuse reuse;                /* what it began from, */
    char reuse_id[TL_ENTRY_ID_MAX + 1]; /* and its id; "" = an automatic entry of the pool */
    enum tl_finish finish;
    uint64_t logits_hash; /* over all rows that gave tokens, if asked for */
    const char *detail;   /* static: eos, stop_token, stop_sequence, max_tokens, deadline, ... */
    struct tl_usage usage;
    struct tl_error error; /* finish ERROR */
};

struct tl_batch {
    struct tl_out_token *token;
    size_t n_tokens, cap_tokens;
    struct tl_bytes text;
    struct tl_token_logprob *top;
    size_t n_top, cap_top;
    struct tl_out_end *end;
    int n_ends, cap_ends;
    int rows_done, rows_total;          /* of the prefill; 0 of 0: no news */
    enum tl_reuse reuse;                /* with started: what the first choice began from, */
    char reuse_id[TL_ENTRY_ID_MAX + 1]; /* and its id; "" = an automatic entry of the pool */
    bool started;                       /* the first choice has left the queue */
    bool done;                          /* nothing will follow */
    bool failed;                        /* no memory for results */
};
size_t tl_batch_bytes(const struct tl_batch *b);
void tl_batch_clear(struct tl_batch *b); /* keeps the memory */
void tl_batch_free(struct tl_batch *b);
/* s NULL: only text. Without memory b->failed is set. */
void tl_batch_token(struct tl_batch *b, int choice, const struct tl_sampled *s, bool prompt, const char *text,
                    size_t n_text);
void tl_batch_end(struct tl_batch *b, const struct tl_out_end *end);

/* ---- the task ----------------------------------------------------------------------------------------------------- */

/* Why it was cancelled: the first reason counts. */
enum tl_cancel {
    TL_CANCEL_NO,
    TL_CANCEL_CLIENT,
    TL_CANCEL_API,
    TL_CANCEL_DEADLINE,
    TL_CANCEL_QUEUE,
    TL_CANCEL_SHUTDOWN
};

struct tl_choice;

struct tl_generation {
    struct tl_task task;
    struct tl_ask ask;
    struct tl_worker *worker;
    void (*deliver)(void *owner); /* loop */
    void *owner;                  /* loop: the flight */
    size_t outbox_bytes;
    int max_seq_len, default_loops; /* of the model */
    double deadline;                /* monotonic; 0 = none */
    atomic_int cancel;              /* enum tl_cancel */
    /* worker */
    struct tl_choice *choices;
    struct tl_grammar *grammar; /* one reference; NULL = any text */
    const struct tl_vocab_trie *vocab;
    struct tl_form_wait form_wait; /* until the grammar is there */
    int n_choices, n_live;
    bool told_started, begun;    /* begun: the leaders were submitted */
    struct tl_claim claim;       /* the named start, or a pool entry that had to be computed again first */
    bool waits_for_claim, plain; /* plain: the named start is missing and the whole prompt is here */
    int n_stored;                /* pool entries waited for */
    struct tl_making storing;    /* the resume handle that was asked for, while it is made durable */
    bool stores, durable;
    int store_code; /* it could not be kept; store_err says why */
    struct tl_error store_err;
    int32_t *prefix; /* with echo: the tokens of the named start, there before the first result. Owned */
    int n_prefix;
    atomic_int stored; /* the loop's answer: 0 waits, 1 on disk, -1 failed */
    /* both, under lock */
    pthread_mutex_t lock;
    struct tl_definition *put; /* to be written by the loop */
    bool put_asked;
    struct tl_batch out;
    bool want_resume; /* the outbox was emptied while choices were paused */
    int n_paused;
};

/* Takes the contents of *ask over (it is zeroed, also after an error). Prompts must have ids. tk may be NULL.
 * Errors: TL_ERR_NO_HOST_MEMORY, those of tl_text_stream_create. */
enum tl_status tl_generation_create(struct tl_generation **out, struct tl_ask *ask, const struct tl_tokenizer *tk,
                                    struct tl_worker *w, struct tl_error *err);

/* Loop: swap the outbox with an empty batch. */
void tl_generation_take(struct tl_generation *g, struct tl_batch *into);
/* Loop: a definition to be made durable before the answer, or NULL; then say what came of it. */
struct tl_definition *tl_generation_definition(struct tl_generation *g);
void tl_generation_stored(struct tl_generation *g, bool ok);
/* Loop: stop the work as soon as possible; it still ends by done. */
void tl_generation_cancel(struct tl_generation *g, enum tl_cancel why);

#endif
