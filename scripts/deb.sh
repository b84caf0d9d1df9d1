#!/usr/bin/env bash
# A Debian package of what `make install` installs: build/tinyloop_VERSION_ARCH.deb. It needs the libraries of the release that it was
# built on. Installing starts nothing: systemctl enable --now tinyloopd.socket tinyloopd.service does.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v dpkg-shlibdeps >/dev/null || { echo "deb.sh: dpkg-shlibdeps is missing: apt-get install dpkg-dev" >&2; exit 1; }

stage=$PWD/build/deb
version=$(sed -n 's/.*TL_VERSION "\(.*\)".*/\1/p' engine/tinyloop.h)
arch=$(dpkg --print-architecture)
rm -rf "$stage"
umask 022
make -s install DESTDIR="$stage/tree" PREFIX=/usr
strip --remove-section=.comment "$stage"/tree/usr/bin/*
install -D -m 644 LICENSE "$stage/tree/usr/share/doc/tinyloop/copyright"
[ ! -d "$stage/tree/usr/share/man" ] || find "$stage/tree/usr/share/man" -type f ! -name '*.gz' -exec gzip -9n {} +

mkdir -p "$stage/debian" "$stage/tree/DEBIAN"
printf 'Source: tinyloop\n\nPackage: tinyloop\nArchitecture: any\n' >"$stage/debian/control"
depends=$(cd "$stage" && dpkg-shlibdeps -O tree/usr/bin/* 2>/dev/null | sed 's/^shlibs:Depends=//')
cat >"$stage/tree/DEBIAN/control" <<TEXT
Package: tinyloop
Version: $version
Architecture: $arch
Maintainer: TinyLoop server <tinyloop@localhost>
Installed-Size: $(du -s --apparent-size --block-size=1K "$stage/tree/usr" | cut -f1)
Depends: $depends
Section: net
Priority: optional
Description: HTTP inference server for looped language models
 One process serves one model over HTTP, with the API that OpenAI clients speak.
 State computed for a prompt can be kept and used again without changing a bit
 of the answer, and each request says how deep the model's loop runs.
TEXT
echo /etc/tinyloop/tinyloopd.conf >"$stage/tree/DEBIAN/conffiles"
cat >"$stage/tree/DEBIAN/postinst" <<'TEXT'
#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload
TEXT
cat >"$stage/tree/DEBIAN/prerm" <<'TEXT'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl disable --now tinyloopd.socket tinyloopd.service || true
fi
TEXT
cat >"$stage/tree/DEBIAN/postrm" <<'TEXT'
#!/bin/sh
set -e
[ "$1" != purge ] || rm -rf /var/lib/private/tinyloop /var/lib/tinyloop
[ ! -d /run/systemd/system ] || systemctl daemon-reload
TEXT
chmod 755 "$stage"/tree/DEBIAN/post* "$stage"/tree/DEBIAN/prerm
dpkg-deb --root-owner-group --build "$stage/tree" "build/tinyloop_${version}_$arch.deb"
