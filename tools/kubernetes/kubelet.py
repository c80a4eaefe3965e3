#!/usr/bin/env python3
"""Plays the nodes of a Kubernetes cluster: runs each pod that the scheduler gave a node as a process in namespaces of its own, reports how it
does, and answers the pods' DNS queries from the EndpointSlices that the controllers make.

Only what a pod of `paceline submit` has is played: one container, its variables, and volumes in memory. The image is this machine.
"""

import argparse
import base64
import http.client
import json
import os
import re
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

GATEWAY = "10.244.0.1"

# What a container starts with: an interface, its names, its volumes. The program's environment is there already.
SETUP = """
set -e
kubelet=$1 link=$2 address=$3 host=$4 folder=$5 directory=$6; shift 6
ip link add eth0 type veth peer name "$link" netns "$kubelet"
ip addr add "$address/16" dev eth0
ip link set eth0 up
ip link set lo up
nsenter --net --target "$kubelet" ip link set "$link" master pods up
hostname "$host"
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/resolv.conf" /etc/resolv.conf
while read -r size path; do mount -t tmpfs -o "size=$size" tmpfs "$path"; done <"$folder/volumes"
cd "$directory"
exec unshare --pid --ipc --fork --kill-child --mount-proc "$@"
"""


class Api:
    """The API server, by HTTP."""

    def __init__(self, server, ca, token):
        self.host = urlsplit(server)
        self.tls = ssl.create_default_context(cafile=ca)
        self.headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    def call(self, method, path, body=None, kind="application/json"):
        connection = http.client.HTTPSConnection(self.host.hostname, self.host.port, context=self.tls)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {**self.headers, "Content-Type": kind})
        return connection.getresponse()

    def do(self, *call):
        """The answer, or None if the object is gone or has changed."""
        response = self.call(*call)
        answer = json.loads(response.read())
        if response.status in (404, 409):
            return None
        if response.status >= 300:
            raise RuntimeError(f"{call[:2]}: {answer}")
        return answer

    def watch(self, path):
        """All objects as they are, and then every change, without end."""
        while True:
            for line in self.call("GET", f"{path}?watch=1"):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    break
                yield event["type"], event["object"]


def expanded(text, variables):
    """Kubernetes' own replacement: `$(NAME)` is a variable if there is one, and `$$` a dollar sign."""

    def value(match):
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def now():
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def bytes_of(quantity):
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()
    return int(number) << {"Mi": 20, "Gi": 30}[unit]


def path_of(pod):
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def forget(api, pod):
    """Tells the API server that nothing of the deleted pod runs any more."""
    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
    api.do("DELETE", path_of(pod), options)


class Pod:
    """A pod's container: started, watched, stopped. One thread waits for its end."""

    numbers = iter(range(2, 250 * 256))

    def __init__(self, api, pod, pods):
        number = next(self.numbers)
        self.api, self.pod = api, pod
        self.name, self.namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
        self.address, self.link = f"10.244.{number // 256}.{number % 256}", f"pod{number}"
        self.folder = pods / f"{number - 1}.{self.name}"
        self.begun, self.stopping = now(), False
        self.start()
        self.report("Running", {"running": {"startedAt": self.begun}})
        threading.Thread(target=self.wait, daemon=True).start()

    def start(self):
        spec = self.pod["spec"]
        (container,) = spec["containers"]
        host = spec.get("hostname", self.name)
        suffix = f"{self.namespace}.svc.cluster.local"
        names = f"{host}.{spec['subdomain']}.{suffix} {host}" if "subdomain" in spec else host
        self.folder.mkdir()
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{self.address} {names}\n")
        (self.folder / "resolv.conf").write_text(f"nameserver {GATEWAY}\nsearch {suffix} svc.cluster.local\noptions ndots:5\n")
        (self.folder / "volumes").write_text("".join(self.volumes(spec, container)))
        variables = self.variables(container)
        words = [expanded(word, variables) for word in container["command"] + container.get("args", [])]
        place = [os.getpid(), self.link, self.address, host, self.folder, container.get("workingDir", self.folder)]
        self.process = subprocess.Popen(
            ["unshare", "--mount", "--uts", "--net", "bash", "-c", SETUP, "pod", *map(str, place), *words],
            env={"PATH": os.environ["PATH"], "HOME": "/root", **variables},
            stdin=subprocess.DEVNULL,
            stdout=open(self.folder / "log", "wb"),
            stderr=subprocess.STDOUT,
        )
        (self.folder / "pid").write_text(str(self.process.pid))

    def volumes(self, spec, container):
        volumes = {volume["name"]: volume["emptyDir"] for volume in spec["volumes"]}
        limit = container.get("resources", {}).get("limits", {}).get("memory", "64Gi")
        for mount in container["volumeMounts"]:
            size = volumes[mount["name"]].get("sizeLimit", limit)
            yield f"{bytes_of(size)} {mount['mountPath']}\n"

    def variables(self, container):
        variables = {}
        for variable in container.get("env", []):
            source = variable.get("valueFrom", {})
            if "secretKeyRef" in source:
                key = source["secretKeyRef"]
                secret = self.api.do("GET", f"/api/v1/namespaces/{self.namespace}/secrets/{key['name']}")
                value = base64.b64decode(secret["data"][key["key"]]).decode()
            elif "fieldRef" in source:
                value = self.field(source["fieldRef"]["fieldPath"])
            else:
                value = expanded(variable.get("value", ""), variables)
            variables[variable["name"]] = value
        return variables

    def field(self, path):
        key = re.fullmatch(r"metadata\.(annotations|labels)\['(.*)'\]", path)
        if key:
            return self.pod["metadata"][key[1]].get(key[2], "")
        value = self.pod
        for part in path.split("."):
            value = value[part]
        return value

    def report(self, phase, state):
        (container,) = self.pod["spec"]["containers"]
        runs = phase == "Running"
        status = {
            "phase": phase,
            "hostIP": GATEWAY,
            "podIP": self.address,
            "podIPs": [{"ip": self.address}],
            "startTime": self.begun,
            "conditions": [{"type": "Ready", "status": str(runs)}],
            "containerStatuses": [
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "ready": runs,
                    "restartCount": 0,
                    "state": state,
                }
            ],
        }
        # Its name may be another pod's by now.
        metadata = {"uid": self.pod["metadata"]["uid"]}
        self.api.do("PATCH", f"{path_of(self.pod)}/status", {"metadata": metadata, "status": status}, "application/strategic-merge-patch+json")

    def wait(self):
        code = self.process.wait()
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "reason": "Error" if code else "Completed", "startedAt": self.begun, "finishedAt": now()}
        self.report("Failed" if code else "Succeeded", {"terminated": ended})
        if self.stopping:
            forget(self.api, self.pod)

    def stop(self, grace_seconds):
        if self.stopping:
            return
        self.stopping = True
        if self.process.poll() is None:
            self.kill(signal.SIGTERM)
            threading.Timer(grace_seconds, self.kill, [signal.SIGKILL]).start()
        else:
            forget(self.api, self.pod)

    def kill(self, number):
        """Signals the container's first process, which is the only child of the one that made its namespace."""
        try:
            pid = self.process.pid
            child = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            os.kill(int(child[0]) if child else pid, number)
        except (ProcessLookupError, FileNotFoundError):
            pass


def run_pods(api, folder):
    pods = {}
    for kind, pod in api.watch("/api/v1/pods"):
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        known = pods.get(uid)
        if kind == "DELETED":
            if known:
                known.kill(signal.SIGKILL)
        elif "deletionTimestamp" in pod["metadata"]:
            if known:
                known.stop(pod["metadata"].get("deletionGracePeriodSeconds", 0))
            elif "nodeName" in spec:
                forget(api, pod)
        elif known is None and "nodeName" in spec:
            pods[uid] = Pod(api, pod, folder)


def follow_names(api, names):
    """Keeps the addresses of pods by their full names."""
    slices = {}
    for kind, part in api.watch("/apis/discovery.k8s.io/v1/endpointslices"):
        metadata = part["metadata"]
        service = f"{metadata.get('labels', {}).get('kubernetes.io/service-name')}.{metadata['namespace']}.svc.cluster.local"
        slices[metadata["uid"]] = {
            f"{endpoint['hostname']}.{service}": endpoint["addresses"][0]
            for endpoint in (part.get("endpoints") or [] if kind != "DELETED" else [])
            if "hostname" in endpoint and endpoint["conditions"].get("ready")
        }
        current = {name: address for part in slices.values() for name, address in part.items()}
        names.update(current)
        for name in set(names) - set(current):
            del names[name]


def answer_names(names):
    """A DNS server for queries of one name, RFC 1035."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind((GATEWAY, 53))
    while True:
        query, client = server.recvfrom(512)
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode().lower())
            at += 1 + query[at]
        question = query[12 : at + 5]
        (kind,) = struct.unpack(">H", question[-4:-2])
        address = names.get(".".join(labels))
        answer = b""
        if address and kind == 1:
            # The name at offset 12, A, IN, 5 s, 4 bytes.
            answer = struct.pack(">HHHIH", 0xC00C, 1, 1, 5, 4) + socket.inet_aton(address)
        flags = 0x8580 if address else 0x8583
        header = query[:2] + struct.pack(">HHHHH", flags, 1, bool(answer), 0, 0)
        server.sendto(header + question + answer, client)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--server", required=True)
    parser.add_argument("--ca", required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--pods", type=Path, required=True, help="folder for a folder of each pod")
    args = parser.parse_args()
    api = Api(args.server, args.ca, args.token)
    names = {}
    for work in ((follow_names, api, names), (answer_names, names)):
        threading.Thread(target=work[0], args=work[1:], daemon=True).start()
    room = {"cpu": "8", "memory": "64Gi", "pods": "1", "nvidia.com/gpu": "2"}
    for node in range(args.nodes):
        metadata = {"name": f"node-{node}"}
        status = {"capacity": room, "allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]}
        api.do("POST", "/api/v1/nodes", {"apiVersion": "v1", "kind": "Node", "metadata": metadata, "status": status})
    run_pods(api, args.pods)


if __name__ == "__main__":
    main()
