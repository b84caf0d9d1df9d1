/* cuda/linear_tiles.cuh - the tiles of a weight matrix that a block multiplies, all of them in its shared memory: what the kernels of
 * one row (linear_one.cu) and of few rows (linear_few.cu) have in common. Weights depend on nothing, so a block asks for its tiles
 * before it waits for the kernels in front: they stream in while those still run. */
#ifndef TLC_LINEAR_TILES_CUH
#define TLC_LINEAR_TILES_CUH

#include "weights_ring.cuh"

#define TILES_MAX 8
#define TILE_ROOM (90 * 1024) /* of a block, in bytes, if one tile is not larger: two kernels must fit into an SM */
#define SLICE     256         /* inputs of a BF16 slice */

struct tiles {
    const uint8_t *w;
    const float *row_scale;
    int64_t n_out;
    int n_tiles, k_pad;
    int room; /* bytes of a tile in shared memory */
    int most; /* tiles of a block, at most: blockIdx.x, blockIdx.x + gridDim.x, ... */
};

/* Bytes from one row of a tile in shared memory to the next: no two of the rows that are read at once share a bank. */
__host__ __device__ static inline int pitch_of(int w, int k_pad)
{
    return w == TL_W_INT8 ? (k_pad + 127) / 128 * 128 + 32 : k_pad * 2 + 16;
}

/* How a matrix is divided among blocks; *waves: blocks of a multiprocessor, one after the other. */
static inline struct tiles tiles_of(const struct tl_mat *m, int sms, int *grid, int *waves)
{
    struct tiles f = {};
    int most;
    f.w = m->wtype == TL_W_INT4   ? m->tiles
          : m->wtype == TL_W_INT8 ? (const uint8_t *)m->rows8
                                  : (const uint8_t *)m->rows16;
    f.row_scale = m->row_scale;
    f.n_out = m->n_out;
    f.n_tiles = (int)m->n_tiles;
    f.k_pad = (int)m->k_pad;
    f.room = m->wtype == TL_W_INT4 ? (int)m->tile_bytes : 16 * pitch_of(m->wtype, (int)m->k_pad);
    most = m->wtype == TL_W_BF16 || f.room > TILE_ROOM ? 1 : TILE_ROOM / f.room;
    most = most > TILES_MAX ? TILES_MAX : most;
    *waves = 1;
    while ((f.n_tiles + sms * *waves - 1) / (sms * *waves) > most)
        ++*waves;
    f.most = (f.n_tiles + sms * *waves - 1) / (sms * *waves);
    *grid = f.n_tiles < sms * *waves ? f.n_tiles : sms * *waves;
    return f;
}

__device__ static __forceinline__ int tiles_of_block(const struct tiles *f)
{
    return (f->n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* Ask for this block's tiles; called by warp 0. *full: a barrier that is passed once all of them are there. */
template <int W>
__device__ static __forceinline__ void ask_for_tiles(const struct tiles *f, uint64_t *full, uint8_t *ring)
{
    int size = W == TL_W_BF16 ? 2 : 1;
    if (threadIdx.x == 0)
        bar_init(full, tiles_of_block(f));
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
    __syncwarp();
    for (int tile = blockIdx.x; tile < f->n_tiles; tile += (int)gridDim.x, ring += f->room) {
        if (W == TL_W_INT4)
            copy_rows(ring, 0, f->w + (int64_t)tile * f->room, 0, 1, f->room, full);
        else
            copy_rows(ring, pitch_of(W, f->k_pad), f->w + (int64_t)tile * 16 * f->k_pad * size,
                      (int64_t)f->k_pad * size, 16, f->k_pad * size, full);
    }
}

/* Where chunk c (64 inputs) of an INT4 tile has its weights and its scales. */
__device__ static __forceinline__ int chunk_at(int c) { return c / 16 * 16 * 528 + c % 16 * 512; }
__device__ static __forceinline__ int chunk_scales_at(int c, int chunks)
{
    return c / 16 * 16 * 528 + min(16, chunks - c / 16 * 16) * 512 + c % 16 * 16;
}

#endif
