/* server/render.h - what the answers of both generating routes have in common. Thread: loop. */
#ifndef TL_SERVER_RENDER_H
#define TL_SERVER_RENDER_H

#include "flight.h"

/* What the objects of a route are called. */
struct tl_object_names {
    const char *id_prefix, *whole, *event; /* "cmpl-", the "object" of an answer and of a stream's event */
};

/* A token with what was asked to be reported about it. */
struct tl_seen {
    int32_t token;
    float logprob;
    int n_top;
    size_t top_at; /* first of its alternatives */
};

const char *tl_render_finish(const struct tl_out_end *e); /* "length" or "stop" */
void tl_render_usage(struct tl_jw *w, const char *key, const struct tl_flight *f);
/* "warnings": that loops is beyond the depth of the model's training. */
void tl_render_warnings(struct tl_jw *w, int loops, const struct tl_model_info *info);
void tl_render_tinyloop(struct tl_jw *w, const char *key, const struct tl_flight *f, const char *stop_detail);
/* The text of a token: its piece, or "bytes:\xNN..." where that is no whole character. */
void tl_render_piece(struct tl_bytes *out, const struct tl_tokenizer *tk, int32_t token);

/* From "{" to the opened array of choices. */
void tl_render_head(const struct tl_flight *f, struct tl_jw *w, const struct tl_object_names *names);
/* One event of a stream around its choices. head: empty before the first event, then what all begin with. */
void tl_render_event_open(struct tl_flight *f, struct tl_jw *w, struct tl_bytes *head,
                          const struct tl_object_names *names);
/* tinyloop_detail NULL: without that object, which the last event has. */
void tl_render_event_close(struct tl_flight *f, struct tl_jw *w, bool with_usage, const char *tinyloop_detail);

/* The end of an answer: the last event of a stream, or the whole object with n choices. */
struct tl_ending {
    const struct tl_object_names *names;
    struct tl_bytes *head; /* of events, as above */
    int n;
    void (*choice)(struct tl_flight *f, struct tl_jw *w, int i);
    const char *detail;
};
void tl_render_end(struct tl_flight *f, const struct tl_ending *e);

/* Room for `more` beyond n of an array of `size` bytes each; false sets *failed. */
bool tl_render_room(void **array, size_t *cap, size_t n, size_t more, size_t size, bool *failed);

#endif
