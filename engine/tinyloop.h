/* engine/tinyloop.h - the runtime for looped language models: the whole public surface.
 *
 * A model is loaded once. Everything it computes is asked for as a *request* to its scheduler; the one-shot calls
 * (tl_generate ...) are loops over the same scheduler. What a request leaves behind can be kept as a *handle*: immutable,
 * refcounted state of a token prefix at one depth, that later requests start from without computing it again:
 *
 *   PrefixCache   a handle at one depth for any number of requests
 *   ResumeHandle  a handle that also keeps the state after loop L_used, so that a later request can go on to new_L by
 *                 running only iterations [L_used, new_L)
 *   PrefixPool    many handles; the longest one that is a prefix of the prompt is used, the rest is prefilled
 *
 * Exactness: for one backend and model the tokens and logits of a request depend on its tokens, depth, window and sampling
 * parameters alone, never on what was reused, on chunking, threads or other requests.
 *
 * Nothing here aborts. Every count and size is checked; on error *out is NULL and nothing is held.
 * Thread: a model and everything made from it belong to one thread (the worker), except the functions marked "any thread".
 * Units: positions and lengths are tokens, sizes bytes, times seconds. */
#ifndef TINYLOOP_H
#define TINYLOOP_H

#include "arch.h"
#include "grammar_cache.h"
#include "chat_template.h"
#include "sampler.h"
#include "status.h"
#include "text_stream.h"
#include "tokenizer.h"

#define TL_VERSION "0.1.0"

/* Release what a call says to release with it (token ids, text). NULL is fine. */
void tl_free(void *p);

/* ---- model ------------------------------------------------------------------------------------------------------- */

struct tl_model;

struct tl_model_params {
    const char *dir;    /* artifact: config.json, *.safetensors, tokenizer.json (optional) */
    const char *device; /* "auto", "cpu", "cuda"; NULL = "auto" */
    int n_threads;      /* CPU threads; 0 = all that the process may use */
    uint64_t
        memory_bytes;  /* budget for weights + scratch + KV; 0 = weights + scratch + 2 GiB on the CPU, 90 % of a card */
    int max_seq_len;   /* 0 = the least of the model's, 8192 and what half the KV budget holds */
    int max_loops;     /* 0 = the lesser of 32 and the model's maximum */
    int step_rows_max; /* rows of one step; 0 = 256, on a GPU 2048 */
    uint64_t start_seed;     /* of random start states */
    bool start_state_random; /* false: zero start state also where the original draws one */
    void (*progress)(void *arg, const char *what, double fraction); /* may be NULL; fraction 0..1 */
    void *progress_arg;
};

struct tl_model_info {
    const struct tl_arch_spec *spec;
    char name[128];        /* last part of the directory */
    char fingerprint[65];  /* SHA-256 in hex over config, tensors and start-state seed */
    char weights[8];       /* "f32", "bf16", "int8", "int4" */
    char device[128];      /* the backend's own line */
    char passed_over[160]; /* why the device "auto" is not a GPU; empty: it was not asked, or it is one */
    int vocab_size, max_seq_len, max_loops, step_rows_max;
    uint64_t n_parameters;
    uint64_t weight_bytes; /* in device memory */
    uint64_t page_bytes;   /* of one KV page (one layer execution of 64 tokens) */
};

struct tl_memory { /* bytes of device memory; budget = weights + scratch + kv_total */
    uint64_t budget, weights, scratch;
    uint64_t kv_total, kv_used, kv_reserved; /* used: pages in use; reserved: promised to admitted work, not used yet */
    uint64_t kv_used_peak;
    uint64_t kv_held;        /* what handles hold, promises for resumes included */
    uint64_t kv_seq_reserve; /* what handles may never take: one sequence of max_seq_len at the default depth */
};

enum tl_status tl_model_open(struct tl_model **out, const struct tl_model_params *params, struct tl_error *err);
void tl_model_free(struct tl_model *m); /* after every handle, pool and scheduler of it. NULL is fine */
const struct tl_model_info *tl_model_info(const struct tl_model *m);     /* any thread */
const struct tl_tokenizer *tl_model_tokenizer(const struct tl_model *m); /* any thread; NULL if the artifact has none */
/* Any thread. NULL if the artifact has no chat template, or one that cannot be used: then *why_not says why. */
const struct tl_chat_template *tl_model_chat(const struct tl_model *m, const struct tl_error **why_not);
void tl_model_memory(const struct tl_model *m, struct tl_memory *out);

/* ---- handles ----------------------------------------------------------------------------------------------------- */

struct tl_handle;

enum tl_handle_kind { TL_HANDLE_PREFIX, TL_HANDLE_RESUME };

struct tl_handle_info {
    enum tl_handle_kind kind;
    const int32_t *tokens; /* lives as long as the handle */
    int n_tokens;
    int n_loops;   /* depth its KV is filled to; L_used of a ResumeHandle */
    int max_loops; /* RESUME: deepest resume it may serve; else n_loops */
    int cache_window;
    uint64_t bytes;          /* device memory of the pages it refers to, shared ones included, and its reservation */
    uint64_t bytes_reserved; /* RESUME: the part held back for one resume to max_loops */
    int n_refs;              /* holders: the owner, pools, requests */
    int n_users;             /* of these, running requests that started from it */
};
struct tl_prefix_shape {
    int n_tokens, n_loops, max_loops, cache_window;
};
void tl_handle_info(const struct tl_handle *h, struct tl_handle_info *out);
/* The bytes and bytes_reserved that a handle of this shape would report. max_loops counts for RESUME only. */
void tl_handle_estimate(const struct tl_model *m, enum tl_handle_kind kind, const struct tl_prefix_shape *shape,
                        uint64_t *bytes, uint64_t *bytes_reserved);
void tl_handle_ref(struct tl_handle *h);
void tl_handle_free(struct tl_handle *h); /* drop one reference; the last one releases the memory. NULL is fine */

/* ---- pool -------------------------------------------------------------------------------------------------------- */

struct tl_pool;

struct tl_pool_match {
    struct tl_handle *handle; /* NULL = miss; borrowed, valid until the pool changes */
    int n_matched;            /* tokens of it that count: the whole handle, or full blocks of an automatic one */
    bool deepen;              /* the handle is shallower and keeps its state: it would be resumed */
    bool automatic;           /* it is an automatic entry */
    /* why not more: of the entries that did not match and agree in more tokens than the match, the one that agrees in most
     * (n_common 0 = none) */
    const struct tl_handle *nearest;
    int n_common;
    enum tl_miss { TL_MISS_NONE, TL_MISS_TOKEN, TL_MISS_PROMPT_SHORTER, TL_MISS_LOOPS, TL_MISS_WINDOW } reason;
};

struct tl_pool_stats {
    int capacity, n_entries, n_automatic;
    uint64_t bytes, queries, hits, evictions;
};

/* scope separates tenants: entries match requests of the same scope and of scope 0 (shared). */
enum tl_status tl_pool_create(struct tl_pool **out, struct tl_model *m, int capacity, uint64_t bytes_max,
                              struct tl_error *err);
void tl_pool_free(struct tl_pool *p); /* NULL is fine; running requests keep their handles */
/* Add a handle (one reference is taken). An equal one (tokens, depth, window, scope) is only bumped. Over capacity or bytes
 * the least recently used idle entries go; TL_ERR_OVERLOADED if none is idle. automatic: see design of block granularity. */
enum tl_status tl_pool_add(struct tl_pool *p, struct tl_handle *h, uint64_t scope, bool automatic,
                           struct tl_error *err);
bool tl_pool_remove(struct tl_pool *p, const struct tl_handle *h,
                    uint64_t scope); /* false if it is not an entry of scope */
/* Look only: bumps and counts nothing. */
void tl_pool_find(const struct tl_pool *p, const int32_t *tokens, int n_tokens, int n_loops, int cache_window,
                  uint64_t scope, struct tl_pool_match *out);
/* The handle of the entry equal to like (tokens, depth, window, kind) in just this scope, borrowed; NULL = none. */
struct tl_handle *tl_pool_holds(const struct tl_pool *p, const struct tl_handle *like, uint64_t scope);
bool tl_pool_evict_one(struct tl_pool *p);      /* least recently used idle entry; false if none */
void tl_pool_drop_automatic(struct tl_pool *p); /* every idle automatic entry; they do not count as evictions */
/* Change the limits; what is over and idle is evicted now, the rest when it is idle and something is added. */
void tl_pool_limits(struct tl_pool *p, int capacity, uint64_t bytes_max);
/* fn is called just before a handle is evicted (for capacity, bytes or memory; from all its scopes at once), not when it is
 * removed by name. */
void tl_pool_on_evict(struct tl_pool *p, void (*fn)(void *arg, const struct tl_handle *h), void *arg);
void tl_pool_stats(const struct tl_pool *p, struct tl_pool_stats *out);
/* Device memory that would be free if every idle entry were evicted. */
uint64_t tl_pool_idle_bytes(const struct tl_pool *p);

/* ---- requests ---------------------------------------------------------------------------------------------------- */

#define TL_EXIT_GATE_DEFAULT   0.3f  /* sum of exit probabilities */
#define TL_EXIT_LATENT_DEFAULT 0.03f /* relative size of the last step */

enum tl_keep { TL_KEEP_NONE, TL_KEEP_PREFIX, TL_KEEP_RESUME };

enum tl_finish { TL_FINISH_STOP, TL_FINISH_LENGTH, TL_FINISH_CANCELLED, TL_FINISH_ERROR };

struct tl_usage {
    int n_prompt;    /* tokens of the whole prompt, the reused prefix included */
    int n_reused;    /* of these, taken from a handle */
    int n_prefilled; /* of these, computed now from the prelude on */
    int n_generated;
    int n_loops;            /* depth of the request */
    int iterations_run;     /* loop iterations run over reused rows (a resume): new_L - L_used; else 0 */
    int iterations_skipped; /* loop iterations of reused rows that were not run again */
    int64_t row_loops_run;  /* rows x loop iterations computed for this request, all phases */
    double mean_loops;      /* over the generated tokens */
    bool exact;             /* false if decode depth is below the prefix depth */
    double queue_s, clone_s, resume_s, prefill_s, ttft_s, decode_s;
};

enum tl_event_kind {
    TL_EVENT_STARTED,        /* admitted; leaves the queue. handle */
    TL_EVENT_PROGRESS,       /* rows of the prompt done so far */
    TL_EVENT_PROMPT_LOGPROB, /* sampled: token at pos and its log-probability (want_prompt_logprobs) */
    TL_EVENT_TOKEN,          /* sampled */
    TL_EVENT_KEPT,           /* handle: one reference passes to the callee */
    TL_EVENT_DONE            /* last event; the request is gone afterwards */
};
struct tl_event {
    enum tl_event_kind kind;
    const struct tl_sampled *sampled; /* TOKEN, PROMPT_LOGPROB; DONE: the stop id that ended it, NULL if none did */
    int pos;                          /* TOKEN, PROMPT_LOGPROB: absolute position; PROGRESS: rows done */
    int n_total;                      /* PROGRESS: rows in all */
    int n_loops;                      /* TOKEN: depth at which it was read out */
    uint64_t logits_hash;             /* TOKEN, if asked for: XXH3-64 of the row as the model made it */
    struct tl_handle *handle;         /* KEPT; STARTED: what it starts from, borrowed, NULL = nothing */
    enum tl_finish finish;            /* DONE */
    const struct tl_usage *usage;     /* DONE */
    const struct tl_error *error;     /* DONE with TL_FINISH_ERROR */
};
/* What to do after a TOKEN event; ignored for the others. */
enum tl_verdict { TL_GO_ON, TL_STOP_HERE, TL_PAUSE };
typedef enum tl_verdict tl_event_fn(void *arg, const struct tl_event *ev);

struct tl_request {
    /* Start: at most one of handle and pool. Without either the whole prompt is computed. */
    struct tl_handle *handle; /* a reference is taken; tokens is then the suffix, may be empty */
    int new_L;                /* 0 = the handle's depth; else resume it to this depth (RESUME handles) */
    struct tl_pool *pool;     /* longest matching entry for tokens (the whole prompt) */
    uint64_t pool_scope;
    bool pool_require;     /* a miss is TL_ERR_NO_POOL_MATCH */
    const int32_t *tokens; /* copied */
    int n_tokens;
    int loops;     /* depth; 0 = the handle's or new_L, else the model's default */
    bool adaptive; /* every token stops at the loop where the model's exit criterion says so, at loops at the latest;
                                  see adaptive.h. Not with windows, keep, decode_loops, prompt log-probabilities; a handle must
                                  have depth loops, and models with a coda take no handle */
    float exit_threshold; /* adaptive; 0 = TL_EXIT_GATE_DEFAULT or TL_EXIT_LATENT_DEFAULT */
    int decode_loops;     /* depth of generated tokens; 0 = loops. Below loops: exact is false */
    int cache_window;     /* -1 = the handle's, else 0 (unlimited) */
    int max_tokens;       /* 0 = compute the prompt only */
    struct tl_sampling sampling;
    const struct tl_grammar *grammar; /* NULL = any text; a reference is taken */
    const struct tl_vocab_trie
        *vocab; /* with a grammar: of the model's tokenizer and vocab_size; must outlive the request */
    bool
        grammar_full; /* the prompt, a reused prefix included, is the beginning of the text. It is read while the request waits;
                        * TL_ERR_GRAMMAR_PREFIX_CONFLICT ends it before it starts */
    bool want_prompt_logprobs;
    bool want_logits_hash; /* TOKEN events carry a hash of the logits' bits: the proof that reuse changed nothing */
    enum tl_keep keep;     /* leave the prompt behind as a handle (event KEPT, before the first token) */
    int keep_max_loops;    /* KEEP_RESUME; 0 = the model's max_loops */
    bool keep_all; /* KEEP_PREFIX of prompt and output, at the end instead (not for windows or decode_loops < loops) */
    tl_event_fn *on_event; /* called from tl_sched_step, on the worker */
    void *arg;
};
void tl_request_default(struct tl_request *r);

/* ---- scheduler --------------------------------------------------------------------------------------------------- */

struct tl_sched;
struct tl_job; /* a submitted request; valid until its DONE event returns */

struct tl_sched_params {
    int n_running_max; /* sequences in a step; 0 = 64 */
    int n_waiting_max; /* 0 = 1024; more are TL_ERR_OVERLOADED */
    int64_t
        grammar_work; /* elementary steps of work (grammar.h) that all grammars may do in one step, once for prompts that they
                           * read and once for masks; the last token may go over it. 0 = 1000000, some 3 to 10 ms */
};
struct tl_sched_stats {
    int n_running, n_waiting;
    int64_t turns; /* calls of tl_sched_step */
    int64_t steps, rows, row_loops;
};

enum tl_status tl_sched_create(struct tl_sched **out, struct tl_model *m, const struct tl_sched_params *params,
                               struct tl_error *err);
void tl_sched_free(struct tl_sched *s); /* every job gets DONE/cancelled first. NULL is fine */
/* Check everything that can be checked and queue. Jobs are admitted in order of arrival as memory allows. */
enum tl_status tl_sched_submit(struct tl_sched *s, const struct tl_request *r, struct tl_job **out,
                               struct tl_error *err);
/* One step over all running jobs: decode rows first, the rest of the row budget to prefills in turn. Calls back.
 * *busy: false when there is nothing to do (no job, or all paused). Errors: the device failed; every job got DONE. */
enum tl_status tl_sched_step(struct tl_sched *s, bool *busy, struct tl_error *err);
/* Any thread, while the job exists: noticed between loop iterations, chunks and tokens. */
void tl_job_cancel(struct tl_job *j);
void tl_job_resume(struct tl_job *j);        /* any thread, after TL_PAUSE: it takes part in the next step */
int tl_job_position(const struct tl_job *j); /* jobs before it in the queue; 0 = running */
void tl_sched_stats(const struct tl_sched *s, struct tl_sched_stats *out);

/* ---- one-shot calls: loops over a scheduler ---------------------------------------------------------------------- */

struct tl_prefix_params {
    const int32_t *tokens;
    int seq_len;      /* 1..max_seq_len */
    int n_loops;      /* 0 = the model's default */
    int cache_window; /* 0 = unlimited */
};
enum tl_status tl_prefix_cache_build(struct tl_handle **out, struct tl_sched *s, const struct tl_prefix_params *p,
                                     struct tl_error *err);
/* L_used = p->n_loops; 1 <= L_used <= max_loops <= the model's max_loops; max_loops 0 = the model's. */
enum tl_status tl_resume_handle_build(struct tl_handle **out, struct tl_sched *s, const struct tl_prefix_params *p,
                                      int max_loops, struct tl_error *err);
/* Raise h to new_L and keep the result as a PrefixCache; h is unchanged. */
enum tl_status tl_resume_handle_promote(struct tl_handle **out, struct tl_sched *s, struct tl_handle *h, int new_L,
                                        struct tl_error *err);

struct tl_result {
    int32_t *tokens; /* generated ones; owned: tl_result_clear */
    int n_tokens;
    struct tl_sampled last; /* of the last token */
    uint64_t last_hash;     /* of its logits, if asked for */
    enum tl_finish finish;
    struct tl_usage usage;
    struct tl_handle *kept; /* owned by the caller; NULL unless asked for */
};
/* Run one request to its end (other jobs of the scheduler go on meanwhile). r->on_event, if set, sees TOKEN events and may stop. */
enum tl_status tl_generate(struct tl_sched *s, const struct tl_request *r, struct tl_result *out, struct tl_error *err);
/* Let a device make its launches for steps of 1, 2, 4 .. n sequences at the model's default depth, so that the first requests do
 * not pay for them (about 1 ms a shape). Nothing is kept or counted; a device that prepares nothing returns at once. */
enum tl_status tl_model_warm(struct tl_model *m, int n, struct tl_error *err);
void tl_result_clear(struct tl_result *r);

/* Logits of the last n_rows of tokens at a depth, rows x vocab_size. For tests, tools and evaluation; bypasses the scheduler. */
struct tl_logits_params {
    const int32_t *tokens;
    int n_tokens, n_loops, cache_window;
    int n_rows;                /* 1..n_tokens, counted from the end */
    int chunk;                 /* rows per forward call; 0 = as many as a step holds */
    const float *start_states; /* [n_tokens][d_model], or NULL */
    float *logits;             /* out [n_rows][vocab_size]; may be NULL */
    float *hidden;             /* out [n_rows][d_model], the row before the head; may be NULL */
    float *gates;              /* out [n_loops][n_rows] exit gate logits; may be NULL; needs exit GATE_CDF */
};
enum tl_status tl_logits(struct tl_model *m, const struct tl_logits_params *p, struct tl_error *err);

/* First 0-based loop t at which the sum of exit probabilities reaches q, from gate logits of one row; n_loops - 1 at most. */
int tl_exit_step(const float *gate_logits, int stride, int n_loops, float q);

/* How well a model predicts text at a depth and, beside a reference with the same vocabulary (may be NULL), how far it is from
 * it. Windows of up to 512 tokens that overlap by one; the first token is context only. Needs m's tokenizer. */
struct tl_eval {
    int64_t n_tokens; /* predicted */
    double bits_per_byte, ref_bits_per_byte;
    double top1_agreement; /* share of tokens where both would choose the same */
    double kl;             /* mean of KL(reference || model), in nats per token */
};
enum tl_status tl_eval_text(struct tl_model *m, struct tl_model *ref, const char *text, size_t text_bytes, int n_loops,
                            struct tl_eval *out, struct tl_error *err);

#endif
