"""Simulate several hosts on one machine, to try a launch over ssh without a cluster.

    python -m tools.check.local_cluster [--hosts 2] [--slots 1] -- \\
        deepspeed --hostfile /run/cluster/hosts --module disco_ds.train --config quickstart

Each host is a set of Linux namespaces: network, host name, mounts and processes. It has an address on a common switch
and runs an sshd. Between the hosts, ssh needs no password. The command runs on the first host. The hostfile is
/run/cluster/hosts.

All hosts see the same files, as on a shared file system. Only /run, /etc/ssh, ~/.ssh and /dev/shm are separate for each
host. On Ctrl-C, DeepSpeed's launcher kills processes by name (pkill -f). Here, this reaches only processes on the
simulated hosts. When this program ends, for any reason, all hosts end too and leave nothing behind.

Do not use this for real training, because the hosts share the machine's cores. It needs Linux, root, and Debian's pdsh,
openssh-server and iproute2. It is not part of the package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SWITCH = "switch"
FOLDER = Path("/run/cluster")
HOSTFILE = FOLDER / "hosts"
ENVIRONMENT = FOLDER / "deepspeed_env"
NAMESPACES = ("--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
NETWORK = "10.77.0"
PACKAGES = {
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "hostname": "hostname",
    "pkill": "procps",
    "ip": "iproute2",
    "pdsh": "pdsh",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "sshd": "openssh-server",
}
"""Program -> Debian package."""

# The first process of a host. When it ends, the kernel kills all other processes of the host. It ends when its standard
# input closes: the program that created the host has ended or has called `close`. It also ends after argv[1] seconds.
HOLD = """
import select, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap orphaned processes
print("up", flush=True)
select.select([sys.stdin], [], [], float(sys.argv[1]))
"""
# ~/.ssh is hidden by an empty folder, because its settings must not affect connections to the simulated hosts.
SETUP = """
set -e
ip link set lo up
ip address add "$2" dev eth0
ip link set eth0 up
hostname "$1"
for own in /run /etc/ssh /dev/shm; do mount -t tmpfs tmpfs "$own"; done
if [ -d ~/.ssh ]; then mount -t tmpfs tmpfs ~/.ssh; fi
mkdir /run/sshd "$3"
"""
SSHD = """
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
StrictModes no
UsePAM no
MaxStartups 1000
"""
# Without keep-alives, ssh would wait forever for a host whose link is cut, and the launcher would wait for ssh.
SSH = """
IdentityFile /etc/ssh/key
GlobalKnownHostsFile /etc/ssh/known_hosts
UserKnownHostsFile none
UpdateHostKeys no
ServerAliveInterval 5
ServerAliveCountMax 3
"""


def describe_missing() -> str | None:
    """Describe what this machine lacks to simulate a cluster. Return None if it lacks nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "Linux and root are needed to make network namespaces"
    lacking = {
        package
        for program, package in PACKAGES.items()
        if shutil.which(program, path=_path()) is None
    }
    if lacking:
        return f"apt-get install --no-install-recommends {' '.join(sorted(lacking))}"
    links = "ip link add type veth && ip link add type bridge"
    probe = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", links], capture_output=True, text=True, env=_env()
    )
    return (
        f"namespaces or virtual links are not allowed here: {probe.stderr.strip()}"
        if probe.returncode
        else None
    )


class LocalCluster:
    """The hosts host-1, host-2, ..., which exist during a `with` block.

    An additional host, called "switch", connects them. The link to host-K is the network interface port-K of the
    switch; to cut the link, set this interface down.

    Args:
        hosts: Number of hosts.
        slots: Number of slots of each host in the hostfile.
        timeout_s: All hosts end after this time at the latest.

    Raises:
        RuntimeError: If the hosts cannot be created.
    """

    def __init__(self, hosts: int = 2, slots: int = 1, timeout_s: float = 3600.0):
        self.slots, self.timeout_s = slots, timeout_s
        self.addresses = {f"host-{number}": f"{NETWORK}.{number}" for number in range(1, hosts + 1)}
        self.holders: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> LocalCluster:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts with all of their processes, links and mounts."""
        for holder in self.holders.values():
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self.holders.values():
            try:
                holder.wait(timeout=20)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()

    def start(
        self,
        command: Sequence[str],
        host: str = "host-1",
        folder: Path | None = None,
        **options: Any,
    ) -> Any:
        """Start a command on a host, and return its subprocess.Popen, which is created with `options`.

        When the host ends, the command and the processes that it has started end too.
        """
        return subprocess.Popen(self._on(host, command, folder), env=_env(), **options)

    def run(self, command: Sequence[str], host: str = "host-1", given: str = "") -> str:
        """Run a command on a host, and return its standard output. Raise RuntimeError if it fails."""
        done = subprocess.run(
            self._on(host, command), env=_env(), input=given, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} failed on {host}: {done.stderr.strip() or done.returncode}"
            )
        return done.stdout

    def _on(self, host: str, command: Sequence[str], folder: Path | None = None) -> list[str]:
        pid = self.holders[host].pid
        # `pid` is the process `unshare`, which stays in the outer process namespace. Only its child is in the new one.
        spaces = ["--mount", "--uts", "--net", f"--pid=/proc/{pid}/ns/pid_for_children"]
        return [
            "nsenter",
            "--target",
            str(pid),
            *spaces,
            "env",
            "--chdir",
            str(folder or Path.cwd()),
            *command,
        ]

    def _make(self) -> None:
        for host in (SWITCH, *self.addresses):
            command = ["unshare", *NAMESPACES, sys.executable, "-c", HOLD, str(self.timeout_s)]
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "text": True,
            }
            # Start a new session, because Ctrl-C in the terminal must reach the command but must not end the hosts.
            holder = subprocess.Popen(command, env=_env(), start_new_session=True, **pipes)
            self.holders[host] = holder
            assert holder.stdout is not None
            if holder.stdout.readline() != "up\n":
                raise RuntimeError(f"cannot create {host}: {describe_missing()}")
        self.run(["ip", "link", "add", "bridge", "type", "bridge"], SWITCH)
        self.run(["ip", "link", "set", "bridge", "up"], SWITCH)
        for number, (host, address) in enumerate(self.addresses.items(), 1):
            self._connect(host, f"port-{number}")
            self.run(["sh", "-c", SETUP, "sh", host, f"{address}/24", str(FOLDER)], host)
        self.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", "/etc/ssh/key"])
        files = self._files()
        for host in self.addresses:
            for path, text in files.items():
                self.run(["install", "-m", "600", "/dev/stdin", path], host, text)
            self.run(["mount", "--bind", str(FOLDER / "names"), "/etc/hosts"], host)
            self.run([shutil.which("sshd", path=_path()) or "sshd"], host)
        for host in self.addresses:
            self._wait_for_ssh(host)

    def _connect(self, host: str, port: str) -> None:
        """Create a link between the host's eth0 and a port of the switch."""
        # Enter only the switch's network namespace. self.run would also enter its process namespace, in which the
        # host's process id does not exist.
        enter = ["nsenter", "--target", str(self.holders[SWITCH].pid), "--net"]
        peer = ["peer", "name", "eth0", "netns", str(self.holders[host].pid)]
        subprocess.run(
            [*enter, "ip", "link", "add", port, "type", "veth", *peer], check=True, env=_env()
        )
        self.run(["ip", "link", "set", port, "up", "master", "bridge"], SWITCH)

    def _files(self) -> dict[str, str]:
        """Return the files that are the same on every host: path -> text."""
        public = self.run(["cat", "/etc/ssh/key.pub"])
        names = [f"{address} {host}" for host, address in self.addresses.items()]
        # sshd starts shells without these variables. DeepSpeed passes variables to other hosts only if they are in
        # DS_ENV_FILE or have certain prefixes, such as PYTHON. So write them into this file.
        known = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
        known |= {
            key: _env()[key] for key in ("DS_ACCELERATOR", "OMP_NUM_THREADS") if key in _env()
        }
        return {
            "/etc/ssh/key": self.run(["cat", "/etc/ssh/key"]),
            "/etc/ssh/key.pub": public,
            "/etc/ssh/known_hosts": f"* {public}",
            "/etc/ssh/sshd_config": SSHD,
            "/etc/ssh/ssh_config": SSH,
            str(FOLDER / "names"): "\n".join(["127.0.0.1 localhost", *names, ""]),
            str(HOSTFILE): "".join(f"{host} slots={self.slots}\n" for host in self.addresses),
            str(ENVIRONMENT): "".join(f"{key}={value}\n" for key, value in known.items()),
        }

    def _wait_for_ssh(self, host: str) -> None:
        end = time.monotonic() + 20
        while True:
            try:
                self.run(["ssh", host, "true"])
                return
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)


def _path() -> str:
    """Return PATH with the folder of this Python first, as in an activated environment, and the sbin folders last."""
    return os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]
    )


def _env() -> dict[str, str]:
    """Return the environment of the processes on a host.

    By default, ranks run on the CPU, because all hosts share the GPUs of this machine.
    """
    own = {"PATH": _path(), "DS_ENV_FILE": str(ENVIRONMENT)}
    return {"DS_ACCELERATOR": "cpu", **os.environ, **own}


def main() -> int:
    """Run the command on the first host.

    Returns:
        The command's exit code; 2 if the hosts cannot be created, 124 after --timeout, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        description="Run a command on the first of several hosts that are simulated on this machine."
    )
    parser.add_argument("--hosts", type=int, default=2, choices=range(1, 251), metavar="N")
    parser.add_argument(
        "--slots", type=int, default=1, metavar="N", help="slots per host in the hostfile"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=3600.0,
        metavar="S",
        help="stop the command and all hosts after S seconds (default: 3600)",
    )
    parser.add_argument(
        "command",
        nargs="+",
        help=f"command to run on the first host, after --; the hostfile is {HOSTFILE}",
    )
    args = parser.parse_args()
    if problem := describe_missing():
        print(f"no local cluster: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Give the hosts a later timeout than the command. It takes effect only if this process is suspended.
    with LocalCluster(args.hosts, args.slots, args.timeout + 60) as cluster:
        process = cluster.start(args.command)
        try:
            code = process.wait(timeout=args.timeout)
        except subprocess.TimeoutExpired:
            print(f"not finished after {args.timeout:g} s; all hosts were stopped", file=sys.stderr)
            return 124
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
