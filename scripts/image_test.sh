#!/usr/bin/env bash
# Build the CPU image without a container engine (buildah) and run it as a platform would: uid 10001, no capabilities, read-only root,
# its own process numbers. Needs root on Debian 12; about 4 minutes and 2 GB below build/image.
#   scripts/image_test.sh           build and test
#   scripts/image_test.sh --keep    leave the image in build/image/storage
# Ends with one line "N passed, N failed"; exit 0 only if nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

keep=""
case "${1:-}" in
    "") ;;
    --keep) keep=yes ;;
    *) echo "image_test.sh: unknown option '$1' (known: --keep)" >&2; exit 2 ;;
esac
[ "$(id -u)" -eq 0 ] || { echo "image_test.sh: run as root: it mounts file systems and changes users" >&2; exit 2; }

tag=localhost/tinyloop:test
base=docker.io/library/debian:bookworm-slim
work=$PWD/build/image
size_limit_mb=60
port=${PORT:-18480}
passed=0
failed=0
container=""
outside=""

mkdir -p "$work"
missing=()
for p in buildah debootstrap curl; do
    command -v "$p" >/dev/null || missing+=("$p")
done
if [ ${#missing[@]} -gt 0 ]; then
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || exit 1
fi

bah() { buildah --storage-driver vfs --root "$work/storage" --runroot "$work/run" "$@"; }

check() { # NAME COMMAND...
    local name=$1
    shift
    if "$@" >"$work/check.log" 2>&1; then
        passed=$((passed + 1))
        echo "ok    $name"
    else
        failed=$((failed + 1))
        echo "FAIL  $name"
        tail -n 20 "$work/check.log"
    fi
}

clean_up() {
    [ -n "$outside" ] && kill -KILL "$outside" 2>/dev/null
    [ -n "$container" ] && { bah umount "$container"; bah rm "$container"; } >/dev/null 2>&1
    rm -rf "$work/state"
    [ -n "$keep" ] || { bah rmi --all --force >/dev/null 2>&1; rm -rf "$work/storage" "$work/run"; }
    echo "$passed passed, $failed failed"
}
trap clean_up EXIT

# ---- build -----------------------------------------------------------------------------------------------------------

if [ ! -f "$work/base.tar" ]; then # the base image of the Dockerfile, made here since no registry is asked
    echo "== base image"
    rm -rf "$work/rootfs"
    debootstrap --variant=minbase bookworm "$work/rootfs" >"$work/debootstrap.log" 2>&1 ||
        { tail -n 5 "$work/debootstrap.log"; failed=1; exit 1; }
    # as slim as the published one: without the package manager's caches
    tar -C "$work/rootfs" --exclude='./var/cache/apt/*' --exclude='./var/lib/apt/lists/*' -cf "$work/base.tar.part" . && mv "$work/base.tar.part" "$work/base.tar"
    rm -rf "$work/rootfs"
fi
if ! bah inspect --type image "$base" >/dev/null 2>&1; then
    container=$(bah from scratch)
    bah add --quiet "$container" "$work/base.tar" / >/dev/null
    bah commit --quiet --format docker --rm "$container" "$base" >/dev/null
    container=""
fi

echo "== build"
version=$(sed -n 's/.*TL_VERSION "\(.*\)".*/\1/p' engine/tinyloop.h)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
if ! bah bud --isolation chroot --pull-never --format docker --ignorefile docker/Dockerfile.dockerignore -f docker/Dockerfile \
    --build-arg VERSION="$version" --build-arg REVISION="$revision" -t "$tag" . >"$work/build.log" 2>&1; then
    tail -n 30 "$work/build.log"
    failed=1
    exit 1
fi

# ---- what it says about itself ---------------------------------------------------------------------------------------

config() { bah inspect --type image --format "$1" "$tag"; }
check "user is not root" test "$(config '{{.Docker.Config.User}}')" = 10001:10001
check "stops by SIGTERM" test "$(config '{{.Docker.Config.StopSignal}}')" = SIGTERM
check "asks the binary for its health" grep -q 'tinyloopd --healthcheck' <<<"$(config '{{.Docker.Config.Healthcheck.Test}}')"
check "state and models are volumes" grep -q '/models.*/var/lib/tinyloop' <<<"$(config '{{.Docker.Config.Volumes}}')"
check "labels" test "$(config '{{index .Docker.Config.Labels "org.opencontainers.image.version"}}')" = "$version"
entry=$(config '{{index .Docker.Config.Entrypoint 0}}')
mapfile -t env < <(config '{{range .Docker.Config.Env}}{{.}}{{"\n"}}{{end}}' | sed '/^$/d')

container=$(bah from --pull-never "$tag")
root=$(bah mount "$container")
base_container=$(bah from --pull-never "$base")
base_root=$(bah mount "$base_container")
over_mb=$((($(du -s --apparent-size --block-size=1K "$root" | cut -f1) - $(du -s --apparent-size --block-size=1K "$base_root" | cut -f1)) / 1024))
bah umount "$base_container" >/dev/null
bah rm "$base_container" >/dev/null
check "$over_mb MB on top of its base (limit $size_limit_mb)" test "$over_mb" -lt "$size_limit_mb"
check "no compiler in it" test ! -e "$root/usr/bin/gcc"
check "no writable program" bash -c "! find '$root/usr/bin' '$root/usr/share/tinyloop' -perm /022 -type f | grep ."

# ---- run -------------------------------------------------------------------------------------------------------------

# in_image COMMAND...: in namespaces of its own (network apart), as the image's user with no capability, on a read-only root; the two
# volumes and /proc are mounted. Port mapping is the platform's: here the port is chosen by the environment.
in_image() {
    # shellcheck disable=SC2016
    root=$root state=$work/state ${in_place:+exec} unshare --mount --pid --ipc --uts --fork --kill-child bash -euc '
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        mount -t tmpfs -o size=64k,mode=755 tmpfs "$root/dev"
        touch "$root/dev/null" && mount --bind /dev/null "$root/dev/null"
        mount --bind "$state" "$root/var/lib/tinyloop"
        mount -o remount,bind,ro "$root"
        exec chroot "$root" setpriv --reuid 10001 --regid 10001 --clear-groups --no-new-privs --bounding-set=-all --inh-caps=-all \
            env -i "$@"' bash "${env[@]}" TINYLOOP_PORT="$port" TINYLOOP_THREADS=1 "$@"
}
# The process behind unshare, as the host numbers it.
inner() { pgrep -P "$outside"; }

ask() { curl -sS -m 30 "http://127.0.0.1:$port$1" "${@:2}"; }
complete() { ask /v1/completions -H 'Content-Type: application/json' -d "$1"; }
ready() {
    for _ in $(seq 100); do
        in_image "$entry" --healthcheck && return 0
        sleep 0.2
    done
    return 1
}
start() {
    in_place=yes in_image "$entry" >"$work/run.log" 2>&1 &
    outside=$!
}
# SIGTERM to the daemon, then its exit code.
stop() {
    kill -TERM "$(inner)"
    wait "$outside"
    local code=$?
    outside=""
    return "$code"
}

echo "== run"
install -d -m 750 -o 10001 -g 10001 "$work/state"
start
check "healthy, by its own health check" ready
check "it is process 1 there and runs as uid 10001" bash -c \
    "grep -q '^Uid:.10001.10001.10001.10001$' /proc/$(inner)/status && grep -Eq '^NSpid:.*[[:space:]]1$' /proc/$(inner)/status"
check "it has no capability and cannot get any" bash -c \
    "grep -q '^CapEff:.0*$' /proc/$(inner)/status && grep -q '^CapBnd:.0*$' /proc/$(inner)/status && grep -q '^NoNewPrivs:.1$' /proc/$(inner)/status"
check "its root is read-only" bash -c "touch '/proc/$(inner)/root'/usr/x 2>&1 | grep -q 'Read-only file system'"
first=$(complete '{"model": "demo-model", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "loops": 8}')
check "it completes a prompt" grep -q '"finish_reason":"length"' <<<"$first"
check "the log is JSON on standard output" bash -c "tail -n 1 '$work/run.log' | python3 -c 'import json, sys; json.loads(sys.stdin.read())'"
check "a named entry is made" ask /v1/prefix_caches/rules -f -X PUT -H 'Content-Type: application/json' \
    -d '{"prompt": "Once upon a time there was", "loops": 8}'
check "its definition is in the volume" bash -c "ls '$work'/state/prefix_cache-*.def"

echo "== end"
complete '{"model": "demo-model", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "temperature": 0}' \
    >"$work/long.json" 2>&1 &
long=$!
for _ in $(seq 100); do
    ask /v1/requests 2>/dev/null | grep -q '"id":"req_' && break
    sleep 0.02
done
t=$SECONDS
stop
code=$?
check "SIGTERM ends it with exit code 0 (was $code)" test "$code" -eq 0
check "within its time" test $((SECONDS - t)) -lt 30
wait "$long"
check "the request that ran was answered in full" grep -q '"completion_tokens":400' "$work/long.json"
check "it says that it drained" grep -q draining "$work/run.log"

start
check "healthy again on the same volume" ready
again=$(complete '{"model": "demo-model", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0, "loops": 8}')
text() { grep -o '"text":"[^"]*"' <<<"$1"; }
check "the answer is the same" test "$(text "$first")" = "$(text "$again")"
check "the named entry is there again" ask /v1/prefix_caches/rules -f
stop
check "and ends with exit code 0" test $? -eq 0
in_image TINYLOOP_MODEL=/models/none "$entry" >"$work/run.log" 2>&1
code=$?
check "a missing model is exit code 2 (was $code) and a sentence" bash -c "test $code -eq 2 && grep -q '/models/none/config.json' '$work/run.log'"

[ "$failed" -eq 0 ]
