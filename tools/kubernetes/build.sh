#!/usr/bin/env bash
# Builds the programs of Kubernetes that `cluster.sh` starts, without changing the checkout. Kubernetes' own release has them too, as
# kubernetes-server-linux-amd64.tar.gz.
#
# Usage: tools/kubernetes/build.sh CHECKOUT FOLDER
#
#   CHECKOUT  of github.com/kubernetes/kubernetes, or of a project that has its sources in vendor/, such as github.com/openshift/microshift
#   FOLDER    gets kube-apiserver, kube-controller-manager and kube-scheduler; name it in PACELINE_TEST_KUBERNETES
#
# Needs Go, 4 GB of disk space, and on two cores some ten minutes.

set -euo pipefail
if (($# != 2)); then
    sed -n 's/^# Usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
checkout=$(realpath "$1")
folder=$(realpath -m "$2")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p "$folder"
cd "$checkout"
version=$(sed -nE 's/^KUBE_GIT_VERSION=//p' Makefile.kube_git.var 2>/dev/null || git describe --tags)
for program in kube-apiserver:APIServer kube-controller-manager:ControllerManager kube-scheduler:Scheduler; do
    name=${program%:*}
    # A vendor folder has the programs as libraries. The file is only laid over the checkout.
    cat >"$scratch/$name.go" <<GO
package main

import (
	"os"

	"k8s.io/component-base/cli"
	"k8s.io/kubernetes/cmd/$name/app"
)

func main() { os.Exit(cli.Run(app.New${program#*:}Command())) }
GO
    printf '{"Replace": {"%s/paceline/%s/main.go": "%s/%s.go"}}' "$checkout" "$name" "$scratch" "$name" >"$scratch/overlay"
    CGO_ENABLED=0 go build -overlay "$scratch/overlay" -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version" \
        -o "$folder/$name" "./paceline/$name"
    printf '%s\n' "$folder/$name"
done
