/* Load for a running daemon, from one thread over epoll. Prints one line of figures; exit 0 if nothing went wrong.
 *   load livez PORT CONNECTIONS SECONDS          GET /livez on kept connections
 *   load sse PORT STREAMS TOKENS LOOPS           as many streams at once; needs --stream-timestamps true
 *   load leave PORT REQUESTS PARALLEL SEED       completions whose client leaves at random, in every way there is */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define BUFFER         65536
#define LINE_MAX_CHARS 8192

enum body { BODY_HEAD, BODY_LENGTH, BODY_CHUNK_SIZE, BODY_CHUNK, BODY_CHUNK_END, BODY_DONE };
enum leaving { STAY, CLOSE, RESET, HALF_CLOSE };

struct conn {
    int fd;
    enum body state;
    char head[4096], line[LINE_MAX_CHARS];
    size_t n_head, n_line, left;
    int status;
    int64_t tokens, promised; /* tokens seen in events; those that usage speaks of */
    bool stream, last_chunk, done_mark;
    enum leaving leaving;
    int leave_after; /* bytes of the answer */
    int got;
};

static int port, epfd;
static double *late;
static size_t n_late, cap_late;
static int64_t total_tokens;

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + (double)ts.tv_nsec * 1e-9;
}

static void die(const char *what)
{
    perror(what);
    exit(2);
}

static void open_conn(struct conn *c)
{
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = c};
    int on = 1;
    memset(c, 0, sizeof(*c));
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0)
        die("socket");
    if (connect(c->fd, (struct sockaddr *)&to, sizeof(to)) != 0)
        die("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    if (epoll_ctl(epfd, EPOLL_CTL_ADD, c->fd, &ev) != 0)
        die("epoll_ctl");
}

static void close_conn(struct conn *c)
{
    if (c->fd >= 0)
        close(c->fd);
    c->fd = -1;
}

static void send_all(struct conn *c, const char *text, size_t n)
{
    if (send(c->fd, text, n, MSG_NOSIGNAL) != (ssize_t)n)
        die("send");
}

static void post(struct conn *c, const char *body)
{
    char text[2048];
    int n = snprintf(text, sizeof(text),
                     "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                     "Content-Length: %zu\r\n\r\n%s",
                     strlen(body), body);
    c->state = BODY_HEAD;
    c->n_head = c->n_line = 0;
    send_all(c, text, (size_t)n);
}

/* ---- what comes back ---------------------------------------------------------------------------------------------- */

static void on_line(struct conn *c)
{
    const char *p;
    c->line[c->n_line] = '\0';
    if (strncmp(c->line, ": at ", 5) == 0) {
        if (n_late == cap_late) {
            cap_late = cap_late ? cap_late * 2 : 65536;
            late = realloc(late, cap_late * sizeof(*late));
            if (!late)
                die("memory");
        }
        late[n_late++] = now() - strtod(c->line + 5, NULL);
    } else if (strcmp(c->line, "data: [DONE]") == 0) {
        c->done_mark = true;
    } else if ((p = strstr(c->line, "\"tokens\":[")) != NULL) {
        c->tokens += p[10] != ']';
        total_tokens += p[10] != ']';
    }
    if ((p = strstr(c->line, "\"completion_tokens\":")) != NULL)
        c->promised = strtoll(p + 20, NULL, 10);
    c->n_line = 0;
}

static void on_payload(struct conn *c, const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\n')
            on_line(c);
        else if (c->n_line < LINE_MAX_CHARS - 1)
            c->line[c->n_line++] = p[i];
    }
}

static void on_head(struct conn *c)
{
    const char *p;
    c->head[c->n_head] = '\0';
    c->status = atoi(c->head + 9);
    c->stream = strcasestr(c->head, "Transfer-Encoding: chunked") != NULL;
    p = strcasestr(c->head, "Content-Length: ");
    c->left = p ? strtoul(p + 16, NULL, 10) : 0;
    c->state = c->stream ? BODY_CHUNK_SIZE : c->left ? BODY_LENGTH : BODY_DONE;
    c->n_head = 0;
}

/* Returns the bytes that belong to this answer. */
static size_t feed(struct conn *c, const char *p, size_t n)
{
    size_t i = 0;
    while (i < n && c->state != BODY_DONE) {
        size_t m = n - i;
        switch (c->state) {
        case BODY_HEAD:
        case BODY_CHUNK_SIZE:
        case BODY_CHUNK_END:
            if (c->n_head >= sizeof(c->head) - 1)
                die("a line too long");
            c->head[c->n_head++] = p[i++];
            if (c->state == BODY_HEAD) {
                if (c->n_head >= 4 && memcmp(c->head + c->n_head - 4, "\r\n\r\n", 4) == 0)
                    on_head(c);
            } else if (c->head[c->n_head - 1] == '\n') {
                c->head[c->n_head] = '\0';
                if (c->state == BODY_CHUNK_END) {
                    c->state = c->last_chunk ? BODY_DONE : BODY_CHUNK_SIZE;
                } else {
                    c->left = strtoul(c->head, NULL, 16);
                    c->last_chunk = c->left == 0;
                    c->state = c->last_chunk ? BODY_CHUNK_END : BODY_CHUNK;
                }
                c->n_head = 0;
            }
            break;
        case BODY_CHUNK:
        case BODY_LENGTH:
            if (m > c->left)
                m = c->left;
            on_payload(c, p + i, m);
            i += m;
            c->left -= m;
            if (c->left == 0)
                c->state = c->state == BODY_CHUNK ? BODY_CHUNK_END : BODY_DONE;
            break;
        case BODY_DONE: break;
        }
    }
    return i;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* ---- modes -------------------------------------------------------------------------------------------------------- */

static int livez(int n, double seconds)
{
    static const char request[] = "GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n";
    struct conn *conns = calloc((size_t)n, sizeof(*conns));
    struct epoll_event ev[256];
    char buf[BUFFER];
    int64_t done = 0, bad = 0;
    double start = now();
    if (!conns)
        die("memory");
    for (int i = 0; i < n; i++) {
        open_conn(&conns[i]);
        send_all(&conns[i], request, sizeof(request) - 1);
    }
    while (now() - start < seconds) {
        int k = epoll_wait(epfd, ev, 256, 100);
        for (int i = 0; i < k; i++) {
            struct conn *c = ev[i].data.ptr;
            ssize_t got = recv(c->fd, buf, sizeof(buf), 0);
            if (got <= 0)
                die("the server closed a kept connection");
            feed(c, buf, (size_t)got);
            if (c->state != BODY_DONE)
                continue;
            done++;
            bad += c->status != 200;
            c->state = BODY_HEAD;
            send_all(c, request, sizeof(request) - 1);
        }
    }
    double t = now() - start;
    printf("livez requests=%lld bad=%lld per_second=%.0f\n", (long long)done, (long long)bad, (double)done / t);
    free(conns);
    return bad > 0;
}

static int sse(int n, int tokens, int loops)
{
    struct conn *conns = calloc((size_t)n, sizeof(*conns));
    struct epoll_event ev[256];
    char buf[BUFFER], body[400];
    int open = n, bad = 0;
    int64_t lost = 0;
    double start = now();
    if (!conns)
        die("memory");
    for (int i = 0; i < n; i++) {
        open_conn(&conns[i]);
        snprintf(body, sizeof(body),
                 "{\"model\":\"tiny\",\"prompt\":[%d,2,3],\"max_tokens\":%d,\"loops\":%d,\"ignore_eos\":true,"
                 "\"stream\":true,"
                 "\"return_tokens\":true,\"seed\":%d,\"stream_options\":{\"include_usage\":true}}",
                 i % 250, tokens, loops, i);
        post(&conns[i], body);
    }
    while (open > 0 && now() - start < 600) {
        int k = epoll_wait(epfd, ev, 256, 1000);
        for (int i = 0; i < k; i++) {
            struct conn *c = ev[i].data.ptr;
            ssize_t got = recv(c->fd, buf, sizeof(buf), 0);
            if (got > 0)
                feed(c, buf, (size_t)got);
            if (got > 0 && c->state != BODY_DONE)
                continue;
            bad += got <= 0 || c->status != 200 || !c->done_mark;
            lost += c->promised - c->tokens;
            close_conn(c);
            open--;
        }
    }
    double t = now() - start;
    bad += open;
    qsort(late, n_late, sizeof(*late), by_size);
    printf("sse streams=%d tokens=%lld lost=%lld bad=%d seconds=%.2f per_stream=%.1f late_p50_ms=%.3f late_p99_ms=%.3f "
           "late_max_ms=%.3f\n",
           n, (long long)total_tokens, (long long)lost, bad, t, (double)total_tokens / t / n,
           n_late ? late[n_late / 2] * 1e3 : 0, n_late ? late[n_late * 99 / 100] * 1e3 : 0,
           n_late ? late[n_late - 1] * 1e3 : 0);
    free(conns);
    free(late);
    return bad > 0 || lost != 0;
}

static uint64_t random_state;
static int pick(int n) /* 0..n-1 */
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static void leave_start(struct conn *c)
{
    char body[400];
    open_conn(c);
    c->leaving = (enum leaving)pick(4);
    c->leave_after = pick(3) ? pick(3000) : 0;
    int prompt = 1 + pick(4) * 40,
        at = snprintf(body, sizeof(body),
                      "{\"model\":\"tiny\",\"max_tokens\":%d,\"loops\":%d,\"stream\":%s,\"n\":%d,\"prompt\":\"",
                      1 + pick(40), 1 + pick(4), pick(2) ? "true" : "false", 1 + pick(3));
    for (int i = 0; i < prompt; i++)
        body[at++] = (char)('a' + pick(26));
    snprintf(body + at, sizeof(body) - (size_t)at, "\"}");
    post(c, body);
}

static void leave_now(struct conn *c)
{
    struct linger hard = {1, 0};
    if (c->leaving == RESET)
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &hard, sizeof(hard));
    if (c->leaving == HALF_CLOSE)
        shutdown(c->fd, SHUT_WR);
    close_conn(c);
}

static int leave(int requests, int parallel)
{
    struct conn *conns = calloc((size_t)parallel, sizeof(*conns));
    struct epoll_event ev[256];
    char buf[BUFFER];
    int started = 0, ended = 0, answered = 0, refused = 0, left = 0, bad = 0;
    if (!conns)
        die("memory");
    for (int i = 0; i < parallel; i++) {
        leave_start(&conns[i]);
        started++;
    }
    while (ended < requests) {
        int k = epoll_wait(epfd, ev, 256, 1);
        for (int i = 0; i < k; i++) {
            struct conn *c = ev[i].data.ptr;
            ssize_t got = recv(c->fd, buf, sizeof(buf), 0);
            if (got > 0)
                feed(c, buf, (size_t)got);
            c->got += got > 0 ? (int)got : 0;
            if (got > 0 && c->state != BODY_DONE && (c->leaving == STAY || c->got < c->leave_after))
                continue;
            if (got > 0 && c->state == BODY_DONE) {
                answered += c->status == 200;
                refused += c->status == 503;
                bad += c->status != 200 && c->status != 503;
                close_conn(c);
            } else if (got <= 0) {
                bad++;
                close_conn(c);
            } else {
                left++;
                leave_now(c);
            }
        }
        for (int i = 0; i < parallel; i++) { /* some leave before anything has come */
            struct conn *c = &conns[i];
            if (c->fd >= 0 && c->leaving != STAY && c->leave_after == 0 && c->got == 0 && pick(4) == 0) {
                left++;
                leave_now(c);
            }
            if (c->fd >= 0)
                continue;
            ended++;
            c->fd = -2;
            if (started < requests) {
                leave_start(c);
                started++;
            } else {
                memset(c, 0, sizeof(*c));
                c->fd = 1 << 30; /* never again */
                c->leaving = STAY;
            }
        }
    }
    printf("leave requests=%d answered=%d refused=%d left=%d bad=%d\n", ended, answered, refused, left, bad);
    free(conns);
    return bad > 0;
}

int main(int argc, char **argv)
{
    epfd = epoll_create1(0);
    if (argc == 5 && strcmp(argv[1], "livez") == 0) {
        port = atoi(argv[2]);
        return livez(atoi(argv[3]), atof(argv[4]));
    }
    if (argc == 6 && strcmp(argv[1], "sse") == 0) {
        port = atoi(argv[2]);
        return sse(atoi(argv[3]), atoi(argv[4]), atoi(argv[5]));
    }
    if (argc == 6 && strcmp(argv[1], "leave") == 0) {
        port = atoi(argv[2]);
        random_state = (uint64_t)atoll(argv[5]);
        return leave(atoi(argv[3]), atoi(argv[4]));
    }
    fprintf(stderr, "usage: load livez PORT CONNECTIONS SECONDS | sse PORT STREAMS TOKENS LOOPS | leave PORT REQUESTS "
                    "PARALLEL SEED\n");
    return 2;
}
