#!/usr/bin/env python3
"""Measures how long a small job of PyTorch takes to join and to end when Paceline starts it and when the engine's own tool does: on Ray,
beside Ray Train's TorchTrainer, and over ssh, beside torchrun on each host. The ranks run the same program.

Usage: benches/engines.py [--rounds R] [--python PYTHON] [PROGRAM]
       benches/engines.py --table

PROGRAM is the `paceline` to run, by default target/release/paceline; PYTHON has torch and `ray[default,train]`, by default python3. Ray's two
nodes are raylets of this machine, with a dashboard. The two hosts of ssh are addresses of this machine, each behind one sshd, which the
benchmark starts with keys of its own in a temporary folder. Each round starts every tool once. Raw results, one JSON object per line, are
appended to docs/benchmarks/engines.jsonl. A Markdown table goes to stdout, progress to stderr.

Exit codes: 0 done, 1 a job failed, 2 wrong usage."""

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from results import ROOT, Results, add_program, cell, check_program, newest, path

OUT = path("engines.jsonl")
PEERS = ROOT / "benches/peers"
RANKS = 2
SECONDS_MAX = 180
NAMES = {
    ("ray", "paceline"): "Ray, `paceline submit ray`",
    ("ray", "peer"): "Ray, `TorchTrainer`",
    ("ssh", "paceline"): "ssh, `paceline run --hosts`",
    ("ssh", "peer"): "ssh, torchrun on each host",
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Sshd:
    """An sshd on 127.0.0.1 and 127.0.0.2 that lets this user in with a key of its own."""

    def __init__(self, folder):
        port = free_port()
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        shutil.copy(folder / "user.pub", folder / "authorized")
        config = [f"Port {port}", "ListenAddress 127.0.0.1", "ListenAddress 127.0.0.2", f"HostKey {folder}/host", "UsePAM no", "StrictModes no",
                  f"AuthorizedKeysFile {folder}/authorized", "PidFile none", "PasswordAuthentication no", "PermitRootLogin yes"]
        (folder / "sshd").write_text("\n".join(config) + "\n", encoding="utf-8")
        os.makedirs("/run/sshd", exist_ok=True)
        self.ssh = f"ssh -p {port} -i {folder}/user -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o IdentitiesOnly=yes"
        self.server = subprocess.Popen([shutil.which("sshd", path="/usr/sbin:/sbin:" + os.environ["PATH"]), "-D", "-f", folder / "sshd"])


def run(words, **more):
    """Runs a command to its end; when it began."""
    began = time.time()
    done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS_MAX, check=False, **more)
    if done.returncode != 0:
        raise RuntimeError(f"{words[:4]} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    return began


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default="python3")
    parser.add_argument("--table", action="store_true")
    add_program(parser)
    args = parser.parse_args()
    if args.table:
        print(table(newest(OUT)))
        return
    check_program(parser, args.program)
    program = str(Path(args.program).resolve())
    python = shutil.which(args.python) or parser.error(f"there is no {args.python}")
    bin_folder = str(Path(python).parent)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "RAY_"))}
    env["PATH"] = f"{Path(program).parent}:{bin_folder}:{env['PATH']}"
    results = Results(OUT, program)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        sshd = Sshd(folder)
        cluster = subprocess.Popen([python, "-c", CLUSTER], stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**env, "RAY_worker_niceness": "0"})
        try:
            dashboard, gcs = cluster.stdout.readline().split()
            out = folder / "out.json"
            job = [python, str(PEERS / "engine.py"), str(out)]

            def submit_ray():
                more = {"env": {**env, "RAY_API_SERVER_ADDRESS": dashboard}, "cwd": folder}
                words = [program, "submit", "ray", "--nodes", "2", "--nproc-per-node", "1", *job]
                began = time.time()
                id = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS_MAX, check=True, **more).stdout.split()[-1]
                run([f"{bin_folder}/ray", "job", "logs", "--follow", id], **more)
                return began

            def ssh_torchrun():
                port = free_port()
                began = time.time()
                ranks = []
                for node in range(RANKS):
                    words = [python, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node),
                             "--master-addr", "127.0.0.1", "--master-port", str(port), *job[1:]]
                    ranks.append(subprocess.Popen([*shlex.split(sshd.ssh), f"127.0.0.{node + 1}", shlex.join(words)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
                for rank in ranks:
                    _, err = rank.communicate(timeout=SECONDS_MAX)
                    if rank.returncode != 0:
                        raise RuntimeError(err[-3000:])
                return began

            jobs = {
                ("ray", "paceline"): submit_ray,
                ("ray", "peer"): lambda: run([python, str(PEERS / "ray_train.py"), str(out), str(RANKS)], env={**env, "RAY_ADDRESS": gcs}, cwd=folder),
                ("ssh", "paceline"): lambda: run([program, "run", "--hosts", "127.0.0.1:1,127.0.0.2:1", "--ssh", sshd.ssh, *job], env=env, cwd=folder),
                ("ssh", "peer"): ssh_torchrun,
            }
            for round_ in range(args.rounds):
                for (engine, by), start in jobs.items():
                    print(f"round {round_ + 1} of {args.rounds}: {NAMES[engine, by]}", file=sys.stderr)
                    out.unlink(missing_ok=True)
                    began = start()
                    ended = time.time()
                    found = json.loads(out.read_text(encoding="utf-8"))
                    results.add(record="job", round=round_, engine=engine, by=by, joined_seconds=found["joined"] - began,
                                after_work_seconds=ended - found["ended"], step_seconds=found["step_seconds"], load=os.getloadavg()[0])
        finally:
            sshd.server.terminate()
            cluster.stdin.close()
            cluster.wait(60)
    print(table(results.end()))


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
own = {"object_store_memory": 80 << 20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_port": 0, **own})
for _ in range(2):
    cluster.add_node(num_cpus=2, **own)
print(f"http://{cluster.head_node.webui_url}", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def table(lines):
    rows = ["| | joined after, s | from the last step to the end, s | step, ms |", "|---|---|---|---|"]
    jobs = [line for line in lines if line["record"] == "job"]
    for (engine, by), name in NAMES.items():
        own = [job for job in jobs if (job["engine"], job["by"]) == (engine, by)]
        if own:
            of = lambda key, factor=1: cell([job[key] * factor for job in own], ".2f")
            rows.append(f"| {name} | {of('joined_seconds')} | {of('after_work_seconds')} | {of('step_seconds', 1000)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
