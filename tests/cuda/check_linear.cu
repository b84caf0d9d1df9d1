/* tests/cuda/check_linear.cu - the products of linear_large.cu on the card: every type, epilogue, row count and tile
 * against plain references, then times. Without a card only the index maths of the fragments is checked, on the
 * host.
 *
 *   nvcc -std=c++17 -O3 --fmad=false -gencode arch=compute_90a,code=sm_90a -Iengine -Icuda \
 *       -o check_linear tests/cuda/check_linear.cu [-DWITH_CUBLASLT -lcublasLt]
 *   ./check_linear [check|time|both [last tile of enum tile to try [type: f32, bf16 or int8]]]
 *
 * Integers: expected bits come from one thread per sum. BF16: from a kernel that follows the law of device.cuh by
 * mma.sync, with operands straight from global memory; so wgmma is held to the bits of mma.sync. Both are compared
 * with exact or double sums on the host. F32: double, within a tolerance. */
#include "../../cuda/linear_large.cu"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifdef WITH_CUBLASLT
#include <cublasLt.h>
#endif

enum { ROWS_MAX = 4096 };

static long n_checks, n_failed;

static void check(bool ok, const char *what, const struct tl_mat *m, int epi, int n, int tile, long bad)
{
    n_checks++;
    if (ok)
        return;
    if (n_failed++ < 40)
        printf("FAILED %s: %s %lld x %lld gated %d epi %d n %d tile %d: %ld wrong\n", what,
               m ? tl_wtype_name(m->wtype) : "", m ? (long long)m->n_out : 0LL, m ? (long long)m->n_in : 0LL,
               m ? m->gated : 0, epi, n, tile, bad);
}

const char *tl_wtype_name(enum tl_wtype t)
{
    static const char *names[] = {"f32", "bf16", "int8", "int4"};
    return names[t];
}

static void must(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return;
    printf("%s: %s\n", what, cudaGetErrorString(e));
    exit(1);
}

static void *device(size_t bytes)
{
    void *p = NULL;
    must(cudaMalloc(&p, bytes), "cudaMalloc");
    return p;
}

static void *upload(const void *host, size_t bytes)
{
    void *p = device(bytes);
    must(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice), "copy");
    return p;
}

static uint64_t seed = 88172645463325252ULL;
static uint32_t rnd()
{
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return (uint32_t)(seed >> 16);
}
static float uniform() { return (float)(rnd() & 0xffffff) / 8388608.0f - 1.0f; }
static uint16_t bf16(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
/* Of every other row: sizes so different that what is lost in a sum depends on how it is added up. */
static float spread(int64_t row) { return row % 2 ? ldexpf(1.0f, -(int)(rnd() % 20)) : 1.0f; }
static double from_bf16(uint16_t b)
{
    uint32_t u = (uint32_t)b << 16;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* ---- the index maths of by_mma, emulated ---- */

/* Register i of every lane as ldmatrix.x4 fills it; at[lane] is the byte address the lane names. */
static void emulate_ldmatrix(uint8_t reg[32][4][4], const uint8_t *shared, const int *at)
{
    for (int t = 0; t < 32; t++)
        for (int i = 0; i < 4; i++)
            memcpy(reg[t][i], shared + at[i * 8 + t / 4] + 4 * (t % 4), 4);
}

/* One tile as the warps of a CTA compute it from one stage of bk bytes: pieces in shared memory, ldmatrix, the
 * fragments of the PTX ISA, and the exchange of sums, against a plain product. */
static void check_tile(int rows, int tokens, int wr_n, int wt_n, int wk_n, int bk)
{
    int mt = rows / wr_n / 16, nt = tokens / wt_n / 8, steps = bk / 32 / wk_n, warps = wr_n * wt_n * wk_n;
    int across = tokens / 8, mine = wk_n > 1 ? mt * nt / wk_n : nt, bad = 0;
    int8_t *w = (int8_t *)malloc(rows * bk), *x = (int8_t *)malloc(tokens * bk);
    uint8_t *ring = (uint8_t *)malloc((rows + tokens) * bk);
    int(*held)[32][4] = (int(*)[32][4])calloc(warps * mt * nt, sizeof(*held)); /* [warp][fragment] */
    int *sum = (int *)calloc(rows * tokens, sizeof(int));
    for (int i = 0; i < rows * bk; i++)
        w[i] = (int8_t)(rnd() % 255 - 127);
    for (int i = 0; i < tokens * bk; i++)
        x[i] = (int8_t)(rnd() % 255 - 127);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < bk / 16; c++)
            memcpy(ring + place(r, c, bk), w + r * bk + 16 * c, 16);
    for (int r = 0; r < tokens; r++)
        for (int c = 0; c < bk / 16; c++)
            memcpy(ring + rows * bk + place(r, c, bk), x + r * bk + 16 * c, 16);
    for (int warp = 0; warp < warps; warp++) {
        int wk = warp % wk_n, wr = warp / wk_n % wr_n, wt = warp / wk_n / wr_n;
        for (int s = 0; s < steps * mt * nt / 2; s++) {
            int step = s % steps, i = s / steps % mt, j = s / steps / mt * 2, c = 2 * (wk * steps + step), at[32];
            uint8_t a[32][4][4], b[32][4][4];
            int8_t A[16][32], B[16][32];
            for (int l = 0; l < 32; l++)
                at[l] = place((wr * mt + i) * 16 + a_row(l), c + a_piece(l), bk);
            emulate_ldmatrix(a, ring, at);
            for (int l = 0; l < 32; l++)
                at[l] = rows * bk + place((wt * nt + j) * 8 + b_row(l), c + b_piece(l), bk);
            emulate_ldmatrix(b, ring, at);
            for (int t = 0; t < 32; t++)
                for (int e = 0; e < 16; e++) { /* register e / 4, byte e % 4 */
                    int q = e / 4, k = t % 4 * 4 + e % 4;
                    A[t / 4 + q % 2 * 8][k + q / 2 * 16] = (int8_t)a[t][q][e % 4];
                    B[t / 4 + q / 2 * 8][k + q % 2 * 16] = (int8_t)b[t][q][e % 4]; /* b[j], then b[j + 1] */
                }
            for (int t = 0; t < 32; t++)
                for (int e = 0; e < 8; e++) { /* fragment e / 4, sum e % 4 */
                    int r = t / 4 + e % 4 / 2 * 8, n = t % 4 * 2 + e % 2 + e / 4 * 8;
                    for (int k = 0; k < 32; k++)
                        held[warp * mt * nt + i * nt + j + e / 4][t][e % 4] += A[r][k] * B[n][k];
                }
        }
    }
    /* What a warp finishes, as in the kernel: MINE fragments where k is shared, else NT for each of its mt blocks. */
    for (int warp = 0; warp < warps; warp++)
        for (int j = 0; j < (wk_n > 1 ? mine : mt * nt); j++) {
            int wr = warp / wk_n % wr_n, wt = warp / wk_n / wr_n;
            int share = (wk_n > 1 ? warp * mine : wr * mt * across + wt * nt), block = j / mine;
            int row = share / across * 16 + 16 * block, token = share % across * 8 + j % mine * 8;
            int i = row / 16, t = token / 8, from = (t / nt * wr_n + i / mt) * wk_n, frag = i % mt * nt + t % nt;
            for (int q = 0; q < wk_n; q++)
                for (int l = 0; l < 32 * 4; l++)
                    sum[(row + l / 4 / 4 + l % 4 / 2 * 8) * tokens + token + l / 4 % 4 * 2 + l % 2] +=
                        held[(from + q) * mt * nt + frag][l / 4][l % 4];
        }
    for (int r = 0; r < rows; r++)
        for (int n = 0; n < tokens; n++) {
            int s = 0;
            for (int k = 0; k < bk; k++)
                s += w[r * bk + k] * x[n * bk + k];
            bad += s != sum[r * tokens + n];
        }
    check(bad == 0, "emulated tile", NULL, rows, tokens, bk, bad);
    free(w);
    free(x);
    free(ring);
    free(held);
    free(sum);
}

/* ---- references on the card ---- */

__global__ void ref_int(const int8_t *w, const int8_t *x, const float *w_scale, const float *x_scale, int k, int64_t ld,
                        int n_stored, float *y)
{
    int s = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x, sum = 0;
    for (int j = 0; j < k; j += 4)
        sum = __dp4a(*(const int *)(w + (int64_t)s * k + j), *(const int *)(x + i * ld + j), sum);
    y[(int64_t)i * n_stored + s] = tlc_scaled(sum, x_scale[i], w_scale[s]);
}

/* One warp: 16 stored rows x 8 tokens, by the law. */
__global__ void ref_bf16(const uint16_t *w, const uint16_t *x, int k_pad, int64_t ld, int n_stored, float *y)
{
    int lane = threadIdx.x & 31, r = blockIdx.x * 16 + lane / 4, t = blockIdx.y * 8 + lane / 4;
    float total[4];
    for (int slice = 0; slice < k_pad; slice += 256) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        for (int k = slice; k < min(slice + 256, k_pad); k += 16) {
            int kk = k + lane % 4 * 2;
            uint32_t a[4], b[2];
            for (int q = 0; q < 4; q++)
                a[q] = *(const uint32_t *)(w + (int64_t)(r + q % 2 * 8) * k_pad + kk + q / 2 * 8);
            for (int q = 0; q < 2; q++)
                b[q] = *(const uint32_t *)(x + t * ld + kk + q * 8);
            mma(sum, a, b);
        }
        for (int q = 0; q < 4; q++)
            total[q] = slice == 0 ? sum[q] : __fadd_rn(total[q], sum[q]);
    }
    for (int q = 0; q < 4; q++)
        y[(int64_t)(blockIdx.y * 8 + lane % 4 * 2 + q % 2) * n_stored + r + q / 2 * 8] = total[q];
}

__global__ void ref_f32(const float *w, const float *x, int k, int64_t ld, int n_stored, float *y)
{
    int s = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
    double sum = 0.0;
    for (int j = 0; j < k; j++)
        sum += (double)w[(int64_t)s * k + j] * x[i * ld + j];
    y[(int64_t)i * n_stored + s] = (float)sum;
}

__global__ void ref_finish(const float *y, int n_stored, int n_out, enum tlc_epi epi, const int32_t *rows, float *out,
                           int64_t ld)
{
    int i = blockIdx.y, o = blockIdx.x * blockDim.x + threadIdx.x;
    const float *v = y + (int64_t)i * n_stored;
    if (o >= (epi == TLC_EPI_SILU_MUL ? n_out / 2 : n_out))
        return;
    switch (epi) {
    case TLC_EPI_STORE: out[i * ld + o] = v[o]; break;
    case TLC_EPI_RELU2: out[i * ld + o] = tlc_relu2(v[o]); break;
    case TLC_EPI_SILU_MUL: out[i * ld + o] = tlc_silu_mul(v[o / 8 * 16 + o % 8], v[o / 8 * 16 + 8 + o % 8]); break;
    case TLC_EPI_RESIDUAL: out[rows[i] * ld + o] = __fadd_rn(out[rows[i] * ld + o], v[o]); break;
    }
}

__global__ void compare(const float *a, const float *b, int64_t n, float tolerance, unsigned long long *bad)
{
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (int64_t)gridDim.x * blockDim.x)
        if (__float_as_uint(a[i]) != __float_as_uint(b[i]) &&
            !(tolerance > 0.0f && fabsf(a[i] - b[i]) <= tolerance * (1.0f + fabsf(b[i]))))
            atomicAdd(bad, 1ULL);
}

/* ---- a problem ---- */

struct problem {
    struct tl_mat m; /* device pointers */
    struct tlc_acts a;
    void *w_host, *x_host; /* [n_stored][k_pad], [ROWS_MAX][ld] */
    float *w_scale, *x_scale;
    float *y; /* device: reference sums [ROWS_MAX][n_stored] */
};

/* The source row of stored row s, or -1 for padding. */
static int64_t source_row(const struct tl_mat *m, int64_t s)
{
    int64_t half = m->n_out / 2, o = s / 16 * 8 + s % 8;
    if (!m->gated)
        return s < m->n_out ? s : -1;
    return o >= half ? -1 : s % 16 < 8 ? o : half + o;
}

static void problem_open(struct problem *p, enum tl_wtype type, bool gated, int n_out, int n_in)
{
    memset(p, 0, sizeof(*p));
    p->m.wtype = type;
    p->m.gated = gated;
    p->m.n_out = n_out;
    p->m.n_in = n_in;
    p->m.k_pad = (n_in + 63) / 64 * 64;
    p->m.n_tiles = gated ? (n_out / 2 + 7) / 8 : (n_out + 15) / 16;
    p->a.ld = p->m.k_pad + 64;
    int64_t n_stored = p->m.n_tiles * 16, k_pad = p->m.k_pad, ld = p->a.ld;
    size_t size = type == TL_W_F32 ? 4 : type == TL_W_BF16 ? 2 : 1;
    p->w_host = calloc(n_stored * k_pad, size);
    p->x_host = calloc(ROWS_MAX * ld, size);
    p->w_scale = (float *)calloc(n_stored, 4);
    p->x_scale = (float *)calloc(ROWS_MAX, 4);
    for (int64_t s = 0; s < n_stored; s++) {
        if (source_row(&p->m, s) < 0)
            continue;
        p->w_scale[s] = 0.002f + 0.001f * uniform();
        for (int64_t k = 0; k < n_in; k++)
            if (size == 4)
                ((float *)p->w_host)[s * k_pad + k] = 0.05f * uniform();
            else if (size == 2)
                ((uint16_t *)p->w_host)[s * k_pad + k] = bf16(0.05f * uniform() * spread(s));
            else
                ((int8_t *)p->w_host)[s * k_pad + k] = (int8_t)(rnd() % 255 - 127);
    }
    for (int64_t i = 0; i < ROWS_MAX; i++) {
        p->x_scale[i] = 0.01f + 0.005f * uniform();
        for (int64_t k = 0; k < ld; k++) /* beyond k_pad lies rubbish */
            if (k >= n_in && k < k_pad)
                continue;
            else if (size == 4)
                ((float *)p->x_host)[i * ld + k] = uniform();
            else if (size == 2)
                ((uint16_t *)p->x_host)[i * ld + k] = bf16(uniform() * spread(i));
            else
                ((int8_t *)p->x_host)[i * ld + k] = (int8_t)(rnd() % 255 - 127);
    }
    void *w = upload(p->w_host, n_stored * k_pad * size), *x = upload(p->x_host, ROWS_MAX * ld * size);
    p->m.row_scale = (float *)upload(p->w_scale, n_stored * 4);
    p->a.scale = (float *)upload(p->x_scale, ROWS_MAX * 4);
    p->y = (float *)device(ROWS_MAX * n_stored * 4);
    dim3 grid(n_stored, ROWS_MAX / 128);
    if (size == 4) {
        p->m.rows32 = (float *)w;
        p->a.f = (float *)x;
        ref_f32<<<grid, 128>>>(p->m.rows32, p->a.f, k_pad, ld, n_stored, p->y);
    } else if (size == 2) {
        p->m.rows16 = (uint16_t *)w;
        p->a.b = (__nv_bfloat16 *)x;
        ref_bf16<<<dim3(n_stored / 16, ROWS_MAX / 8), 32>>>(p->m.rows16, (uint16_t *)x, k_pad, ld, n_stored, p->y);
    } else {
        p->m.rows8 = (int8_t *)w;
        p->a.q = (int8_t *)x;
        ref_int<<<grid, 128>>>(p->m.rows8, p->a.q, p->m.row_scale, p->a.scale, k_pad, ld, n_stored, p->y);
    }
    must(cudaDeviceSynchronize(), "reference");
}

static void problem_close(struct problem *p)
{
    cudaFree(p->m.rows8);
    cudaFree(p->m.rows16);
    cudaFree(p->m.rows32);
    cudaFree(p->m.row_scale);
    cudaFree(p->a.q);
    cudaFree(p->a.b);
    cudaFree(p->a.f);
    cudaFree(p->a.scale);
    cudaFree(p->y);
    free(p->w_host);
    free(p->x_host);
    free(p->w_scale);
    free(p->x_scale);
}

/* The references against sums on the host, at places drawn at random. */
static void check_reference(const struct problem *p)
{
    int64_t n_stored = p->m.n_tiles * 16, k_pad = p->m.k_pad, ld = p->a.ld;
    long bad = 0;
    for (int c = 0; c < 500; c++) {
        int64_t i = rnd() % ROWS_MAX, s = rnd() % n_stored;
        double sum = 0.0, size = 1e-30;
        float y, want;
        for (int64_t k = 0; k < k_pad; k++) {
            double v =
                p->m.wtype == TL_W_F32 ? (double)((float *)p->w_host)[s * k_pad + k] * ((float *)p->x_host)[i * ld + k]
                : p->m.wtype == TL_W_BF16
                    ? from_bf16(((uint16_t *)p->w_host)[s * k_pad + k]) * from_bf16(((uint16_t *)p->x_host)[i * ld + k])
                    : (double)((int8_t *)p->w_host)[s * k_pad + k] * ((int8_t *)p->x_host)[i * ld + k];
            sum += v;
            size += fabs(v);
        }
        must(cudaMemcpy(&y, p->y + i * n_stored + s, 4, cudaMemcpyDeviceToHost), "copy");
        want = (float)sum;
        if (p->m.wtype >= TL_W_INT8) {
            volatile float scale = p->x_scale[i] * p->w_scale[s];
            want = (float)(int)sum * scale;
            bad += y != want;
        } else {
            bad += !(fabs(y - sum) <= 1e-5 * size);
        }
    }
    check(bad == 0, "reference", &p->m, -1, -1, -1, bad);
}

static const int counts[] = {1, 2, 16, 17, 31, 64, 65, 128, 200, 512, 1000, 4096};

static cudaError_t launch_tile(const struct tlc_launch *l, const struct problem *p, const struct tlc_set *set,
                               struct tlc_out out, int tile)
{
    struct linear q = describe(&p->m, &p->a, set, out);
    if (tile == N_TILES)
        return tlc_linear_large(l, &p->m, &p->a, set, out);
    if (p->m.wtype == TL_W_BF16)
        return launch_bf16(l, &q, set->n_cap, (enum tile)tile);
    return launch_int8(l, &q, set->n_cap, (enum tile)tile);
}

static int tile_last = N_TILES;
static const char *type_only; /* NULL: all types */

static bool type_wanted(int type) { return !type_only || strcmp(type_only, tl_wtype_name((enum tl_wtype)type)) == 0; }

static bool tile_exists(enum tl_wtype type, int tile, int cc)
{
    if (tile > tile_last)
        return false;
    if (tile == N_TILES)
        return true;
    if (type == TL_W_F32 || (tile >= WG_128x64 && cc != 90))
        return false;
    if (tile >= SLICES_64x32_4)
        return type == TL_W_BF16;
    return type != TL_W_BF16 || (tile < WG_128x64 && tile != MMA_16x64);
}

/* All row counts and tiles of one problem and epilogue; whole buffers are compared, so nothing else may be written
 * either. */
static void check_problem(const struct tlc_launch *l0, const struct problem *p, enum tlc_epi epi, const float *start,
                          float *out, float *want, const int32_t *rows, int32_t *n_dev, unsigned long long *bad_dev)
{
    int width = (int)(epi == TLC_EPI_SILU_MUL ? p->m.n_out / 2 : p->m.n_out);
    int64_t ld = width + 5, total = ROWS_MAX * ld;
    for (size_t c = 0; c < sizeof(counts) / sizeof(counts[0]); c++) {
        int n = counts[c];
        struct tlc_launch l = *l0;
        struct tlc_set set = {rows, n_dev, c % 2 ? n : min(n + 37, (int)ROWS_MAX)};
        must(cudaMemcpy(n_dev, &n, 4, cudaMemcpyHostToDevice), "copy");
        must(cudaMemcpy(want, start, total * 4, cudaMemcpyDeviceToDevice), "copy");
        ref_finish<<<dim3((width + 127) / 128, n), 128>>>(p->y, (int)p->m.n_tiles * 16, (int)p->m.n_out, epi, rows,
                                                          want, ld);
        for (int tile = 0; tile <= N_TILES; tile++) {
            unsigned long long bad = 0;
            if (!tile_exists(p->m.wtype, tile, l.cc) || (tile == WIDE_80 && p->m.k_pad > WD_K * WG_K))
                continue;
            l.dependent = l.cc >= 90 && (tile + c) % 2;
            must(cudaMemcpy(out, start, total * 4, cudaMemcpyDeviceToDevice), "copy");
            must(cudaMemset(bad_dev, 0, 8), "set");
            must(launch_tile(&l, p, &set, (struct tlc_out){epi, out, ld}, tile), "launch");
            compare<<<1024, 256>>>(out, want, total, p->m.wtype == TL_W_F32 ? 1e-4f : 0.0f, bad_dev);
            must(cudaMemcpy(&bad, bad_dev, 8, cudaMemcpyDeviceToHost), "kernel");
            check(bad == 0, "product", &p->m, epi, n, tile, (long)bad);
        }
    }
}

/* F32 rows have the same bits whatever their number and place. */
static void check_f32_bits(const struct tlc_launch *l, const struct problem *p, float *out, float *want,
                           const int32_t *rows, int32_t *n_dev, unsigned long long *bad_dev)
{
    int64_t ld = p->m.n_out;
    int n = 200;
    must(cudaMemcpy(n_dev, &n, 4, cudaMemcpyHostToDevice), "copy");
    struct tlc_set whole = {rows, n_dev, n};
    must(tlc_linear_large(l, &p->m, &p->a, &whole, {TLC_EPI_STORE, want, ld}), "launch");
    for (int first = 0; first < n; first += 23) {
        struct tlc_acts a = p->a;
        unsigned long long bad = 0;
        int one = 1 + first % 3;
        struct tlc_set set = {rows, n_dev, one};
        a.f += first * a.ld;
        must(cudaMemcpy(n_dev, &one, 4, cudaMemcpyHostToDevice), "copy");
        must(cudaMemset(bad_dev, 0, 8), "set");
        must(tlc_linear_large(l, &p->m, &a, &set, {TLC_EPI_STORE, out, ld}), "launch");
        compare<<<64, 256>>>(out, want + first * ld, one * ld, 0.0f, bad_dev);
        must(cudaMemcpy(&bad, bad_dev, 8, cudaMemcpyDeviceToHost), "kernel");
        check(bad == 0, "f32 bits", &p->m, TLC_EPI_STORE, one, -1, (long)bad);
    }
}

static void check_card(const struct tlc_launch *l)
{
    static const int shapes[][2] = {{200, 180}, {1000, 704}, {3072, 2048}, {2096, 5120}};
    size_t total = (size_t)ROWS_MAX * (3072 + 5);
    float *noise = (float *)malloc(total * 4), *poison = (float *)malloc(total * 4);
    int32_t *perm = (int32_t *)malloc(ROWS_MAX * 4);
    for (size_t i = 0; i < total; i++) {
        uint32_t u = 0x7fc0dea0u + (uint32_t)(i & 15);
        noise[i] = uniform();
        memcpy(&poison[i], &u, 4);
    }
    for (int i = 0; i < ROWS_MAX; i++)
        perm[i] = i;
    for (int i = ROWS_MAX - 1; i > 0; i--) {
        int j = rnd() % (i + 1), t = perm[i];
        perm[i] = perm[j];
        perm[j] = t;
    }
    float *noise_dev = (float *)upload(noise, total * 4), *poison_dev = (float *)upload(poison, total * 4);
    float *out = (float *)device(total * 4), *want = (float *)device(total * 4);
    int32_t *rows = (int32_t *)upload(perm, ROWS_MAX * 4), *n_dev = (int32_t *)device(4);
    unsigned long long *bad_dev = (unsigned long long *)device(8);
    for (int s = 0; s < 4; s++)
        for (int type = TL_W_F32; type <= TL_W_INT8; type++)
            for (int gated = 0; gated < 2; gated++) {
                struct problem p;
                if ((type == TL_W_F32 && s > 1) || !type_wanted(type))
                    continue;
                problem_open(&p, (enum tl_wtype)type, gated, shapes[s][0], shapes[s][1]);
                check_reference(&p);
                if (gated) {
                    check_problem(l, &p, TLC_EPI_SILU_MUL, poison_dev, out, want, rows, n_dev, bad_dev);
                } else {
                    check_problem(l, &p, TLC_EPI_STORE, poison_dev, out, want, rows, n_dev, bad_dev);
                    check_problem(l, &p, TLC_EPI_RELU2, poison_dev, out, want, rows, n_dev, bad_dev);
                    check_problem(l, &p, TLC_EPI_RESIDUAL, noise_dev, out, want, rows, n_dev, bad_dev);
                    if (type == TL_W_F32)
                        check_f32_bits(l, &p, out, want, rows, n_dev, bad_dev);
                }
                problem_close(&p);
                printf("%s %d x %d gated %d: %ld checks, %ld failed so far\n", tl_wtype_name((enum tl_wtype)type),
                       shapes[s][0], shapes[s][1], gated, n_checks, n_failed);
                fflush(stdout);
            }
    cudaFree(noise_dev);
    cudaFree(poison_dev);
    cudaFree(out);
    cudaFree(want);
    cudaFree(rows);
    cudaFree(n_dev);
    cudaFree(bad_dev);
    free(noise);
    free(poison);
    free(perm);
}

/* ---- times ---- */

static int by_value(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median microseconds of one launch, of a graph that was captured in l->stream. */
static float replay(const struct tlc_launch *l, cudaGraph_t graph, int n_launches)
{
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    float ms[7];
    must(cudaGraphInstantiate(&exec, graph, 0), "graph");
    must(cudaEventCreate(&from), "event");
    must(cudaEventCreate(&to), "event");
    for (int i = -2; i < 7; i++) {
        must(cudaEventRecord(from, l->stream), "event");
        must(cudaGraphLaunch(exec, l->stream), "graph");
        must(cudaEventRecord(to, l->stream), "event");
        must(cudaEventSynchronize(to), "graph");
        if (i >= 0)
            must(cudaEventElapsedTime(&ms[i], from, to), "event");
    }
    qsort(ms, 7, sizeof(float), by_value);
    cudaEventDestroy(from);
    cudaEventDestroy(to);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    return ms[3] * 1000.0f / n_launches;
}

__global__ void fill_bf16(__nv_bfloat16 *p, size_t n, float size) /* about normal: four bytes added up */
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7);
        h = (h ^ h >> 15) * 2246822519u;
        h = (h ^ h >> 13) * 3266489917u;
        h ^= h >> 16;
        p[i] = __float2bfloat16(((int)(h & 255) + (int)(h >> 8 & 255) + (int)(h >> 16 & 255) + (int)(h >> 24) - 510) *
                                (size / 148.0f));
    }
}

__global__ void fill_int8(uint32_t *p, size_t n) /* four values -127..127 a word */
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint32_t h = (uint32_t)i * 2654435761u ^ (uint32_t)(i >> 7);
        h = (h ^ h >> 15) * 2246822519u;
        h = (h ^ h >> 13) * 3266489917u;
        p[i] = h ^ h >> 16;
    }
}

#ifdef WITH_CUBLASLT
/* int32 sums only, no epilogue. */
static float time_cublas(const struct tlc_launch *l, const uint8_t *pool, size_t pool_bytes, const int8_t *x,
                         int64_t ld, int n, int n_out, int k, void *out, int n_launches)
{
    static cublasLtHandle_t handle;
    static void *space;
    size_t space_bytes = 32 << 20, w_bytes = (size_t)n_out * k, copies = pool_bytes / w_bytes;
    cublasLtMatmulDesc_t op;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulPreference_t pref;
    cublasLtMatmulHeuristicResult_t best;
    cublasOperation_t yes = CUBLAS_OP_T;
    cudaGraph_t graph;
    int found = 0, one = 1, zero = 0;
    if (!handle) {
        cublasLtCreate(&handle);
        space = device(space_bytes);
    }
    cublasLtMatmulDescCreate(&op, CUBLAS_COMPUTE_32I, CUDA_R_32I);
    cublasLtMatmulDescSetAttribute(op, CUBLASLT_MATMUL_DESC_TRANSA, &yes, sizeof(yes));
    cublasLtMatrixLayoutCreate(&a, CUDA_R_8I, k, n_out, k);
    cublasLtMatrixLayoutCreate(&b, CUDA_R_8I, k, n, ld);
    cublasLtMatrixLayoutCreate(&d, CUDA_R_32I, n_out, n, n_out);
    cublasLtMatmulPreferenceCreate(&pref);
    cublasLtMatmulPreferenceSetAttribute(pref, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &space_bytes,
                                         sizeof(space_bytes));
    if (cublasLtMatmulAlgoGetHeuristic(handle, op, a, b, d, d, pref, 1, &best, &found) != CUBLAS_STATUS_SUCCESS ||
        !found)
        return 0.0f;
    must(cudaStreamBeginCapture(l->stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < n_launches; i++)
        cublasLtMatmul(handle, op, &one, pool + i % copies * w_bytes, a, x, b, &zero, out, d, out, d, &best.algo, space,
                       space_bytes, l->stream);
    must(cudaStreamEndCapture(l->stream, &graph), "capture");
    return replay(l, graph, n_launches);
}
#endif

/* Weights rotate through a pool much larger than L2. Products of BF16 are stored and no more, as those of cuBLASLt that
 * bench_exact.py times; integers end as in a model. */
static void time_card(struct tlc_launch l, enum tl_wtype type)
{
    static const int shapes[][2] = {{3072, 2048}, {2048, 2048}, {10240, 2048}, {2048, 5120}, {35008, 2048}};
    static const enum tlc_epi epis[] = {TLC_EPI_STORE, TLC_EPI_RESIDUAL, TLC_EPI_SILU_MUL, TLC_EPI_RESIDUAL,
                                        TLC_EPI_STORE};
    static const int ms[] = {2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096};
    static const char *names[] = {"16x32",    "16x64",   "64x64",   "128x128", "w128x64", "w128x128",
                                  "w128x256", "split1",  "split2",  "split4",  "wide80",  "s64x32/4",
                                  "s64x64/4", "s128x32", "s128x64", "waves",   "chosen"};
    size_t pool_bytes = (size_t)512 << 20, size = type == TL_W_BF16 ? 2 : 1;
    uint8_t *pool = (uint8_t *)device(pool_bytes), *x = (uint8_t *)device((size_t)ROWS_MAX * 5120 * size);
    float *scales = (float *)device(65536 * 4), *out = (float *)device((size_t)ROWS_MAX * 35008 * 4);
    int32_t *rows = (int32_t *)device(ROWS_MAX * 4), *n_dev = (int32_t *)device(4);
    double limit = type == TL_W_BF16 ? 989.0 : 1979.0;
    int32_t order[ROWS_MAX];
    for (int i = 0; i < ROWS_MAX; i++)
        order[i] = i;
    must(cudaMemcpy(rows, order, sizeof(order), cudaMemcpyHostToDevice), "copy");
    must(cudaMemset(scales, 0x3a, 65536 * 4), "set");
    must(cudaMemset(out, 0, (size_t)ROWS_MAX * 35008 * 4), "set");
    if (type == TL_W_BF16) { /* numbers as of a model: what switches in the card costs power, and so speed */
        fill_bf16<<<1024, 256>>>((__nv_bfloat16 *)pool, pool_bytes / 2, 0.03f);
        fill_bf16<<<1024, 256>>>((__nv_bfloat16 *)x, (size_t)ROWS_MAX * 5120, 1.0f);
    } else {
        fill_int8<<<1024, 256>>>((uint32_t *)pool, pool_bytes / 4);
        fill_int8<<<1024, 256>>>((uint32_t *)x, (size_t)ROWS_MAX * 5120 / 4);
    }
    must(cudaDeviceSynchronize(), "fill");
    l.dependent = l.cc >= 90;
    must(cudaStreamCreate(&l.stream), "stream");
    printf("\n%s: microseconds per launch by tile (stored rows x tokens, w = wgmma); weights from HBM; limits 4.66 "
           "TB/s, %.0f TOP/s\n%6s %6s %5s",
           tl_wtype_name(type), limit, "N", "K", "M");
    for (int t = 0; t <= N_TILES; t++)
        printf(" %10s", names[t]);
    printf("   TB/s  share   TOP/s  share  cublasLt\n");
    for (int s = 0; s < 5; s++)
        for (int c = 0; c < 10; c++) {
            int n_out = shapes[s][0], k = shapes[s][1], n = ms[c], n_launches = n > 1024 ? 4 : 24;
            size_t w_bytes = (size_t)n_out * k * size, copies = pool_bytes / w_bytes;
            struct problem p = {};
            struct tlc_set set = {rows, n_dev, n};
            float us = 0.0f;
            enum tlc_epi epi = type == TL_W_BF16 ? TLC_EPI_STORE : epis[s];
            p.m.wtype = type;
            p.m.gated = epi == TLC_EPI_SILU_MUL;
            p.m.n_out = n_out;
            p.m.n_in = p.m.k_pad = k;
            p.m.n_tiles = n_out / 16;
            p.m.row_scale = scales;
            p.a.ld = k;
            p.a.scale = scales;
            p.a.q = (int8_t *)x;
            p.a.b = (__nv_bfloat16 *)x;
            must(cudaMemcpy(n_dev, &n, 4, cudaMemcpyHostToDevice), "copy");
            printf("%6d %6d %5d", n_out, k, n);
            for (int tile = 0; tile <= N_TILES; tile++) {
                cudaGraph_t graph;
                bool slow = (tile != MMA_128x128 && tile < WG_128x64 && n > 256) ||
                            ((tile == WG_128x128 || tile == WG_128x256) && n < 64) ||
                            (tile >= SPLIT_1 && tile <= WIDE_80 && n > 64) ||
                            (tile >= SLICES_64x32_4 && tile < WAVES && (int64_t)n * n_out > 6 << 20) ||
                            (tile == WAVES && n < 64) || (type == TL_W_BF16 && tile < WG_128x64);
                if (!tile_exists(type, tile, l.cc) || slow || (tile == WIDE_80 && k > WD_K * WG_K)) {
                    printf(" %10s", "-");
                    continue;
                }
                if (n >= 128)
                    usleep(20000); /* the card has cooled down from the last tile */
                must(cudaStreamBeginCapture(l.stream, cudaStreamCaptureModeGlobal), "capture");
                for (int i = 0; i < n_launches; i++) {
                    p.m.rows8 = (int8_t *)(pool + i % copies * w_bytes);
                    p.m.rows16 = (uint16_t *)p.m.rows8;
                    must(launch_tile(&l, &p, &set, (struct tlc_out){epi, out, p.m.gated ? n_out / 2 : n_out}, tile),
                         "launch");
                }
                must(cudaStreamEndCapture(l.stream, &graph), "capture");
                us = replay(&l, graph, n_launches);
                printf(" %10.2f", us);
            }
            printf(" %6.2f %5.1f%% %7.1f %5.1f%%", w_bytes / us * 1e-6, w_bytes / us * 1e-6 / 4.66 * 100.0,
                   2.0 * n * n_out * k / us * 1e-6, 2.0 * n * n_out * k / us * 1e-6 / limit * 100.0);
#ifdef WITH_CUBLASLT
            if (type == TL_W_INT8)
                printf(" %8.2f", time_cublas(&l, pool, pool_bytes, (int8_t *)x, k, n, n_out, k, out, n_launches));
#endif
            printf("\n");
            fflush(stdout);
        }
    must(cudaStreamSynchronize(l.stream), "times");
    cudaStreamDestroy(l.stream);
    cudaFree(pool);
    cudaFree(x);
    cudaFree(scales);
    cudaFree(out);
    cudaFree(rows);
    cudaFree(n_dev);
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "both";
    struct tlc_launch l = {};
    struct cudaDeviceProp prop;
    int n_cards = 0;
    if (argc > 2)
        tile_last = atoi(argv[2]);
    if (argc > 3)
        type_only = argv[3];
    check_tile(16, 32, 1, 1, 4, 256);
    check_tile(16, 64, 1, 1, 8, 256);
    check_tile(64, 64, 4, 1, 2, 128);
    check_tile(128, 128, 4, 2, 1, 128);
    check_tile(16, 32, 1, 2, 1, 128);
    check_tile(64, 64, 4, 2, 1, 128);
    if (cudaGetDeviceCount(&n_cards) != cudaSuccess || n_cards == 0) {
        printf("no card: only the index maths was checked\n");
    } else {
        must(cudaGetDeviceProperties(&prop, 0), "device");
        l.sms = prop.multiProcessorCount;
        l.cc = 10 * prop.major + prop.minor;
        printf("%s, sm_%d, %d multiprocessors\n", prop.name, l.cc, l.sms);
        if (strcmp(what, "time") != 0)
            check_card(&l);
        if (strcmp(what, "check") != 0) {
            if (type_wanted(TL_W_INT8))
                time_card(l, TL_W_INT8);
            if (type_wanted(TL_W_BF16))
                time_card(l, TL_W_BF16);
        }
    }
    printf("check_linear: %ld checks, %ld failed\n", n_checks, n_failed);
    return n_failed ? 1 : 0;
}
