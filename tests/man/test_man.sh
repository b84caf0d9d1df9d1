#!/usr/bin/env bash
# The manual pages: no warning of two formatters, and every flag, setting and command of the programs is in them.
#   tests/man/test_man.sh BUILD    a build folder with tinyloop, tinyloopd and man/
set -uo pipefail
build=$1
passed=0
failed=0

check() { # WHAT COMMAND...: it ends well and says nothing
    local what=$1 said
    shift
    if said=$("$@" 2>&1) && [ -z "$said" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $what: $said"
    fi
}

text_of() { mandoc -T ascii "$build/man/$1" | sed 's/.\x08//g'; }
has() { # TEXT PATTERN: at the beginning of a line
    grep -qE -- "^ *$2( |\$)" <<<"$1" || echo "the page does not explain '$2'"
}
groff_warnings() { { groff -man -ww -Tascii "$build/man/$1" >/dev/null; } 2>&1; }
section_of() { # PAGE HEADING: of a subsection
    text_of "$1" | awk -v want="   $2" '/^(   )?[A-Za-z]/ { inside = $0 == want } inside'
}

for page in tinyloopd.8 tinyloopd.conf.5 tinyloop.1; do
    check "$page: mandoc" mandoc -T lint "$build/man/$page"
    check "$page: groff" groff_warnings "$page"
done
daemon=$(text_of tinyloopd.8)
file=$(text_of tinyloopd.conf.5)
for flag in $("$build/tinyloopd" --help | grep -oE '^  --[a-z-]+'); do
    check "flag $flag" has "$daemon" "$flag"
done
for key in $("$build/tinyloopd" --print-config | grep -oE '^[a-z_]+ ='); do
    [ "$key" = "=" ] || check "setting $key" has "$file" "$key ="
done
for command in $("$build/tinyloop" --help | grep -oE '^  [a-z]+'); do
    section=$(section_of tinyloop.1 "$command")
    check "command $command" has "$section" "$command"
    for flag in $("$build/tinyloop" "$command" --help | grep -oE '^  --[a-z0-9-]+'); do
        check "$command $flag" has "$section" "$flag"
    done
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
