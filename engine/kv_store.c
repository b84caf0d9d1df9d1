#include "kv_store.h"

#include "mem.h"

static size_t state_row_bytes(const struct tl_arch_spec *spec)
{
    return (size_t)spec->d_model * sizeof(float) * (spec->inject == TL_INJECT_NONE ? 1 : 2);
}

size_t tl_kv_page_bytes(const struct tl_arch_spec *spec, enum tl_kv_format format)
{
    size_t elem = format == TL_KV_F32 ? 4 : 2, bytes, row = state_row_bytes(spec);
    if (__builtin_mul_overflow((size_t)tl_kv_dim(spec) * 2 * TL_BLOCK_TOKENS, elem, &bytes))
        return 0;
    if (bytes < row) /* a page must hold at least one row of state */
        bytes = row;
    return (bytes + 63) / 64 * 64;
}

int tl_kv_state_rows_per_page(const struct tl_arch_spec *spec, size_t page_bytes)
{
    size_t rows = page_bytes / state_row_bytes(spec);
    return rows > 4096 ? 4096 : (int)rows;
}

enum tl_status tl_kv_create(struct tl_kv **out, struct tl_backend *be, const struct tl_arch_spec *spec,
                            enum tl_kv_format format, int64_t n_pages, int chunk_rows, struct tl_error *err)
{
    struct tl_kv *kv = NULL;
    enum tl_status st = TL_ERR_NO_HOST_MEMORY;
    size_t page_bytes = tl_kv_page_bytes(spec, format), arena;

    *out = NULL;
    if (n_pages < 1 || n_pages > INT32_MAX || !page_bytes ||
        __builtin_mul_overflow(page_bytes, (size_t)n_pages, &arena))
        return tl_fail(err, TL_ERR_BAD_PARAM, "the KV store cannot have %lld pages of %zu bytes", (long long)n_pages,
                       page_bytes);
    kv = tl_calloc(1, sizeof(*kv));
    if (!kv)
        return tl_fail_host_memory(err, sizeof(*kv));
    kv->be = be;
    kv->spec = spec;
    kv->chunk_rows = chunk_rows;
    kv->n_pages = kv->n_free = (int32_t)n_pages;
    kv->view.page_bytes = page_bytes;
    kv->view.format = format;
    kv->view.state_rows_per_page = tl_kv_state_rows_per_page(spec, page_bytes);
    kv->free_stack = tl_array((size_t)n_pages, sizeof(*kv->free_stack));
    kv->refs = tl_calloc((size_t)n_pages, sizeof(*kv->refs));
    if (!kv->free_stack || !kv->refs) {
        tl_fail_host_memory(err, (size_t)n_pages * 8);
        goto out;
    }
    st = be->ops->buf_alloc(be, arena, &kv->view.arena, err);
    if (st != TL_OK)
        goto out;
    for (int32_t i = 0; i < kv->n_pages; i++)
        kv->free_stack[i] = kv->n_pages - 1 - i; /* low pages first */
    *out = kv;
    kv = NULL;
out:
    tl_kv_free(kv);
    return st;
}

void tl_kv_free(struct tl_kv *kv)
{
    if (!kv)
        return;
    kv->be->ops->buf_free(kv->be, kv->view.arena);
    tl_free(kv->free_stack);
    tl_free(kv->refs);
    tl_free(kv);
}

int64_t tl_kv_available(const struct tl_kv *kv) { return kv->n_free - kv->n_reserved; }

bool tl_kv_reserve(struct tl_kv *kv, int64_t n)
{
    if (n > tl_kv_available(kv))
        return false;
    kv->n_reserved += n;
    return true;
}

void tl_kv_unreserve(struct tl_kv *kv, int64_t n)
{
    TL_ASSERT(n >= 0 && n <= kv->n_reserved);
    kv->n_reserved -= n;
}

int32_t tl_kv_take(struct tl_kv *kv, int64_t *reserved)
{
    int32_t page;
    TL_ASSERT(*reserved > 0 && kv->n_reserved > 0 && kv->n_free > 0);
    --*reserved;
    kv->n_reserved--;
    page = kv->free_stack[--kv->n_free];
    TL_ASSERT(kv->refs[page] == 0);
    kv->refs[page] = 1;
    if (kv->n_pages - kv->n_free > kv->n_used_peak)
        kv->n_used_peak = kv->n_pages - kv->n_free;
    return page;
}

void tl_kv_ref(struct tl_kv *kv, int32_t page)
{
    TL_ASSERT(kv->refs[page] > 0);
    kv->refs[page]++;
}

bool tl_kv_unref(struct tl_kv *kv, int32_t page)
{
    TL_ASSERT(page >= 0 && page < kv->n_pages && kv->refs[page] > 0);
    if (--kv->refs[page])
        return false;
    kv->free_stack[kv->n_free++] = page;
    return true;
}
