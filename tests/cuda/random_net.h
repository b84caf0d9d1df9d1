/* tests/cuda/random_net.h - small nets with random weights, the same on any backend, made through the vtable alone.
 *
 * Everything drawn depends on the seed and the spec, never on the backend, so two nets of one seed on two devices are twins.
 * Owner: the caller; net_close releases all. Failures of a device end the program with its message. Thread: one. */
#ifndef RANDOM_NET_H
#define RANDOM_NET_H

#include "backend.h"

#define NET_LAYERS_MAX 8
#define NET_POSITIONS  704 /* rows of the rope table; longest sequence */
#define NET_BLOCKS     ((NET_POSITIONS + TL_BLOCK_TOKENS - 1) / TL_BLOCK_TOKENS)
#define NET_LOOPS      2
#define NET_SEQS_MAX   5
#define NET_OPS_MAX    64

struct rng {
    uint64_t state;
};
uint64_t rng_next(struct rng *r);
int rng_below(struct rng *r, int n); /* 0 .. n - 1 */
float rng_uniform(struct rng *r);    /* -1 .. 1 */

struct net {
    struct tl_backend *be; /* its own, as every model has */
    struct tl_net net;
    struct tl_layer layers[NET_LAYERS_MAX];
    struct tl_kv_view kv;
    int n_pages, n_slots;
    struct rng rng;
    struct tl_mat *mats[5 * NET_LAYERS_MAX + 8];
    struct tl_buf *bufs[16 * NET_LAYERS_MAX + 16];
    int n_mats, n_bufs;
    float *host; /* for host_in and host_out */
    size_t host_size;
};

/* A net with all layers of the spec, ready for steps of rows_max rows, and an arena for NET_SEQS_MAX sequences that is full of
 * NaN: what was never written must never matter. INT4 matrices whose width is no multiple of 32 become INT8. */
void net_open(struct net *n, const char *device, const struct tl_arch_spec *spec, enum tl_wtype t, int rows_max,
              uint64_t seed);
void net_close(struct net *n);

/* The pages of NET_SEQS_MAX sequences, scattered over the arena. */
struct seq_pages {
    int window;
    int32_t pages[16 * NET_BLOCKS]; /* [n_slots][NET_BLOCKS] */
    int32_t state_pages[NET_POSITIONS];
};
void net_pages(const struct net *n, struct seq_pages *s, int n_seqs);
/* Blocks that rows from pos on cannot see any more are gone. */
void net_release(const struct net *n, struct seq_pages *s, int pos);

/* Run on the device and wait; ends the program with the message if that fails. The list is cut into runs such as the engine makes
 * them: host rows in at most once, rows or logits out at most once, at most 64 rows of logits. */
void net_run(struct net *n, const struct tl_step *step);
/* End the program with the message unless st is TL_OK. */
void must(enum tl_status st, const struct tl_error *err, const char *what);

#endif
