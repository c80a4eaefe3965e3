"""A job on a Ray cluster, written by `paceline submit ray`. `python3` with this file submits it, again and again.

As the driver of a Ray job it starts one `paceline run` on each of the job's nodes. The launchers meet, watch their ranks and start them again
by themselves. What is left to do here: room for them, another one whenever a node comes or goes where the number of nodes is a range, their
output, signals, and their exit code.
"""

import ctypes
import json
import os
import queue
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

try:
    import ray
    from ray.job_submission import JobSubmissionClient
except ImportError as error:
    sys.stderr.write(f"error: {sys.executable} has no Ray: {error}\nhint: `pip install 'ray[default]'` brings it\n")
    sys.exit(3)
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

JOB = {}

# Launchers end together. Those that do not are asked to, so long after the first; or they go on, if nodes may come and go.
OTHERS_SECONDS = 60
# How often launchers are started again that were killed on nodes that live.
KILLED_MAX = 3
CHUNK_BYTES_MAX = 1 << 16
# How a launcher ends that was killed, unlike one whose rank was.
KILLED = -signal.SIGKILL

ENVIRONMENT, DEADLINE = 3, 4
# The package as which this file travels.
PACKAGE = "paceline_driver"


class Agent:
    """The launcher of one node, in a Ray actor."""

    def __init__(self):
        self.lock = threading.Lock()
        self.launcher = None
        self.asked = None

    def node(self):
        """The node's id and address, and a free port of which the next one is free too."""
        context = ray.get_runtime_context()
        return context.get_node_id(), ray.util.get_node_ip_address(), free_port()

    def run(self, words, env):
        """Yields what the launcher prints, in whole lines, and then its exit code."""
        try:
            self.begin(words, env)
        except OSError as error:
            yield unstarted(error)
            yield ENVIRONMENT
            return
        lines = b""
        while chunk := os.read(self.launcher.stdout.fileno(), CHUNK_BYTES_MAX):
            lines += chunk
            end = lines.rfind(b"\n") + 1
            if end == 0 and len(lines) >= CHUNK_BYTES_MAX:
                end = len(lines)
            if end > 0:
                yield lines[:end]
                lines = lines[end:]
        if lines:
            yield lines + b"\n"
        yield self.launcher.wait()

    def begin(self, words, env):
        libc, parent = ctypes.CDLL(None), os.getpid()

        def end_with_parent():
            pr_set_pdeathsig = 1
            libc.prctl(pr_set_pdeathsig, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        env = {**os.environ, **env}
        # Ray sets it to the CPUs of all ranks together.
        env.pop("OMP_NUM_THREADS", None)
        with self.lock:
            self.launcher = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=JOB.get("chdir"),
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
            if self.asked is not None:
                self.launcher.send_signal(self.asked)

    def signal(self, number):
        with self.lock:
            self.asked = number
            if self.launcher is not None:
                self.launcher.send_signal(number)


class Seat(threading.Thread):
    """A place for a launcher. It waits for Ray to find a node, and follows the launcher there."""

    def __init__(self, number, options, events):
        super().__init__(name=f"seat{number}", daemon=True)
        self.number = number
        self.events = events
        # The node's id, its address and a port, once Ray has found one.
        self.node = None
        self.is_started = False
        self.launch = queue.SimpleQueue()
        self.agent = ray.remote(Agent).options(max_concurrency=2, **options).remote()
        self.start()

    def run(self):
        try:
            self.node = ray.get(self.agent.node.remote())
            self.events.put(("placed", self, None))
            words, env = self.launch.get()
            # A driver that cannot write holds up the launchers, as a blocked console would.
            run = self.agent.run.options(num_returns="streaming", _generator_backpressure_num_objects=16)
            for piece in run.remote(words, env):
                piece = ray.get(piece)
                if isinstance(piece, bytes):
                    show(piece)
                    continue
                if piece == KILLED:
                    # Its node may be going. Then there is no answer.
                    ray.get(self.agent.node.remote())
                self.events.put(("ended", self, piece))
        except ray.exceptions.ActorUnavailableError:
            self.events.put(("lost", self, self.fate()))
        except ray.exceptions.RayError as error:
            self.events.put(("lost", self, error))

    def fate(self):
        """What has become of an agent that does not answer: Ray takes its time before it gives a node up. An agent that comes back has lost
        what its launcher printed meanwhile, and does not count."""
        while True:
            try:
                ray.get(self.agent.node.remote())
                ray.kill(self.agent)
            except ray.exceptions.ActorUnavailableError:
                time.sleep(1)
            except ray.exceptions.RayError as error:
                return error


class Driver:
    def __init__(self):
        self.min, self.max = JOB["nodes"]
        self.events = queue.SimpleQueue()
        self.env = {**JOB["env"], "PACELINE_JOB_TOKEN": secrets.token_hex(32)}
        self.began = time.monotonic()
        # Since when no node has been there, if none is.
        self.alone_since = self.began
        self.group = None
        self.endpoint = None
        self.seats = {}
        self.excluded = None
        # Where the placement group has its bundles; a launcher that starts again comes back there.
        self.reserved = {}
        # Nodes whose launcher has failed alone.
        self.unfit = set()
        self.codes = []
        self.killed = 0
        # Until when launchers may run after the first has ended, and whether they were asked to end.
        self.ends_at = None
        self.asked = None

    def run(self):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, lambda number, _: self.events.put(("signal", None, number)))
        self.reserve()
        if self.min < self.max:
            self.endpoint = self.serve_store()
        for number in range(self.min):
            self.sit(number)
        while self.seats:
            self.take(*self.next_event())
        return 0 if 0 in self.codes else (self.codes or [1])[0]

    def reserve(self):
        """Waits for room on the fewest nodes."""
        self.group = placement_group([bundle()] * self.min, strategy="STRICT_SPREAD", name=JOB["name"])
        told = None
        limit = JOB["join_timeout"]
        while not self.group.wait(1):
            if not self.events.empty():
                raise SystemExit(128 + self.events.get()[2])
            waited = time.monotonic() - self.began
            if waited >= limit:
                fail(f"there was no room within {limit:g} s for {wanted(self.min)}: {found()}", DEADLINE, ROOM_HINT)
            if waited >= 2 and told != found():
                told = found()
                say(f"waiting for room for {wanted(self.min)}: {told} (gives up after {limit:g} s)")

    def serve_store(self):
        """Hosts the launchers' store beside this program: every node may go, and new ones know where to look."""
        words = [JOB["launcher"], "store-server"]
        try:
            # It ends when its standard input does, and that with this process.
            self.store = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **self.env}, start_new_session=True
            )
        except OSError as error:
            show(unstarted(error))
            raise SystemExit(ENVIRONMENT) from None
        port = self.store.stdout.readline().strip().decode()
        if not port:
            raise SystemExit(self.store.wait())
        return address(ray.util.get_node_ip_address(), port)

    def sit(self, number):
        """Asks Ray for a node for one more launcher."""
        size = bundle()
        options = {"num_cpus": size["CPU"], "num_gpus": size.get("GPU", 0), "memory": size.get("memory")}
        if number < self.min:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self.group, number)
        elif self.excluded:
            # A blank would be part of a node's name.
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(self.excluded)})"}
        self.seats[number] = Seat(number, options, self.events)

    def grow(self):
        """Has Ray look for a node beyond the fewest: for one at a time, because it must be none of those that the job has."""
        if self.min == self.max or self.ends_at is not None:
            return
        waiting = [seat for number, seat in self.seats.items() if number >= self.min and seat.node is None]
        seated = {seat.node[0] for seat in self.seats.values() if seat.node is not None}
        taken = sorted(seated | self.unfit | set(self.reserved.values()))
        if waiting and taken == self.excluded:
            return
        for seat in waiting:
            self.leave(seat)
        number = next((number for number in range(self.min, self.max) if number not in self.seats), None)
        if number is not None:
            self.excluded = taken
            self.sit(number)

    def leave(self, seat):
        del self.seats[seat.number]
        ray.kill(seat.agent)

    def next_event(self):
        """What happens next, a passed time limit included."""
        limit = JOB.get("time_limit")
        times = []
        if self.ends_at is not None:
            times.append((self.ends_at, "late"))
        if limit and self.asked is None:
            times.append((self.began + limit, "time"))
        if not any(seat.node for seat in self.seats.values()):
            times.append((self.alone_since + JOB["join_timeout"], "alone"))
        try:
            timeout = max(0, min(times)[0] - time.monotonic()) if times else None
            return self.events.get(timeout=timeout)
        except queue.Empty:
            return min(times)[1], None, None

    def take(self, kind, seat, what):
        if seat is not None and self.seats.get(seat.number) is not seat:
            return
        if kind == "placed":
            if seat.number < self.min:
                self.reserved[seat.number] = seat.node[0]
            self.begin(seat)
            self.grow()
        elif kind == "ended":
            self.ended(seat, what)
        elif kind == "lost":
            self.lost(seat, what)
        elif kind == "signal":
            self.stop(what)
        elif kind == "time":
            say(f"the time limit of {JOB['time_limit']} s is over")
            self.stop(signal.SIGTERM)
        elif kind == "alone":
            fail(f"no node was left, and none came within {JOB['join_timeout']:g} s: {found()}", DEADLINE, ROOM_HINT)
        elif self.asked is None and self.min < self.max and 0 not in self.codes:
            say("the other launchers run on: the job goes on without the node")
            self.ends_at = None
            self.codes.clear()
            self.grow()
        elif self.asked is None:
            say(f"launchers still run {OTHERS_SECONDS} s after the first has ended: they are asked to end")
            self.stop(signal.SIGTERM)
        else:
            fail("launchers did not end in time; Ray kills them", DEADLINE)

    def begin(self, seat):
        """Starts the launcher, or all of them if each must be told of the first."""
        if self.min < self.max:
            nodes = f"{self.min}:{self.max}"
            place = ["--nnodes", nodes, "--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint]
            self.start(seat, place)
        elif self.max == 1:
            self.start(seat, ["--standalone"])
        elif not seat.is_started and all(seat.node for seat in self.seats.values()):
            _, host, port = self.seats[0].node
            for number, seat in self.seats.items():
                place = ["--nnodes", str(self.max), "--node-rank", str(number)]
                self.start(seat, [*place, "--master-addr", host, "--master-port", str(port)])

    def start(self, seat, place):
        if self.max > 1:
            place = [*place, "--local-addr", seat.node[1], "--rdzv-id", f"ray-{ray.get_runtime_context().get_job_id()}"]
        words = [JOB["launcher"], "run", *place, *JOB["options"], *JOB["command"]]
        seat.is_started = True
        seat.launch.put((words, self.env))

    def ended(self, seat, code):
        if code == KILLED:
            if self.min < self.max and self.again(seat, "its launcher was killed"):
                return
            complain(f"the launcher on the node {seat.node[1]} was killed")
        del self.seats[seat.number]
        if code != 0:
            self.unfit.add(seat.node[0])
        self.codes.append(128 - code if code < 0 else code)
        self.wind_up()

    def lost(self, seat, error):
        node = seat.node or ("", "that Ray had chosen", 0)
        is_alive = any(one["NodeID"] == node[0] and one["Alive"] for one in ray.nodes())
        # The rest of Ray's explanation is general.
        said = str(error).strip().splitlines()[-1].split(". ")[0]
        reason = said if is_alive or not seat.node else "Ray has lost it"
        if self.min < self.max and self.ends_at is None and seat.node:
            if not is_alive:
                self.reserved.pop(seat.number, None)
                say(f"the node {node[1]} is gone; the job goes on without it")
                self.replace(seat)
                return
            if self.again(seat, reason):
                return
        complain(f"the node {node[1]} has left the job: {reason}")
        del self.seats[seat.number]
        self.wind_up()

    def again(self, seat, reason):
        """Starts a launcher again that was killed on a node that lives; not for ever."""
        self.killed += 1
        if self.killed > KILLED_MAX or self.ends_at is not None:
            return False
        say(f"the node {seat.node[1]} starts again: {reason}")
        self.replace(seat)
        return True

    def replace(self, seat):
        self.leave(seat)
        self.alone_since = time.monotonic()
        if seat.number < self.min:
            self.sit(seat.number)
        self.grow()

    def wind_up(self):
        """The job is over, or about to be: no more nodes, and an end to all."""
        if self.ends_at is None:
            self.ends_at = time.monotonic() + OTHERS_SECONDS
        for seat in [seat for seat in self.seats.values() if not seat.is_started]:
            self.leave(seat)

    def stop(self, number):
        if self.asked is None:
            self.ends_at = time.monotonic() + JOB["grace"] + OTHERS_SECONDS
        self.asked = number
        self.wind_up()
        for seat in self.seats.values():
            seat.agent.signal.remote(number)
        if not self.seats and not self.codes:
            self.codes.append(128 + number)


ROOM_HINT = (
    "ask for less with --nodes, --gpus-per-node, --cpus-per-rank or --mem, add nodes to the cluster, or wait longer with "
    "--rdzv-conf join_timeout=SECONDS; `ray status` shows what uses it"
)


def bundle():
    return JOB["bundle"]


def wanted(nodes):
    return f"{counted(nodes, 'node')} with {amounts(bundle())}{' each' if nodes > 1 else ''}"


def found():
    """What the cluster has, in words."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    fits = [node for node in nodes if all(node["Resources"].get(name, 0) >= size for name, size in bundle().items())]
    free = ray.available_resources()
    free = amounts({name: free.get(name, 0) for name in bundle()})
    return f"{len(fits)} of the cluster's {counted(len(nodes), 'node')} can have that much, and {free} are free in all of it"


def amounts(resources):
    def amount(name, size):
        return f"{size / (1 << 20):.0f} MiB of memory" if name == "memory" else counted(int(size), name)

    return ", ".join(amount(name, size) for name, size in resources.items())


def counted(count, noun):
    return f"{count} {noun}{'' if count == 1 else 's'}"


def free_port():
    for _ in range(32):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("", port + 1))
                return port
            except (OSError, OverflowError):
                pass
    raise OSError("no two free ports in a row")


def address(host, port):
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unstarted(error):
    host = ray.util.get_node_ip_address()
    hint = "the image, --working-dir or --runtime-env-json must bring the launcher to every node; --launcher names it"
    return f"error: the launcher cannot be started on the node {host}: {error}\nhint: {hint}\n".encode()


printing = threading.Lock()


def show(lines):
    with printing:
        sys.stdout.buffer.write(lines)
        sys.stdout.buffer.flush()


def tell(kind, text):
    with printing:
        sys.stderr.write(f"{kind}: {text}\n")
        sys.stderr.flush()


def say(text):
    tell("note", text)


def complain(text):
    tell("error", text)


def fail(text, code, hint=None):
    complain(text)
    if hint:
        tell("hint", hint)
    raise SystemExit(code)


def submit():
    """Has Ray run this file on a node of the cluster."""
    env = json.loads(JOB.get("runtime_env", "{}"))
    if "working_dir" in JOB:
        env["working_dir"] = JOB["working_dir"]
    # `ray job stop` kills a driver after 3 s, in which ranks can save nothing.
    stop_seconds = str(JOB["grace"] + 10)
    env["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": stop_seconds, **env.get("env_vars", {})}
    with tempfile.TemporaryDirectory() as folder:
        package = os.path.join(folder, PACKAGE)
        os.mkdir(package)
        shutil.copy(__file__, os.path.join(package, "__main__.py"))
        env["py_modules"] = [*env.get("py_modules", []), package]
        try:
            client = JobSubmissionClient(JOB.get("address"))
            metadata = {"job_name": JOB["name"]}
            job = client.submit_job(entrypoint=f"python3 -m {PACKAGE}", runtime_env=env, metadata=metadata)
        except (ConnectionError, RuntimeError, ValueError) as error:
            fail(f"Ray does not take the job: {error}", ENVIRONMENT)
    print(f"submitted {job}", flush=True)
    tell("hint", f"`ray job logs --follow {job}` shows what the job prints; `ray job stop {job}` ends it")


if __name__ == "__main__":
    if __package__ == PACKAGE:
        ray.init(address="auto", log_to_driver=False)
        sys.exit(Driver().run())
    submit()
