"""Print the torchrun line of each host: `train hosts gpu01 gpu02 recipe=gpt2_124m`."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.cli.compose import Composer
from trainer.cli.exit_messages import print_notes, print_out
from trainer.cli.prepare import prepare_run
from trainer.config.messages import clip
from trainer.config.run_config import RunConfig
from trainer.core import gpu
from trainer.core.errors import ConfigError
from trainer.core.format import plural
from trainer.features.hosts import network
from trainer.launch.membership import START_TIMEOUT, START_TIMEOUT_S
from trainer.launch.session import local_ranks
from trainer.report.records import num_cores

_ELSEWHERE = "198.51.100.1"  # which is kept free for examples, so the default route leads there
_FLAG = "--config-dir="


def print_lines(words: Sequence[str], settings: Mapping[str, str]) -> None:
    """Print what this host has, and the line of each host; start nothing."""
    typed, folders, values, others = list[str](), list[str](), list[str](), list[str]()
    for word in words:
        if word.startswith(_FLAG):
            folders.append(word.removeprefix(_FLAG))
        elif "=" in word or word.startswith("~"):
            values.append(word)
        else:
            others.append(word)
            continue
        typed.append(word)
    config = prepare_run(values, Composer.of(*folders)).config
    named = _hosts(others)
    port, found = settings["port"], network.interfaces()
    _refuse(config, port)
    hosts, ranks = named or [socket.gethostname()], local_ranks(config)
    addresses, here, taken = _way(hosts, found)
    variables = _variables(config, taken, ranks)
    lines = [*_seen(found, taken), "variables  in front of each line"]
    lines += [f"  {f'{name}={value}':<33} {why}" for name, (value, why) in variables.items()]
    environment = [f"{name}={shlex.quote(value)}" for name, (value, _) in variables.items()]
    for number, host in enumerate(hosts):
        # By number, so that the first rank, which prints, is on the first host
        flags = [f"--nnodes={len(hosts)}", f"--node-rank={number}", f"--nproc-per-node={ranks}"]
        flags += [f"--master-addr={addresses[hosts[0]] or hosts[0]}", f"--master-port={port}"]
        program = str(Path(sys.executable).with_name("torchrun"))
        command = shlex.join([program, *flags, "-m", "trainer", *typed])
        lines += ["", f"on {host}{' (this host)' * (host == here)}:"]
        lines.append(f"cd {shlex.quote(str(Path.cwd()))} && {' '.join(environment)} {command}")
    print_out("\n".join([*lines, ""]))
    notes = ["other hosts are taken to be as this one; type the same there to see them"]
    if not named:
        notes = ["one host; name all for more: train hosts gpu01 gpu02"]
    elif here is None:
        notes = ["this host is none of them, and stands for them; type the same on one of them"]
    for host in named:
        if not addresses[host]:
            notes.append(f"{host}: no address is known here; see /etc/hosts and DNS")
    if taken is None:
        notes.append("no interface here leads to another host")
    print_notes(notes)


def _way(
    hosts: Sequence[str], found: Sequence[network.Interface]
) -> tuple[dict[str, str], str | None, network.Interface | None]:
    """Find addresses of the hosts, which of them this one is, and the interface to the others."""
    addresses, own = {host: network.address_of(host) for host in hosts}, socket.gethostname()
    own_addresses = [each.address for each in found]
    here = next((h for h in hosts if h == own or addresses[h] in own_addresses), None)
    others = [address for host, address in addresses.items() if address and host != here]
    # Where none is known it is the interface of the default route.
    taken = network.leading_to([*others, _ELSEWHERE][0], found)
    if taken is None:
        taken = next((each for each in found if not each.is_inner), None)
    # By its own name a host may have a loopback's address.
    if here is not None and taken is not None:
        addresses[here] = taken.address
    return addresses, here, taken


def _seen(found: Sequence[network.Interface], taken: network.Interface | None) -> list[str]:
    """Say what this host has."""
    gpus = [str(gpu.name_of(each)) for each in gpu.devices()]
    has = ", ".join([plural(len(gpus), "GPU"), *dict.fromkeys(gpus)])
    lines = [f"this host  {socket.gethostname()}: {has}, {plural(num_cores(), 'core')}"]
    for each in found:
        note = ", leads to no other host" * each.is_inner
        if each == taken:
            note = ", taken for the ranks"
        lines.append(f"  {each.name:<16} {each.address:<16} {each.speed}{note}")
    ports = network.infiniband().items()
    return [*lines, *(f"  {name:<33} {rate:g} Gbit/s" for name, rate in ports)]


def _hosts(words: Sequence[str]) -> list[str]:
    """Read names of hosts; without any give those of this Slurm job, which knows its own."""
    names = list[str]()
    for word in words:
        names += word.split(",")
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name) or names.count(name) > 1:
            example = "type each once, as gpu01 gpu02; in bash gpu{01..08} are eight"
            raise ConfigError(clip(f"{name}: must be the name of one host; {example}"))
    if "localhost" in names and names[1:]:
        raise ConfigError("localhost: leads every host to itself; type this one's name or address")
    listed = os.environ.get("SLURM_JOB_NODELIST")
    if names or not listed:
        return names
    with suppress(OSError, subprocess.SubprocessError):
        asked = ["scontrol", "show", "hostnames", listed]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    raise ConfigError(clip(f"SLURM_JOB_NODELIST={listed}: scontrol lists no hosts; name them"))


def _refuse(config: RunConfig, port: str) -> None:
    """Refuse what torchrun or its ranks would."""
    asked = config.parallel
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(clip(f"port={port}: must be a port, 1 to 65535"))
    if asked.max_restarts:
        text = "torchrun restarts its ranks; add --max-restarts to each line, and resume=auto here"
        raise ConfigError(f"parallel.max_restarts={asked.max_restarts}: {text}")
    if config.device == "cuda" and asked.ranks == "auto" and not gpu.devices():
        raise ConfigError("parallel.ranks: no GPU is seen here; type how many each host has")


def _variables(
    config: RunConfig, taken: network.Interface | None, ranks: int
) -> dict[str, tuple[str, str]]:
    """Give environment variables of the lines, each with its value and its reason."""
    found = {START_TIMEOUT: (START_TIMEOUT_S, "seconds that ranks wait for the last of them")}
    has_gpus = config.device == "cuda" or (config.device == "auto" and bool(gpu.devices()))
    if taken is not None:
        why = "gloo would take the address of the host's own name, often a loopback"
        found["GLOO_SOCKET_IFNAME"] = taken.name, why
    if has_gpus and taken is not None:
        why = "this name alone, for set-up and TCP; NCCL would take the first ib*, or any other"
        found["NCCL_SOCKET_IFNAME"] = f"={taken.name}", why
    if has_gpus and (ports := network.infiniband()):
        best = max(ports.values())
        fastest = ",".join(port for port, rate in ports.items() if rate == best)
        found["NCCL_IB_HCA"] = f"={fastest}", f"ports of {best:g} Gbit/s; slower ones hold up all"
    if has_gpus:
        why = "NCCL says what fails; INFO also which interfaces it took"
        found["NCCL_DEBUG"] = "WARN", why
    if ranks > 1:
        share = max(1, num_cores() // ranks)
        found["OMP_NUM_THREADS"] = str(share), "cores of each rank; torchrun would set 1"
    for name, value in sorted(os.environ.items()):
        if name in found or name.startswith(("NCCL_", "GLOO_", "TRAIN_")):
            found[name] = value, "as it is set here"
    return found
