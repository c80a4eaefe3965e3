#!/usr/bin/env bash
# Builds the programs of Kubernetes that `cluster.sh` starts.
#
# Usage: tools/kubernetes/build.sh FOLDER KUBERNETES [JOBSET]
#
#   FOLDER      gets kube-apiserver, kube-controller-manager, kube-scheduler and, with JOBSET, jobset and the folder jobset.crd
#   KUBERNETES  a checkout of github.com/kubernetes/kubernetes, or of another project with its sources in vendor/
#   JOBSET      a checkout of github.com/kubernetes-sigs/jobset
#
# Needs Go, and about 4 GB of memory.

set -euo pipefail
if (($# < 2 || $# > 3)); then
    sed -n 's/^# Usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
folder=$(realpath -m "$1")
mkdir -p "$folder"
export CGO_ENABLED=0
