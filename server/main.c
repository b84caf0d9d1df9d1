/* tinyloopd: settings -> sockets -> event loop and worker -> exit code.
 * Exit codes: 0 ended as asked, 1 could not start, 2 wrong settings or model, 3 the worker failed, 128 + n second signal. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "boot_manifest.h"
#include "definitions.h"
#include "evloop.h"
#include "healthcheck.h"
#include "listen.h"
#include "log.h"
#include "systemd.h"

enum { EXIT_SETTINGS = 2 };

extern char **environ;

static enum tl_status check_model(const struct tl_config *cfg, struct tl_error *err)
{
    char path[4096];
    struct stat st;
    if (!cfg->model[0])
        return tl_fail(err, TL_ERR_BAD_PARAM, "no model is named: give --model DIR");
    snprintf(path, sizeof(path), "%s/config.json", cfg->model);
    if (stat(path, &st) != 0)
        return tl_fail_errno(err, "read the model", path, errno);
    return TL_OK;
}

/* As far as that can be told without the model; the worker reads it again when it has one. */
static enum tl_status check_boot_manifest(const struct tl_config *cfg, struct tl_error *err)
{
    struct tl_boot_manifest *b = NULL;
    enum tl_status st = cfg->boot_manifest[0] ? tl_boot_manifest_read(&b, cfg->boot_manifest, err) : TL_OK;
    tl_boot_manifest_free(b);
    return st;
}

/* Without keys anyone who can connect may use the machine: only the machine itself, then, unless that is what is wanted. */
static enum tl_status check_exposure(const struct tl_config *cfg, struct tl_error *err)
{
    if (cfg->api_keys[0] || cfg->insecure)
        return TL_OK;
    if (!tl_listen_is_loopback(cfg->host))
        return tl_fail(err, TL_ERR_BAD_PARAM,
                       "host %s is reachable for others and there are no API keys: set api_keys, or insecure",
                       cfg->host);
    if (cfg->admin_port >= 0 && !tl_listen_is_loopback(cfg->admin_host))
        return tl_fail(err, TL_ERR_BAD_PARAM,
                       "admin_host %s is reachable for others and there are no API keys: set api_keys, or insecure",
                       cfg->admin_host);
    return TL_OK;
}

/* Descriptors for every connection, with some to spare: without them accepting would stop or spin. */
static enum tl_status raise_files(const struct tl_config *cfg, struct tl_error *err)
{
    struct rlimit lim;
    rlim_t want = (rlim_t)cfg->max_connections * 2 + 128;
    if (getrlimit(RLIMIT_NOFILE, &lim) != 0 || lim.rlim_cur >= want)
        return TL_OK;
    if (lim.rlim_max < want)
        return tl_fail(err, TL_ERR_OUT_OF_RANGE, "max_connections %lld needs %llu open files; the limit is %llu",
                       (long long)cfg->max_connections, (unsigned long long)want, (unsigned long long)lim.rlim_max);
    lim.rlim_cur = want;
    if (setrlimit(RLIMIT_NOFILE, &lim) != 0)
        return tl_fail_errno(err, "raise the limit of", "open files", errno);
    return TL_OK;
}

/* Inherited sockets first: the public one, then the admin one. Bound before the model is loaded, so that a taken port is
 * known at once. */
static enum tl_status open_sockets(const struct tl_config *cfg, int *public_fd, int *admin_fd, struct tl_error *err)
{
    char name[80];
    int inherited = tl_systemd_listen_fds();
    enum tl_status st = TL_OK;
    *public_fd = *admin_fd = -1;
    for (int i = 0; i < inherited && i < 2; i++)
        if (!tl_listen_inherited(3 + i))
            return tl_fail(err, TL_ERR_BAD_PARAM, "inherited descriptor %d is no listening stream socket", 3 + i);
    if (inherited > 0)
        *public_fd = 3;
    else
        st = tl_listen(public_fd, cfg->host, (int)cfg->port, err);
    if (st != TL_OK || cfg->admin_port < 0)
        return st;
    if (inherited > 1) {
        *admin_fd = 4;
        return TL_OK;
    }
    int port = (int)cfg->admin_port;
    if (port == 0 && cfg->port != 0)
        port = tl_listen_name(*public_fd, name, sizeof(name)) + 1;
    st = tl_listen(admin_fd, cfg->admin_host, port == 65536 ? 0 : port, err);
    if (st != TL_OK) {
        close(*public_fd);
        *public_fd = -1;
    }
    return st;
}

static enum tl_status prepare(struct tl_server *s, int *public_fd, int *admin_fd, struct tl_error *err)
{
    const struct tl_config *cfg = s->cfg;
    s->state_lock = -1;
    enum tl_status st = check_exposure(cfg, err);
    if (st == TL_OK)
        st = check_model(cfg, err);
    if (st == TL_OK && cfg->api_keys[0])
        st = tl_keys_read(&s->keys, cfg->api_keys, err);
    if (st == TL_OK)
        st = check_boot_manifest(cfg, err);
    if (st == TL_OK)
        st = raise_files(cfg, err);
    if (st == TL_OK && cfg->state_dir[0])
        st = tl_state_dir_open(cfg->state_dir, &s->state_lock, err);
    if (st == TL_OK)
        st = open_sockets(cfg, public_fd, admin_fd, err);
    s->local_hosts_only = s->keys.n == 0 && tl_listen_is_loopback(cfg->host);
    s->admin_local_hosts_only = s->keys.n == 0 && tl_listen_is_loopback(cfg->admin_host);
    return st;
}

static int serve(const struct tl_config *cfg)
{
    static struct tl_server server; /* large, and there is one */
    struct tl_error err;
    int public_fd = -1, admin_fd = -1, code;
    server.cfg = cfg;
    signal(SIGPIPE, SIG_IGN);
    tl_log_setup(strcmp(cfg->log_level, "error") == 0  ? TL_LOG_ERROR
                 : strcmp(cfg->log_level, "warn") == 0 ? TL_LOG_WARN
                 : strcmp(cfg->log_level, "info") == 0 ? TL_LOG_INFO
                                                       : TL_LOG_DEBUG,
                 strcmp(cfg->log_format, "json") == 0);
    if (prepare(&server, &public_fd, &admin_fd, &err) != TL_OK) {
        fprintf(stderr, "tinyloopd: %s\n", err.msg);
        code = EXIT_SETTINGS;
    } else {
        if (!cfg->api_keys[0] && cfg->insecure)
            tl_log(TL_LOG_WARN, "insecure: everyone who can connect may use this server");
        code = tl_evloop_run(&server, public_fd, admin_fd);
    }
    tl_keys_free(&server.keys);
    if (server.state_lock >= 0)
        close(server.state_lock);
    return code;
}

int main(int argc, char **argv)
{
    struct tl_config cfg;
    struct tl_error err;
    enum tl_config_action action;
    int code = 0;
    if (tl_config_read(&cfg, argc, argv, environ, &action, &err) != TL_OK) {
        fprintf(stderr, "tinyloopd: %s\n", err.msg);
        code = EXIT_SETTINGS;
    } else if (action == TL_SHOW_HELP) {
        tl_config_help(stdout);
    } else if (action == TL_SHOW_VERSION) {
        printf("tinyloopd " TL_VERSION "\n");
    } else if (action == TL_PRINT_CONFIG) {
        tl_config_print(&cfg, stdout);
    } else if (action == TL_CHECK_CONFIG) {
        struct tl_keys keys = {0};
        enum tl_status st = check_exposure(&cfg, &err);
        if (st == TL_OK && cfg.api_keys[0])
            st = tl_keys_read(&keys, cfg.api_keys, &err);
        if (st == TL_OK && cfg.model[0])
            st = check_model(&cfg, &err);
        if (st == TL_OK)
            st = check_boot_manifest(&cfg, &err);
        tl_keys_free(&keys);
        if (st == TL_OK)
            printf("tinyloopd: the settings are sound\n");
        else
            fprintf(stderr, "tinyloopd: %s\n", err.msg);
        code = st == TL_OK ? 0 : EXIT_SETTINGS;
    } else if (action == TL_HEALTHCHECK) {
        code = tl_healthcheck(cfg.host, (int)cfg.port);
    } else {
        code = serve(&cfg);
    }
    tl_config_clear(&cfg);
    return code;
}
