"""`gpusup install-unit`: systemd's unit and socket, a configuration, folders, user and group.

Files go below --prefix (default: /), as a package would put them; their contents speak of the real
places. A configuration that is there stays as it is.
"""

from __future__ import annotations

import argparse
import grp
import os
import pwd
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from gpusup.conf.places import host_port, parse_listen

from .exit_codes import FAILED, OK, USAGE

UNITS: Final = "etc/systemd/system"
CONFIG: Final = "etc/gpusup/gpusup.toml"
SYSUSERS: Final = "etc/sysusers.d/gpusup.conf"
TMPFILES: Final = "etc/tmpfiles.d/gpusup.conf"

_USER: Final = re.compile(r"^[a-z_][a-z0-9_-]{0,30}$")
#: Hidden from the service by ProtectHome, or its own and empty by PrivateTmp.
_HOMES: Final = ("/home", "/root", "/run/user")
_TMPS: Final = ("/tmp", "/var/tmp")
#: What a unit's command line can't hold without quotes.
_AWKWARD: Final = re.compile(r"[\s%\"'\\;$]")

_CONFIG_TEXT: Final = """\
# Read by gpusup.service. Every key with its default and reason: gpusup init --show-defaults
# After a change: gpusup check {path} && systemctl reload gpusup

[server]
# With gpusup.socket enabled the port is the socket's: run gpusup install-unit again after a change.
listen = "127.0.0.1:8000"
control_group = "{group}"  # its members may use gpusupctl

# Without a model of your own the bundled one is served: handwritten digits. Yours, for example:
#
# [models.resnet50]
# handler = "/opt/models/handler.py:Classifier"
# weights = "/opt/models/resnet50-{{version}}.safetensors"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """`program`, `control`: absolute paths of gpusup and gpusupctl."""

    user: str
    prefix: Path
    program: str
    control: str


class Unusable(Exception):
    """Why nothing can be installed. One line."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "install-unit",
        help="install the systemd service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--user", default="gpusup", help="who it runs as (default: gpusup)")
    parser.add_argument("--prefix", type=Path, default=Path("/"), metavar="DIR", help="default: /")
    parser.add_argument("--dry-run", action="store_true", help="print the files, write none")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    try:
        program, control = programs()
        wish = Wish(user=args.user, prefix=args.prefix.absolute(), program=program, control=control)
        texts = render(wish)
    except Unusable as error:
        sys.stderr.write(f"gpusup: {error}\n")
        return USAGE
    config = wish.prefix / CONFIG
    if args.dry_run:
        for name, text in texts.items():
            kept = " (is there and stays as it is)" if name == CONFIG and config.exists() else ""
            sys.stdout.write(f"--- {wish.prefix / name}{kept}\n{text}\n")
        _say(*warnings(wish), "nothing was written (--dry-run)")
        return OK
    try:
        _say(*write(wish, texts))
    except OSError as error:
        sys.stderr.write(f"gpusup: cannot write {error.filename}: {error.strerror}\n")
        return FAILED
    made = wish.prefix == Path("/") and make_user(wish)
    _say(*warnings(wish), *next_steps(wish, user_made=made))
    return OK


def programs() -> tuple[str, str]:
    """Absolute paths of `gpusup` and `gpusupctl`, those that belong to this interpreter."""
    found = []
    for name in ("gpusup", "gpusupctl"):
        beside = Path(sys.executable).parent / name
        path = str(beside) if beside.exists() else shutil.which(name)
        if path is None:
            raise Unusable(f"cannot find the program {name}: install gpusup with pip first")
        if _AWKWARD.search(path):
            raise Unusable(f'cannot write "{path}" into a unit: install gpusup under a plain path')
        found.append(path)
    return found[0], found[1]


def render(wish: Wish) -> dict[str, str]:
    """Path below the prefix -> text. Raises Unusable."""
    if not _USER.match(wish.user):
        raise Unusable(f'"{wish.user}" is no name of a user')
    group = group_of(wish.user)
    service = _bundled("gpusup.service")
    for old, new in (
        ("/usr/bin/gpusupctl", wish.control),
        ("/usr/bin/gpusup run", f"{wish.program} run"),
        ("User=gpusup", f"User={wish.user}\nGroup={group}"),
        ("SupplementaryGroups=video render", _groups_here(wish)),
        ("ProtectHome=yes", f"ProtectHome={'read-only' if _is_below(wish, _HOMES) else 'yes'}"),
    ):
        assert old in service, old
        service = service.replace(old, new)
    socket = _bundled("gpusup.socket")
    socket = socket.replace("ListenStream=127.0.0.1:8000", f"ListenStream={_listen(wish)}")
    tmpfiles = _bundled("tmpfiles.conf").replace(" gpusup gpusup ", f" {wish.user} {group} ")
    sysusers = _bundled("sysusers.conf").replace("g gpusup", f"g {group}")
    sysusers = sysusers.replace("u gpusup -", f"u {wish.user} -:{group}")
    return {
        f"{UNITS}/gpusup.service": service,
        f"{UNITS}/gpusup.socket": socket,
        f"{UNITS}/gpusup.slice": _bundled("gpusup.slice"),
        CONFIG: _CONFIG_TEXT.format(path=f"/{CONFIG}", group=group),
        TMPFILES: tmpfiles,
        SYSUSERS: sysusers,
    }


def group_of(user: str) -> str:
    """The control group: the user's first group, or one of its name where neither is there yet."""
    with suppress(KeyError):
        return grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    return user


def _groups_here(wish: Wish) -> str:
    """Who may open /dev/nvidia* besides everybody. A group that isn't there stops a unit."""
    names = ["video", "render"]
    if wish.prefix == Path("/"):
        known = {entry.gr_name for entry in grp.getgrall()}
        names = [name for name in names if name in known]
    return f"SupplementaryGroups={' '.join(names)}" if names else "# Neither video nor render here"


def _listen(wish: Wish) -> str:
    """The configuration's address in systemd's form. Raises Unusable."""
    path = wish.prefix / CONFIG
    if not path.exists():
        return "127.0.0.1:8000"
    # Only this one key: the rest may name users and files of the machine that it is meant for.
    try:
        server = tomllib.loads(path.read_text()).get("server", {})
        host, port = parse_listen(str(server.get("listen", "127.0.0.1:8000")))
    except (OSError, ValueError, AttributeError) as error:
        raise Unusable(f"cannot take the port from {path}: {error}") from error
    return host_port(host, port) if host else str(port)


def write(wish: Wish, texts: dict[str, str]) -> Iterator[str]:
    """Write what is to be written, and say so, file by file. Raises OSError."""
    for name, text in texts.items():
        path = wish.prefix / name
        there = path.exists()
        if there and name == CONFIG:
            yield f"kept     {path}"
            continue
        if there and path.read_text() == text:
            yield f"same     {path}"
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        # Never half a unit: systemd may read at any moment.
        beside = path.with_name(path.name + ".new")
        beside.write_text(text)
        beside.chmod(0o644)
        beside.replace(path)
        yield f"{'replaced' if there else 'wrote   '} {path}"


def make_user(wish: Wish) -> bool:
    """User and group now, where we may and can; else the command is among the next steps."""
    with suppress(KeyError):
        pwd.getpwnam(wish.user)
        return True
    tool = shutil.which("systemd-sysusers")
    if tool is None or os.geteuid() != 0:
        return False
    made = subprocess.run([tool, f"/{SYSUSERS}"], check=False)
    return made.returncode == 0


def warnings(wish: Wish) -> Iterator[str]:
    if wish.user == "root":
        yield "note: a service that runs as root can be anything; --user names one of its own"
    if _is_below(wish, _TMPS):
        yield f"note: {wish.program} is in a folder that the service can't see (PrivateTmp)"
    elif _is_below(wish, _HOMES):
        yield f"note: {wish.program} is in a home folder: {wish.user} must be able to read it"


def next_steps(wish: Wish, *, user_made: bool) -> Iterator[str]:
    """What is left to do for whoever typed this."""
    yield ""
    yield "Next:"
    if wish.prefix != Path("/"):
        yield f"  copy {wish.prefix} to / (it is meant for a package or an image), then there:"
    if not user_made:
        yield f"  systemd-sysusers /{SYSUSERS}"
    yield f"  systemd-tmpfiles --create /{TMPFILES}"
    yield f"  {wish.program} check /{CONFIG}"
    yield f"  {wish.program} doctor /{CONFIG}"
    yield "  systemctl daemon-reload"
    yield "  systemctl enable --now gpusup.socket gpusup.service"
    yield "  gpusupctl status"
    yield "Then:"
    yield f"  usermod -aG {group_of(wish.user)} YOU     lets you use gpusupctl without root"
    yield "  systemctl reload gpusup        after a change of the configuration, or of the log file"
    yield "  journalctl -u gpusup -f        what it says"


def _is_below(wish: Wish, folders: tuple[str, ...]) -> bool:
    return any(Path(wish.program).is_relative_to(folder) for folder in folders)


def _bundled(name: str) -> str:
    return (files("gpusup.conf") / name).read_text(encoding="utf-8")


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
