"""Where things are: the address to listen on, the run and state folders, the sockets in them."""

from __future__ import annotations

import ipaddress
import os
import re
import tempfile
from pathlib import Path
from typing import Final

from .schema import ServerConfig

#: What fits into sockaddr_un with its closing zero.
SOCKET_PATH_LIMIT: Final = 107

#: The longest name in the run folder: a worker's socket, `<slot>.<generation>.sock`.
LONGEST_SOCKET: Final = "gpu99.99.9999999.sock"

_HOST: Final = re.compile(r"^[A-Za-z0-9._-]+$")


def parse_listen(text: str) -> tuple[str, int]:
    """ "127.0.0.1:8000", "[::1]:8000", ":8000" (all addresses), ":0" (any free port) -> host, port.

    Raises ValueError that says what is wrong.
    """
    host, colon, port = text.rpartition(":")
    if not colon:
        raise ValueError(f'expected "host:port", got "{text}"')
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f'expected a port between 0 and 65535 after the colon, got "{port}"')
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f'expected an IPv6 address in the brackets, got "{host}"')
    elif ":" in host:
        raise ValueError(f'an IPv6 address needs brackets: "[{host}]:{port}"')
    elif host and not _HOST.match(host):
        raise ValueError(f'expected "host:port", got "{text}"')
    return host, int(port)


def host_port(host: str, port: int) -> str:
    """The other way round, as people and URLs write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be reached from this machine. "" means all addresses."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run_dir(server: ServerConfig) -> Path:
    """Where the sockets live. `auto`: systemd's, root's, the user's, or one below /tmp."""
    if server.run_dir != "auto":
        return Path(server.run_dir)
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return Path("/run/gpusup")
    user = os.environ.get("XDG_RUNTIME_DIR", "")
    if user:
        return Path(user) / "gpusup"
    return Path(tempfile.gettempdir()) / f"gpusup-{os.geteuid()}"


def state_dir(server: ServerConfig) -> Path:
    """What survives a restart: cordons, wanted versions, measured peaks, diagnostic records."""
    if server.state_dir != "auto":
        return Path(server.state_dir)
    given = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if given:
        return Path(given)
    if os.geteuid() == 0:
        return Path("/var/lib/gpusup")
    user = os.environ.get("XDG_STATE_HOME", "")
    return (Path(user) if user else Path.home() / ".local/state") / "gpusup"


def weights_of(weights: str, version: str) -> str:
    """The weights of one version: `{version}` in the path stands for it."""
    return weights.replace("{version}", version)
