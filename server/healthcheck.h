/* server/healthcheck.h - ask a running daemon whether it is ready: for containers, whose images have no HTTP client. */
#ifndef TL_SERVER_HEALTHCHECK_H
#define TL_SERVER_HEALTHCHECK_H

/* Prints one line. Returns the exit code: 0 ready, 1 not. */
int tl_healthcheck(const char *host, int port);

#endif
