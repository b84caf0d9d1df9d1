/* The scalar level: the oracle. Integer layers unpack a tile to int8 and take plain dot products. */
#include "v16_scalar.h"

#include "float_kernels.h"

/* 16 outputs x n_k inputs of a tile from input k on (k a multiple of 256), as int8 in the order of an INT8 tile. */
static void unpack_q4(const uint8_t *tile, int64_t k, int n_k, int8_t *panel)
{
    for (int g = 0; g < n_k / 32; g++) {
        const uint8_t *block = tile + (k + g * 32) / 256 * TL_CPU_Q4_BLOCK;
        const uint8_t *chunk = block + 64 + g % 8 * (TL_CPU_Q4_PAIR / 2);
        for (int o = 0; o < TL_CPU_TILE; o++) {
            int s = (block[g % 8 / 2 * 16 + o] >> (g % 2 * 4)) & 15;
            for (int i = 0; i < 32; i++) {
                int q = ((chunk[i / 8 * 64 + o * 4 + i % 4] >> (i & 4)) & 15) - 8;
                panel[(g * 8 + i / 4) * 64 + o * 4 + i % 4] = (int8_t)(s * q);
            }
        }
    }
}

static void linear_int(const struct tl_mat *m, const struct tl_cpu_acts *a, int n, int64_t t0, int64_t t1, float *y,
                       int64_t ldy, struct tl_cpu_linear_scratch *tmp)
{
    int32_t(*sums)[TL_CPU_TILE] = (void *)tmp->sums;
    for (int64_t t = t0; t < t1; t++) {
        const uint8_t *tile = m->data + (size_t)t * m->tile_bytes;
        int64_t o = t * TL_CPU_TILE;
        int outs = (int)(m->n_out - o < TL_CPU_TILE ? m->n_out - o : TL_CPU_TILE);
        for (int i0 = 0; i0 < n; i0 += TL_CPU_ROW_BLOCK) {
            int rows = n - i0 < TL_CPU_ROW_BLOCK ? n - i0 : TL_CPU_ROW_BLOCK;
            memset(sums, 0, (size_t)rows * sizeof(*sums));
            for (int64_t k = 0; k < m->k_pad; k += TL_CPU_K_BLOCK) {
                int n_k = (int)(m->k_pad - k < TL_CPU_K_BLOCK ? m->k_pad - k : TL_CPU_K_BLOCK);
                const int8_t *w = (const int8_t *)tile + k * TL_CPU_TILE;
                if (m->wtype == TL_W_INT4) {
                    unpack_q4(tile, k, n_k, (int8_t *)tmp->panel);
                    w = (const int8_t *)tmp->panel;
                }
                for (int i = 0; i < rows; i++) {
                    const int8_t *q = a->q + (i0 + i) * a->k_max + k;
                    for (int j = 0; j < n_k; j++)
                        for (int r = 0; r < TL_CPU_TILE; r++)
                            sums[i][r] += w[j / 4 * 64 + r * 4 + j % 4] * q[j];
                }
            }
            for (int i = 0; i < rows; i++)
                for (int r = 0; r < outs; r++)
                    y[(i0 + i) * ldy + o + r] = (float)sums[i][r] * (a->scale[i0 + i] * m->row_scale[o + r]);
        }
    }
}

const struct tl_cpu_kernels tl_cpu_kernels_scalar = {
    .name = "scalar", .linear_q4 = linear_int, .linear_q8 = linear_int, FLOAT_KERNELS};
