#!/usr/bin/env bash
# Provides the LLVM for building Burn's CUDA back end, from the distribution's packages, in the place where the build looks for it.
#
# Usage: XDG_DATA_HOME=$(tools/gpu/llvm.sh) cargo build --features cuda
#
# Burn's build downloads its own LLVM (tracel-llvm). Use this script if that download is not available. It downloads Debian's packages
# with apt-get, unpacks them below target/gpu without installing them, and lays them out as the build expects its own LLVM. The
# folder to set as XDG_DATA_HOME goes to stdout, everything else to stderr. A complete folder is reused. The built programs do not
# need it.
#
# Debian's LLVM may be one major version older than the expected one. It has everything that Burn 0.22 calls, but its newest PTX
# version is older: 9.0 with LLVM 22, which is the PTX of CUDA 13.0.
#
# It takes 20 seconds, a download of 100 MB and 550 MB of disk.
#
# Exit codes: 0 the folder is complete, 1 it cannot be made.

set -euo pipefail

fail() {
    printf 'llvm: %s\n' "$*" >&2
    exit 1
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# `23.1.0-4`: the version of the LLVM that it downloads, and the package number.
version=$(awk -F'"' '$0 == "name = \"tracel-llvm-bundler\"" { found = 1; next } found { print $2; exit }' "$root/Cargo.lock")
[[ $version =~ ^([0-9]+)\.[0-9]+\.[0-9]+-[0-9]+$ ]] || fail "cannot read the version of tracel-llvm-bundler in Cargo.lock: ${version:-none}"
newest=${BASH_REMATCH[1]}

home=${CARGO_TARGET_DIR:-$root/target}/gpu/llvm-$version
mkdir -p "$(dirname "$home")"
home=$(realpath "$home")
bundle=$home/tracel/tracel-llvm-$version
# The build looks for this file to see that its download is complete. It is the last one made here.
sign=$bundle/.tracel-llvm-installed
if [[ -e $sign ]]; then
    printf '%s\n' "$home"
    exit 0
fi

command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    fail "there is no apt-get: let the build download LLVM (it does so if XDG_DATA_HOME is not set), or unpack tracel-llvm-$version below \$XDG_DATA_HOME/tracel by hand"

# The expected major version, or the one before it.
major=
for candidate in "$newest" $((newest - 1)); do
    if [[ -n $(apt-cache madison "llvm-$candidate-dev" 2>/dev/null) ]]; then
        major=$candidate
        break
    fi
done
[[ -n $major ]] ||
    fail "this distribution has neither llvm-$newest-dev nor llvm-$((newest - 1))-dev; if its package list is old, run \`apt-get update\` as root"

packages=$home/packages
rm -rf "$home"
mkdir -p "$packages" "$bundle/bin" "$bundle/include"
printf 'llvm: downloading LLVM %s\n' "$major" >&2
# libllvm is for llvm-config, which links to it; zstd and zlib are for LLVM's static libraries.
# apt's sandbox user could not write here.
(cd "$packages" && apt-get -qq -o APT::Sandbox::User=root download "llvm-$major" "llvm-$major-dev" "libllvm$major" libzstd-dev zlib1g-dev) >&2 ||
    fail "the packages of LLVM $major cannot be downloaded"
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

# The build asks `llvm-config` below the bundle. This replacement answers with the actual paths, which the real one does not know, and
# with the real one's list of libraries in link order. Polly is left out: it is an optimizer that nothing uses, and its libraries are
# in a separate package.
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
    printf '*) echo "llvm-config: tools/gpu/llvm.sh wrote no answer to $question" >&2; exit 1 ;;\nesac\n'
} >"$bundle/bin/llvm-config"
chmod +x "$bundle/bin/llvm-config"
rm -r "$libraries/../bin" "$shared"/libLLVM*.so*
touch "$sign"
printf 'llvm: using LLVM %s for %s\n' "$found" "$version" >&2
printf '%s\n' "$home"
