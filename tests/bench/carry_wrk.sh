#!/bin/sh
# Copies wrk and the libraries it needs into DIR, for a machine where nothing can be installed:
#   carry_wrk.sh DIR; then there: run.py gpu-images --wrk DIR
set -eu
if [ $# -ne 1 ]; then
    echo "usage: carry_wrk.sh DIR" >&2
    exit 2
fi
if ! wrk=$(command -v wrk); then
    echo "cannot find wrk; on Debian: apt-get install -y wrk" >&2
    exit 1
fi
mkdir -p "$1"
cp -L "$wrk" "$1/wrk"
# The C library and the loader stay out: they must be the target's own.
ldd "$wrk" | awk '/=> \// {print $3}' | grep -E '/lib(luajit|ssl|crypto)[-.]' | while read -r library; do
    cp -L "$library" "$1/"
done
chmod u+rwx "$1"/*
ls -l "$1"
