#include "systemd.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

void tl_systemd_notify(const char *fmt, ...)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    char text[256];
    if (!path || !path[0] || strlen(path) >= sizeof(to.sun_path))
        return;
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof(text), fmt, ap);
    va_end(ap);
    if (n < 0)
        return;
    if ((size_t)n >= sizeof(text))
        n = sizeof(text) - 1;
    size_t len = strlen(path);
    memcpy(to.sun_path, path, len);
    if (to.sun_path[0] == '@')
        to.sun_path[0] = '\0'; /* an abstract socket */
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    ssize_t sent = sendto(fd, text, (size_t)n, MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&to,
                          (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len));
    (void)sent; /* a manager that does not listen is its own affair */
    close(fd);
}

/* The variable counts only if it was meant for this process. */
static long variable_for_us(const char *name, const char *pid_name)
{
    const char *value = getenv(name), *pid = getenv(pid_name);
    if (!value || (pid && strtol(pid, NULL, 10) != (long)getpid()))
        return 0;
    long v = strtol(value, NULL, 10);
    return v > 0 ? v : 0;
}

double tl_systemd_watchdog_s(void) { return (double)variable_for_us("WATCHDOG_USEC", "WATCHDOG_PID") / 1e6 / 3.0; }

int tl_systemd_listen_fds(void)
{
    if (!getenv("LISTEN_PID"))
        return 0;
    long n = variable_for_us("LISTEN_FDS", "LISTEN_PID");
    return n > 8 ? 8 : (int)n;
}
