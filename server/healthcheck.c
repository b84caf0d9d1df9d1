#include "healthcheck.h"

#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define TIMEOUT_S 3

/* The whole answer, as far as it fits. Returns its length, or -1. */
static int ask(const char *host, int port, char *out, size_t cap)
{
    char service[8], request[200];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *list = NULL;
    struct timeval limit = {.tv_sec = TIMEOUT_S};
    int n = -1, fd = -1;
    /* listening on all addresses is reachable on the local one */
    if (!host[0] || strcmp(host, "0.0.0.0") == 0)
        host = "127.0.0.1";
    if (strcmp(host, "::") == 0)
        host = "::1";
    snprintf(service, sizeof(service), "%d", port);
    if (getaddrinfo(host, service, &hints, &list) != 0)
        return -1;
    fd = socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        goto out;
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    if (connect(fd, list->ai_addr, list->ai_addrlen) != 0)
        goto out;
    int len =
        snprintf(request, sizeof(request), "GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    if (send(fd, request, (size_t)len, MSG_NOSIGNAL) != len)
        goto out;
    n = 0;
    while ((size_t)n < cap - 1) {
        ssize_t got = recv(fd, out + n, cap - 1 - (size_t)n, 0);
        if (got <= 0)
            break;
        n += (int)got;
    }
    out[n] = '\0';
out:
    if (fd >= 0)
        close(fd);
    freeaddrinfo(list);
    return n;
}

int tl_healthcheck(const char *host, int port)
{
    char text[4096];
    int n = ask(host, port, text, sizeof(text));
    if (n <= 0) {
        printf("no answer from %s port %d\n", host, port);
        return 1;
    }
    const char *body = strstr(text, "\r\n\r\n");
    printf("%s\n", body ? body + 4 : text);
    return strncmp(text, "HTTP/1.1 200", 12) == 0 ? 0 : 1;
}
