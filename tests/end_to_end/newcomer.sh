#!/bin/bash
# A newcomer's way from nothing to a model that is served and swapped, by its own clock:
#
#   tests/end_to_end/newcomer.sh [--install] [PORT]
#
# Without --install the `gpusup` on PATH is used. Fails if any step does, or if it took ten minutes.
set -euo pipefail

checkout=$(cd "$(dirname "$0")/../.." && pwd)
folder=$(mktemp -d /tmp/gs-new-XXXXXX)
service=
finish() {
    if [ -n "$service" ]; then kill "$service" 2>/dev/null && wait "$service" || true; fi
    rm -rf "$folder"
}
trap finish EXIT

began=$(date +%s%N)
last=$began
step() {
    local now
    now=$(date +%s%N)
    printf '%8.1f s  %s\n' "$(((now - last) / 1000000))e-3" "$1"
    last=$now
}

if [ "${1:-}" = --install ]; then
    shift
    python3 -m venv "$folder/venv"
    (cd "$checkout" && "$folder/venv/bin/pip" install -q -c conf/constraints.txt .)
    export PATH="$folder/venv/bin:$PATH"
    step install
fi
port=${1:-8000}
export RUNTIME_DIRECTORY="$folder/run" STATE_DIRECTORY="$folder/state"
url=http://127.0.0.1:$port

cd "$folder"
gpusup init mymodel >/dev/null
cd mymodel
sed -i "s/127.0.0.1:8000/127.0.0.1:$port/" gpusup.toml
step init

gpusup check gpusup.toml >/dev/null
gpusup try gpusup.toml classifier --input example.png 2>/dev/null | grep -q '"label"'
step try

gpusup run gpusup.toml 2>"$folder/log" &
service=$!
until curl -sf -o /dev/null "$url/readyz"; do
    kill -0 "$service" || { cat "$folder/log" >&2; exit 1; }
    sleep 0.1
done
step run

curl -sS --fail-with-body --data-binary @example.png "$url/predictions/classifier" | grep -q '"label"'
step curl

gpusupctl top --once | grep -q classifier
step top

gpusupctl reload-model classifier --version 2 >/dev/null
curl -sS --fail-with-body -D "$folder/head" -o /dev/null --data-binary @example.png \
    "$url/predictions/classifier"
grep -qi '^gpusup-model-version: 2' "$folder/head"
step reload

gpusupctl stop >/dev/null
wait "$service"
service=
step stop

took=$((($(date +%s%N) - began) / 1000000000))
echo "    $took s  in all"
test "$took" -lt 600
