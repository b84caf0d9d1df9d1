/* server/listen.h - the listening sockets, bound before anything slow starts. Thread: main. */
#ifndef TL_SERVER_LISTEN_H
#define TL_SERVER_LISTEN_H

#include "../engine/tinyloop.h"

/* A bound, listening, non-blocking TCP socket. Errors: TL_ERR_BAD_PARAM (no such address), TL_ERR_IO (in use, not allowed). */
enum tl_status tl_listen(int *fd_out, const char *host, int port, struct tl_error *err);
/* The address of a socket as "127.0.0.1:8080" or "[::1]:8080", or "unix"; and its port (0 = none). */
int tl_listen_name(int fd, char *out, size_t cap);
bool tl_listen_is_loopback(const char *host); /* every address of the name is */
bool tl_listen_inherited(int fd);             /* a listening stream socket: made ready for use here */

#endif
