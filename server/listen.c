#include "listen.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static enum tl_status resolve(struct addrinfo **out, const char *host, int port, struct tl_error *err)
{
    char service[8];
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    snprintf(service, sizeof(service), "%d", port);
    int rc = getaddrinfo(host[0] ? host : NULL, service, &hints, out);
    if (rc == 0)
        return TL_OK;
    return tl_fail(err, TL_ERR_BAD_PARAM, "cannot listen on '%.100s': %s", host, gai_strerror(rc));
}

enum tl_status tl_listen(int *fd_out, const char *host, int port, struct tl_error *err)
{
    struct addrinfo *list = NULL;
    const char *step = "socket";
    int on = 1, fd = -1;
    *fd_out = -1;
    enum tl_status st = resolve(&list, host, port, err);
    if (st != TL_OK)
        return st;
    fd = socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        goto fail;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    step = "bind";
    if (bind(fd, list->ai_addr, list->ai_addrlen) != 0)
        goto fail;
    step = "listen";
    if (listen(fd, SOMAXCONN) != 0)
        goto fail;
    freeaddrinfo(list);
    *fd_out = fd;
    return TL_OK;
fail:
    st = tl_fail(err, TL_ERR_IO, "cannot listen on %.100s port %d: %s: %s", host, port, step, strerror(errno));
    freeaddrinfo(list);
    if (fd >= 0)
        close(fd);
    return st;
}

int tl_listen_name(int fd, char *out, size_t cap)
{
    struct sockaddr_storage ss = {0};
    socklen_t len = sizeof(ss);
    char text[INET6_ADDRSTRLEN];
    if (getsockname(fd, (struct sockaddr *)&ss, &len) == 0) {
        if (ss.ss_family == AF_INET) {
            const struct sockaddr_in *a = (const struct sockaddr_in *)&ss;
            inet_ntop(AF_INET, &a->sin_addr, text, sizeof(text));
            snprintf(out, cap, "%s:%d", text, ntohs(a->sin_port));
            return ntohs(a->sin_port);
        }
        if (ss.ss_family == AF_INET6) {
            const struct sockaddr_in6 *a = (const struct sockaddr_in6 *)&ss;
            inet_ntop(AF_INET6, &a->sin6_addr, text, sizeof(text));
            snprintf(out, cap, "[%s]:%d", text, ntohs(a->sin6_port));
            return ntohs(a->sin6_port);
        }
    }
    snprintf(out, cap, "unix");
    return 0;
}

bool tl_listen_is_loopback(const char *host)
{
    struct addrinfo *list = NULL;
    bool all = true;
    if (resolve(&list, host, 0, NULL) != TL_OK)
        return false;
    for (struct addrinfo *a = list; a; a = a->ai_next) {
        if (a->ai_family == AF_INET) {
            const struct sockaddr_in *in = (const struct sockaddr_in *)a->ai_addr;
            all = all && (ntohl(in->sin_addr.s_addr) >> 24) == 127;
        } else {
            all = all && a->ai_family == AF_INET6 &&
                  IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)a->ai_addr)->sin6_addr);
        }
    }
    freeaddrinfo(list);
    return all;
}

bool tl_listen_inherited(int fd)
{
    int type = 0, listening = 0;
    socklen_t len = sizeof(type);
    if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &len) != 0 || type != SOCK_STREAM)
        return false;
    len = sizeof(listening);
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &len) != 0 || !listening)
        return false;
    return fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 && fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0;
}
