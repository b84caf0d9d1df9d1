/* server/systemd.h - what a service manager expects: readiness datagrams, the watchdog, inherited sockets.
 * Everything is a no-op without its environment variable. Thread: loop (and main before it starts). */
#ifndef TL_SERVER_SYSTEMD_H
#define TL_SERVER_SYSTEMD_H

/* "READY=1", "STOPPING=1", "WATCHDOG=1", "STATUS=..." to $NOTIFY_SOCKET. */
void tl_systemd_notify(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
double tl_systemd_watchdog_s(void); /* interval at which to feed the watchdog; 0 = none */
int tl_systemd_listen_fds(void);    /* inherited sockets, from descriptor 3 on; 0 = none */

#endif
