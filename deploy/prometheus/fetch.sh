#!/usr/bin/env bash
# Puts Prometheus and promtool, which the tests of dashboards and alerts use, into a cache folder: from the packages of
# Debian or Ubuntu, installed nowhere, without root. Says why and succeeds where they cannot be had; the tests skip then.
set -euo pipefail

folder="${XDG_CACHE_HOME:-$HOME/.cache}/weft/prometheus"
packages=(prometheus)

if [[ -x "$folder/usr/bin/promtool" ]]; then exit 0; fi
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "prometheus: not fetched, there is no apt-get here"
    exit 0
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/root"
own_lists=(-o "Dir::State::Lists=$work/lists" -o "Dir::Cache=$work/cache")
cd "$work"
if ! apt-get -qq download "${packages[@]}" >log 2>&1 &&
    ! { apt-get -qq "${own_lists[@]}" update && apt-get -qq "${own_lists[@]}" download "${packages[@]}"; } >log 2>&1; then
    echo "prometheus: not fetched: $(tail -1 log)"
    exit 0
fi
for package in ./*.deb; do dpkg -x "$package" root; done
mkdir -p "$(dirname "$folder")"
rm -rf "$folder"
mv root "$folder"
