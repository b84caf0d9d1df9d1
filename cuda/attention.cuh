/* cuda/attention.cuh - everything between the qkv product and the att rows of one layer op: biases, norms, rope,
 * the rows' K and V into their pages, causal attention over stored pages.
 *
 * The law (the same bits whichever kernel a row goes through). A page of 64 keys is one term, from scratch, over
 * visible keys:
 *   s = (q . k) * (1 / sqrt(d_head)), m = max s, p = tlc_exp(s - m), l = sum p, acc = sum p v
 * Terms are folded in ascending order from M = -inf, L = 0, O = 0:
 *   M' = max(M, m), e0 = tlc_exp(M - M'), e1 = tlc_exp(m - M'), L = fma(l, e1, L * e0), O = fma(acc, e1, O * e0)
 * and the result is O * (1 / L). With F16 pages q and p are rounded by tlc_half; s, l and acc are chains of
 * m16n8k16 products ascending from zero, and l is the sum of the rounded p (a column of ones in V), so that
 * weights add up to one. Pages of F32, and head widths that have no tensor path, go through a plain kernel: fma
 * chains ascending from zero over d and over keys.
 *
 * The plan of a set is made on the host once per step, and lies
 * at a fixed device address; launches depend on it only by its class, so that they can be captured in a graph
 * keyed by the class.
 * Thread: worker. */
#ifndef TLC_ATTENTION_CUH
#define TLC_ATTENTION_CUH

#include "device.cuh"

/* Once per backend and model, before the first launch: shared memory limits of the kernels. Those that need more than shared_max
 * bytes of it are left out, and no plan for such a device has work for them. */
cudaError_t tlc_attn_init(const struct tl_arch_spec *spec, size_t shared_max);

/* Bytes of the plan of one set of up to rows_max rows; host and device block alike. */
size_t tlc_attn_plan_bytes(const struct tl_arch_spec *spec, int rows_max);

/* Write the plan of step->sets[set] to host (tlc_attn_plan_bytes(), 16-byte aligned); the first *used bytes are to
 * be copied to the device, to the same address in every step (256-byte aligned). Returns the launch class. Uses
 * rows, seqs, sets, kv.format and ops of the step (which slots the LAYER ops of this set have), with the pages as
 * the engine gave them; of the launch what the device is. Never fails. */
uint32_t tlc_attn_plan(const struct tl_arch_spec *spec, const struct tl_step *step, int set, const struct tlc_launch *l,
                       void *host, size_t *used);

struct tlc_attn_call {
    const struct tl_arch_spec *spec;
    const struct tl_layer *layer; /* biases and q/k norm weights */
    const float *rope;            /* device [positions][d_head]; NULL where spec->rope is NONE */
    struct tlc_step step;
    struct tlc_set set;
    const void *plan; /* device */
    uint32_t cls;     /* what tlc_attn_plan() returned */
    int slot;
    float *qkv; /* [n][ld], the raw product; contents are undefined afterwards */
    int64_t ld; /* floats; a multiple of 4 */
    float *att; /* [n][n_heads * d_head] */
};

/* 1 to 3 kernels. The earlier steps of the sequences must be complete before the first kernel of this step starts
 * (a copy or a plain launch in front of it does that): pages of earlier positions are read before tlc_wait(). */
cudaError_t tlc_attention(const struct tlc_launch *l, const struct tlc_attn_call *call);

#endif
