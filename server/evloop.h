/* server/evloop.h - the event loop: signals, timers, news from the worker, and the order in which everything ends.
 *
 * loading --worker ready--> ready --SIGTERM--> draining --all answered, or shutdown_timeout--> end
 * A worker that fails while loading ends the process with 2. One that fails later turns both probes red, its requests get an
 * error, and the process ends with 3 a little later. A second signal ends it at once. */
#ifndef TL_SERVER_EVLOOP_H
#define TL_SERVER_EVLOOP_H

#include "server.h"

/* Serve on the bound sockets (admin_fd -1: none) until the end. Returns the exit code. Thread: the loop's own. */
int tl_evloop_run(struct tl_server *s, int public_fd, int admin_fd);

#endif
