"""A Ray cluster of several raylets on this machine, for ray.rs: answers one line of JSON with another, until its input ends.

Usage: ray_cluster.py CPUS...: a head without CPUs, and a raylet with so many for each number.
"""

import json
import os
import subprocess
import sys
import time

from ray.cluster_utils import Cluster
from ray.job_submission import JobSubmissionClient

import psutil  # Ray has its own

LIMIT_SECONDS = 300
GONE_SECONDS = 30


class Answers:
    def __init__(self, cpus):
        own = {"object_store_memory": 80 << 20}
        head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0, **own}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.own = own
        self.nodes = []
        for count in cpus:
            self.add(count)
        self.address = f"http://{self.cluster.head_node.webui_url}"
        self.client = JobSubmissionClient(self.address)

    def add(self, cpus, gpus=0):
        self.nodes.append(self.cluster.add_node(num_cpus=cpus, num_gpus=gpus, **self.own))

    def kill(self, node):
        self.cluster.remove_node(self.nodes[node], allow_graceful=False)

    def submit(self, words):
        env = {**os.environ, "RAY_API_SERVER_ADDRESS": self.address}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        first, _, job = done.stdout.partition(" ")
        return job.strip() if first == "submitted" else done.stdout + done.stderr

    def says(self, job, text):
        """Whether the job says it before its end."""
        return self.until(lambda: text in self.client.get_job_logs(job) or self.client.get_job_status(job).is_terminal()) and (
            text in self.client.get_job_logs(job)
        )

    def hit(self, rank):
        """Kills the process of a rank."""
        [process] = [process for process, env in ranks() if env.get("RANK") == str(rank)]
        process.kill()

    def hit_process(self, command):
        """Kills one process whose command begins like this."""
        found = [process for process, _ in marked() if " ".join(process.cmdline()).startswith(command)]
        found[0].kill()

    def stop(self, job):
        self.client.stop_job(job)

    def end(self, job):
        """How the job has ended, what it has said, and what it has left."""
        self.until(lambda: self.client.get_job_status(job).is_terminal())
        info = self.client.get_job_info(job)
        self.until(lambda: not ranks(), GONE_SECONDS)
        left = [process.cmdline() for process, _ in ranks()]
        return {"status": str(info.status.value), "code": info.driver_exit_code, "log": self.client.get_job_logs(job), "left": left}

    def until(self, holds, seconds=LIMIT_SECONDS):
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(0.1)
        return True


def marked():
    """The processes of this test, and their environment."""
    for process in psutil.process_iter():
        try:
            env = process.environ()
            if env.get("PROCESS_TEST_MARK") == os.environ["PROCESS_TEST_MARK"]:
                yield process, env
        except psutil.Error:
            pass


def ranks():
    """Processes of a job, launchers among them."""
    return [(process, env) for process, env in marked() if "PACELINE_JOB_TOKEN" in env]


def main():
    answers = Answers(map(int, sys.argv[1:]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *words = json.loads(line)
        print(json.dumps(getattr(answers, name)(*words)), flush=True)
    answers.cluster.shutdown()


main()
