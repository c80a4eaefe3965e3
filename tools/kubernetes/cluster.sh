#!/usr/bin/env bash
# Runs a command with its own Kubernetes: the real etcd, API server, controllers and scheduler, and nodes that `kubelet.py` plays. All of it
# lives in namespaces of this machine and one temporary folder; nothing remains after the command.
#
# Usage: tools/kubernetes/cluster.sh [--nodes N] COMMAND [ARGS]...
#
#   --nodes N   nodes, with room for one pod each (default 2)
#
# The command finds the cluster through KUBECONFIG, as kubectl does, and what pods print and their processes' numbers below the folder PODS. A pod's
# image is this machine, with PATH as it is here.
#
# etcd, kubectl, openssl, python3, ip and unshare must be in PATH; kube-apiserver, kube-controller-manager and kube-scheduler there or in the folder
# PACELINE_TEST_KUBERNETES. `build.sh` makes them from Kubernetes' source. With `jobset`, `jobset.crd.yaml` and `jobset.webhooks.yaml` beside them,
# the cluster has JobSet. It needs no root, but the right to make user namespaces.
#
# Exit codes: the command's, 2 wrong usage, 3 a program is missing or Kubernetes does not start.

set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PATH=${PACELINE_TEST_KUBERNETES:+$PACELINE_TEST_KUBERNETES:}$PATH:/usr/sbin:/sbin

if [[ -z ${PACELINE_CLUSTER_INSIDE-} ]]; then
    for program in etcd kubectl openssl python3 ip unshare kube-apiserver kube-controller-manager kube-scheduler; do
        if ! type -P "$program" >/dev/null; then
            printf 'cluster.sh: %s is not installed: see tools/kubernetes/build.sh\n' "$program" >&2
            exit 3
        fi
    done
    inside=(unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc)
    if ! "${inside[@]}" true; then
        printf 'cluster.sh: the right to make namespaces is not installed: run as root, or allow user namespaces\n' >&2
        exit 3
    fi
    PACELINE_CLUSTER_INSIDE=1 exec "${inside[@]}" "${BASH_SOURCE[0]}" "$@"
fi
unset PACELINE_CLUSTER_INSIDE

nodes=2
while [[ ${1-} == --* ]]; do
    case $1 in
        --nodes) nodes=${2-} && shift 2 ;;
        --) shift && break ;;
        *) printf 'cluster.sh: unknown option %s\n' "$1" >&2 && exit 2 ;;
    esac
done
if [[ $# -eq 0 || ! $nodes =~ ^[1-9][0-9]?$ ]]; then
    sed -n 's/^# Usage: /usage: /p' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

dir=$(mktemp -d)
mount -t tmpfs tmpfs "$dir" # etcd waits for the disk otherwise
trap 'cd / && umount --lazy "$dir" && rmdir "$dir"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
export KUBECONFIG=$dir/kubeconfig PODS=$dir/pods

# start NAME [ARGS]...
start() {
    local name=$1
    shift
    "$name" "$@" >"$dir/${name##*/}.log" 2>&1 </dev/null &
}

# within SECONDS COMMAND...: repeats it until it succeeds
within() {
    local end=$((SECONDS + $1))
    shift
    until "$@" >/dev/null 2>&1; do
        ((SECONDS < end)) || return
        sleep 0.1
    done
}

# start_jobset: the controller and its webhooks, which the API server calls at a Service otherwise.
start_jobset() {
    local files
    files=$(dirname "$(type -P jobset)")/jobset
    kubectl create -f "$files.crd.yaml" || return
    within 60 kubectl wait --for condition=Established --timeout 1s -f "$files.crd.yaml" || return
    mkdir "$dir/jobset"
    openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=jobset -addext subjectAltName=IP:127.0.0.1 \
        -keyout "$dir/jobset/tls.key" -out "$dir/jobset/tls.crt" 2>/dev/null
    cat >"$dir/jobset/config" <<CONFIG
apiVersion: config.jobset.x-k8s.io/v1alpha1
kind: Configuration
leaderElection: { leaderElect: false }
internalCertManagement: { enable: false }
webhook: { certDir: "$dir/jobset" }
CONFIG
    start jobset --config "$dir/jobset/config"
    within 60 eval ': <>/dev/tcp/127.0.0.1/9443' || return
    sed -E -e '/^ +(service:|name: webhook-service|namespace: system)$/d' \
        -e "s|^      path: (.*)|    url: https://127.0.0.1:9443\1\n    caBundle: $(base64 -w0 "$dir/jobset/tls.crt")|" \
        "$files.webhooks.yaml" | kubectl create -f -
}

start_all() {
    local token
    # Pods are attached to this bridge.
    ip link set lo up
    ip link add pods type bridge
    ip addr add 10.244.0.1/16 dev pods
    ip link set pods up
    token=$(openssl rand -hex 16)
    printf '%s,admin,admin,system:masters\n' "$token" >"$dir/tokens"
    openssl genrsa -out "$dir/accounts.key" 2048 2>/dev/null
    start etcd --data-dir "$dir/etcd" --log-level error
    start kube-apiserver --etcd-servers http://127.0.0.1:2379 --cert-dir "$dir" --bind-address 127.0.0.1 --secure-port 6443 \
        --advertise-address 10.244.0.1 --token-auth-file "$dir/tokens" --authorization-mode RBAC --service-cluster-ip-range 10.96.0.0/16 \
        --service-account-issuer https://kubernetes.default.svc --service-account-key-file "$dir/accounts.key" \
        --service-account-signing-key-file "$dir/accounts.key"
    within 60 test -e "$dir/apiserver.crt" || return
    cat >"$KUBECONFIG" <<CONFIG
apiVersion: v1
kind: Config
clusters: [{ name: test, cluster: { server: "https://127.0.0.1:6443", certificate-authority: "$dir/apiserver.crt" } }]
users: [{ name: admin, user: { token: "$token" } }]
contexts: [{ name: test, context: { cluster: test, user: admin } }]
current-context: test
CONFIG
    within 60 kubectl get --raw /readyz || return
    start kube-controller-manager --kubeconfig "$KUBECONFIG" --leader-elect=false --secure-port 0 \
        --service-account-private-key-file "$dir/accounts.key" --root-ca-file "$dir/apiserver.crt" --node-monitor-grace-period 1h
    start kube-scheduler --kubeconfig "$KUBECONFIG" --leader-elect=false --secure-port 0
    mkdir "$PODS"
    start "$here/kubelet.py" --nodes "$nodes" --server https://127.0.0.1:6443 --ca "$dir/apiserver.crt" --token "$token" --pods "$PODS"
    within 60 kubectl get serviceaccount default || return
    within 60 eval '(($(kubectl get nodes --no-headers | wc -l) == nodes))' || return
    ! type -P jobset >/dev/null || start_jobset >&2
}

if ! start_all; then
    printf 'cluster.sh: Kubernetes does not start; the last lines of its programs:\n' >&2
    tail -n 5 "$dir"/*.log >&2
    exit 3
fi
code=0
"$@" || code=$?
exit "$code"
