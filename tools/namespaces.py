"""Hosts on one machine: a network namespace for each GPU of a topology, with links that the kernel shapes and counts.

    switch namespace    bridge br0  - eth0 of every GPU, its NIC: shaped in both directions
                        bridge brH  - nvlink0 of every GPU of host H: not shaped
    GPU namespace       lo: between ranks that share the GPU

A GPU is 10.77.0.(1 + its number) on both of its links. The GPUs of its host are reached by nvlink0, all others by eth0.
All traffic stays in these namespaces, which are gone at the end. Needs root, and ip and tc of iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

INTERFACES = ("lo", "nvlink0", "eth0")  # in the order of planner/plan/paths.py: LINKS
STORE_ADDRESS = "10.77.0.254"
SWITCH = f"mr-{os.getpid()}-switch"
_CLONE_NEWNET = 0x40000000
_SYSCTLS = (
    "net.ipv6.conf.all.disable_ipv6=1",
    "net.ipv4.tcp_congestion_control=reno",  # bbr leaves a link idle to measure its delay
    "net.ipv4.tcp_rmem=4096 131072 262144",  # so that no queue grows beyond what is under way
    "net.ipv4.tcp_wmem=4096 65536 131072",
)


def unavailable_reason() -> str | None:
    """Why namespaces with shaped links cannot be made here; None if they can."""
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [command for command in ("ip", "tc", "sysctl") if shutil.which(command) is None]:
        return f"{' and '.join(missing)} is not installed"
    try:
        with gpu_namespaces([0], 100):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {(error.stderr or '').strip()}"


@contextmanager
def gpu_namespaces(host_of: Sequence[int], mbit: float) -> Iterator[list[str]]:
    """A namespace for each GPU, on the host of that number, with a NIC of so many Mbit/s each way; their names."""
    names = [f"mr-{os.getpid()}-gpu{gpu}" for gpu in range(len(host_of))]
    try:
        for name in (SWITCH, *names):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "netns", "exec", name, "sysctl", "-q", *_SYSCTLS, "-w")
        for bridge in ("br0", *(f"br{1 + host}" for host in sorted(set(host_of)))):
            _run("ip", "-n", SWITCH, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", SWITCH, "link", "set", bridge, "up")
        _run("ip", "-n", SWITCH, "addr", "add", f"{STORE_ADDRESS}/24", "dev", "br0")
        for gpu, (name, host) in enumerate(zip(names, host_of, strict=True)):
            _plug(name, "eth0", f"nic{gpu}", "br0")
            _run("ip", "-n", name, "addr", "add", f"{_address(gpu)}/24", "dev", "eth0")
            for place, device in ((name, "eth0"), (SWITCH, f"nic{gpu}")):  # out of the NIC, and into it
                _shape(place, device, mbit)
            _plug(name, "nvlink0", f"link{gpu}", f"br{1 + host}")
            for other, other_host in enumerate(host_of):
                if other != gpu and other_host == host:
                    _run(
                        "ip",
                        "-n",
                        name,
                        "route",
                        "add",
                        f"{_address(other)}/32",
                        "dev",
                        "nvlink0",
                        "src",
                        _address(gpu),
                    )
        yield names
    finally:
        for name in (SWITCH, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def enter(namespace: str) -> None:
    """Move this process, which has one thread, into a network namespace. See setns(2)."""
    with open(f"/run/netns/{namespace}") as opened:
        if ctypes.CDLL(None, use_errno=True).setns(opened.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def counters() -> dict[str, tuple[int, int]]:
    """Bytes out of and into each interface of this process's namespace since it was made."""
    counted: dict[str, tuple[int, int]] = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        interface, _, fields = line.partition(":")
        if interface.strip() in INTERFACES:
            counted[interface.strip()] = int(fields.split()[8]), int(fields.split()[0])
    return counted


def _address(gpu: int) -> str:
    return f"10.77.0.{1 + gpu}"


def _plug(namespace: str, device: str, port: str, bridge: str) -> None:
    """Connect a namespace with a bridge of the switch."""
    _run("ip", "-n", namespace, "link", "add", device, "type", "veth", "peer", "name", port, "netns", SWITCH)
    _run("ip", "-n", SWITCH, "link", "set", port, "master", bridge, "up")
    _run("ip", "-n", namespace, "link", "set", device, "up")


def _shape(namespace: str, device: str, mbit: float) -> None:
    """Let so many Mbit/s through. Packets of less than 128 bytes go first: acknowledgements would wait behind data."""
    tc = ("tc", "-n", namespace)
    rate = ("rate", f"{mbit:g}mbit", "burst", "64kb", "cburst", "64kb", "quantum", "3000")
    _run(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "2")
    _run(*tc, "class", "add", "dev", device, "parent", "1:", "classid", "1:1", "htb", *rate)
    for number, share, priority in (("2", 0.9, "1"), ("3", 0.1, "0")):
        part = ("rate", f"{mbit * share:g}mbit", "ceil", f"{mbit:g}mbit", *rate[2:], "prio", priority)
        _run(*tc, "class", "add", "dev", device, "parent", "1:1", "classid", f"1:{number}", "htb", *part)
        _run(*tc, "qdisc", "add", "dev", device, "parent", f"1:{number}", "bfifo", "limit", "64mb")
    short = ("u32", "match", "u16", "0", "0xff80", "at", "2", "flowid", "1:3")  # the length in the header of IPv4
    _run(*tc, "filter", "add", "dev", device, "parent", "1:", "protocol", "ip", "prio", "1", *short)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
