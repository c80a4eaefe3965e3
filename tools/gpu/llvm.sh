#!/usr/bin/env bash
# Puts the LLVM that Burn's CUDA back end is built with where its build looks, made of the distribution's packages.
#
# Usage: XDG_DATA_HOME=$(tools/gpu/llvm.sh) cargo build --features cuda
#
# Burn's build downloads an LLVM of its own (tracel-llvm) and asks for nothing else. Only where that download is not to be had
# is this script of use: it fetches Debian's packages with apt-get, unpacks them below target/gpu without installing them,
# and describes them in the form in which the build finds its own. The folder to set as XDG_DATA_HOME goes to stdout, the rest
# to stderr. A folder that is complete is used again; the programs that come out of it do not need it.
#
# Debian's LLVM may be one major version older than the one that was meant. Everything that Burn 0.22 calls is there, and its PTX
# ends at an older version: 9.0 with LLVM 22, which is the PTX of CUDA 13.0.
#
# It takes 20 seconds, 100 MB to fetch and 550 MB of disk.
#
# Exit codes: 0 the folder is there, 1 it cannot be made.

set -euo pipefail

fail() {
    printf 'llvm: %s\n' "$*" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# `23.1.0-4`: the LLVM it downloads, and the number of the package.
version=$(awk -F'"' '$0 == "name = \"tracel-llvm-bundler\"" { found = 1; next } found { print $2; exit }' "$root/Cargo.lock")
[[ $version =~ ^([0-9]+)\.[0-9]+\.[0-9]+-[0-9]+$ ]] || fail "Cargo.lock names no version of tracel-llvm-bundler that can be understood: ${version:-none}"
newest=${BASH_REMATCH[1]}

home=${CARGO_TARGET_DIR:-$root/target}/gpu/llvm-$version
mkdir -p "$(dirname "$home")"
home=$(realpath "$home")
bundle=$home/tracel/tracel-llvm-$version
# What the build takes for a sign that its download is complete; here the last file that is made.
sign=$bundle/.tracel-llvm-installed
if [[ -e $sign ]]; then
    printf '%s\n' "$home"
    exit 0
fi

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    fail "there is no apt-get here: let the build download LLVM (it does so where XDG_DATA_HOME is not set), or unpack tracel-llvm-$version below \$XDG_DATA_HOME/tracel by hand"

# The newest that is not newer than what was meant, and one version older at most.
major=
for candidate in "$newest" $((newest - 1)); do
    if [[ -n $(apt-cache madison "llvm-$candidate-dev" 2>/dev/null) ]]; then
        major=$candidate
        break
    fi
done
[[ -n $major ]] ||
    fail "this distribution has neither llvm-$newest-dev nor llvm-$((newest - 1))-dev; if its list of packages is old, \`apt-get update\` as root helps"

packages=$home/packages
rm -rf "$home"
mkdir -p "$packages" "$bundle/bin" "$bundle/include"
printf 'llvm: fetching LLVM %s\n' "$major" >&2
# libllvm only for llvm-config, which is linked to it; the static libraries of zstd and zlib for LLVM's.
# A sandboxed user could not write here.
(cd "$packages" && apt-get -qq -o APT::Sandbox::User=root download "llvm-$major" "llvm-$major-dev" "libllvm$major" libzstd-dev zlib1g-dev) >&2 ||
    fail "the packages of LLVM $major cannot be fetched"
for package in "$packages"/*.deb; do
    dpkg-deb --extract "$package" "$home/system"
done
rm -r "$packages"

usr=$home/system/usr
libraries=$(dirname "$(find "$usr/lib" -name libLLVMCore.a | head -n 1)")
[[ -d $libraries ]] || fail "the packages of LLVM $major have no static libraries"
shared=$(dirname "$(find "$usr/lib" -name 'libLLVM.so.*' | head -n 1)")
find "$usr/lib" \( -name libz.a -o -name libzstd.a \) -exec ln -sf -t "$libraries" {} +
ln -s "$libraries" "$bundle/lib"
ln -s "$usr/include/llvm-$major/llvm" "$usr/include/llvm-c-$major/llvm-c" "$bundle/include"

# The build asks `llvm-config` below the bundle. Its answers are written down once: where things lie is other than the real one
# thinks, and which libraries there are, in the order of linking, is taken from it. Polly is an optimizer that nothing uses and
# whose libraries are in a package of their own.
config() {
    LD_LIBRARY_PATH=$shared "$libraries/../bin/llvm-config" --link-static "$@"
}
names=$(config --libnames | tr ' ' '\n' | grep -v '^libPolly' | paste -sd ' ')
flags="-I$bundle/include -D_GNU_SOURCE -D__STDC_CONSTANT_MACROS -D__STDC_FORMAT_MACROS -D__STDC_LIMIT_MACROS"
found=$(config --version)
{
    printf '#!/bin/sh\n# Written by tools/gpu/llvm.sh.\nfor question; do :; done\ncase $question in\n'
    # answer QUESTION TEXT
    answer() {
        printf -- "%s) echo '%s' ;;\n" "$1" "$2"
    }
    answer --version "$found"
    answer --libdir "$bundle/lib"
    answer --includedir "$bundle/include"
    answer --cflags "$flags"
    answer --cxxflags "$flags -std=c++17 -fno-exceptions -fno-rtti"
    answer --libnames "$names"
    answer --libs "$(sed -E 's/lib([A-Za-z0-9_]+)\.a/-l\1/g' <<<"$names")"
    answer --system-libs '-lrt -ldl -lm -lz -lzstd'
    # shellcheck disable=SC2016 # the written script's variable
    printf '*) echo "llvm-config: nobody wrote down an answer to $question" >&2; exit 1 ;;\nesac\n'
} >"$bundle/bin/llvm-config"
chmod +x "$bundle/bin/llvm-config"
rm -r "$libraries/../bin" "$shared"/libLLVM*.so*
touch "$sign"
printf 'llvm: LLVM %s stands for %s\n' "$found" "$version" >&2
printf '%s\n' "$home"
