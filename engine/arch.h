/* engine/arch.h - a model as data: what every looped architecture we know is made of.
 *
 *   prelude layers -> (core layers) x n_loops -> coda layers -> final norm -> head
 *
 * Every layer is one block with optional norms (absent = identity):
 *   y  = n3( x + n2 Attn(n1 x) )
 *   x' = n6( y + n5 Mlp(n4 y) )
 * Attn: q,k,v = W_qkv h (+bias), qk_bias added to q,k, optional q/k norms, rope, causal softmax(q k / sqrt(d_head)) v, W_o.
 *       value_embeds, in layers at odd places: v of kv head g += 2 sigmoid(gate_g . h[0:32]) * table[token] of that head.
 * Mlp:  SILU_GATED W_down( silu(g) * u ), [g;u] = W_up h;  RELU2 W_down( 0.5 * relu(W_up h)^2 ).
 *
 * Around the loop, with x the stream and e the injected input:
 *   prelude: x = embed[token] * embed_scale, then the prelude layers
 *   start:   if inject != NONE: e = (inject_norm) x;   x = start state (state_init)
 *   loop i:  x = inject(x, e); core layers; x = loop_end_norm(x)
 *   coda:    x = core_to_coda(x); coda layers
 *   head:    logits = W_head * final_norm(x)
 * Norms are RMS: x / sqrt(mean(x^2) + norm_eps) * w, in F32.
 *
 * Files differ in names and in how matrices are fused; that is straightened by the loader (arch_*.c), never later.
 * Thread: immutable after loading, any. */
#ifndef TL_ARCH_H
#define TL_ARCH_H

#include <stdbool.h>
#include <stdint.h>

#define TL_LOOPS_MAX     64  /* hard limit of any depth */
#define TL_HEAD_DIM_MAX  256 /* d_head */
#define TL_STOP_IDS_MAX  8
#define TL_VALUE_GATE_IN 32 /* inputs of the gate of a value embedding */

enum tl_wtype { TL_W_F32, TL_W_BF16, TL_W_INT8, TL_W_INT4, TL_W_COUNT };
const char *tl_wtype_name(enum tl_wtype t); /* "f32", "bf16", "int8", "int4" */

enum tl_inject { TL_INJECT_NONE, TL_INJECT_CONCAT_LINEAR, TL_INJECT_DIAG };
enum tl_state_init { TL_STATE_PRELUDE, TL_STATE_ZERO, TL_STATE_TRUNCNORM };
enum tl_core_to_coda { TL_C2C_NONE, TL_C2C_NORM, TL_C2C_LINEAR };
enum tl_rope { TL_ROPE_NONE, TL_ROPE_HALF, TL_ROPE_PAIR };
enum tl_qk_norm { TL_QKNORM_NONE, TL_QKNORM_FULL, TL_QKNORM_HEAD, TL_QKNORM_HEAD_AFTER_ROPE };
enum tl_mlp { TL_MLP_SILU_GATED, TL_MLP_RELU2 };
enum tl_exit { TL_EXIT_NONE, TL_EXIT_GATE_CDF, TL_EXIT_LATENT_DIFF };

/* Bits of tl_arch_spec.norms */
enum { TL_N1 = 1, TL_N2 = 2, TL_N3 = 4, TL_N4 = 8, TL_N5 = 16, TL_N6 = 32 };

struct tl_rope_scaling { /* llama3 frequency scaling; factor 0 = off */
    float factor, low_freq_factor, high_freq_factor;
    int original_max_positions;
};

struct tl_arch_spec {
    char model_type[32]; /* as config.json says it */
    int d_model, n_heads, n_kv_heads, d_head, d_ff, vocab_size;
    int n_prelude, n_core, n_coda;               /* layers */
    int loops_default, loops_trained, loops_max; /* 1 <= default, trained <= max <= TL_LOOPS_MAX */
    int max_positions;
    float norm_eps, embed_scale;
    unsigned norms;
    enum tl_inject inject;
    bool inject_norm; /* e = norm(prelude output) */
    enum tl_state_init state_init;
    float state_std;        /* TRUNCNORM: standard deviation before the cut at 3 of them (scale included) */
    bool skip_first_inject; /* no injection at loop 0 */
    bool loop_end_norm;
    enum tl_core_to_coda core_to_coda;
    bool final_norm;        /* false where loop_end_norm already made the read-out */
    bool c2c_is_final_norm; /* core_to_coda NORM uses the final norm's weight */
    enum tl_rope rope;
    float rope_base;
    struct tl_rope_scaling rope_scaling;
    enum tl_qk_norm qk_norm;
    bool qk_bias, qkv_bias;
    bool value_embeds; /* layers at odd places (of all layers, from 0) have a table of values by token */
    enum tl_mlp mlp;
    bool tied_head;
    enum tl_exit exit;
    int bos_token_id, eos_token_id; /* -1 = none */
    int n_stop_ids;
    int32_t stop_ids[TL_STOP_IDS_MAX]; /* ids that end a generation, eos included */
};

/* KV slots of one sequence: prelude layers, then coda layers, then loop 0's core layers, loop 1's ... so that a deeper
 * sequence only appends. */
static inline int tl_slot_prelude(const struct tl_arch_spec *s, int layer)
{
    (void)s;
    return layer;
}
static inline int tl_slot_coda(const struct tl_arch_spec *s, int layer) { return s->n_prelude + layer; }
static inline int tl_slot_core(const struct tl_arch_spec *s, int loop, int layer)
{
    return s->n_prelude + s->n_coda + loop * s->n_core + layer;
}
static inline int tl_n_slots(const struct tl_arch_spec *s, int n_loops)
{
    return s->n_prelude + s->n_coda + n_loops * s->n_core;
}

static inline bool tl_has_value_embed(const struct tl_arch_spec *s, int layer) { return s->value_embeds && layer % 2; }

static inline int tl_q_dim(const struct tl_arch_spec *s) { return s->n_heads * s->d_head; }
static inline int tl_kv_dim(const struct tl_arch_spec *s) { return s->n_kv_heads * s->d_head; }

#endif
