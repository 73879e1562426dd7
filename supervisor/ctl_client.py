"""The client side of the control socket. Only light imports: `gpusupctl` must start at once."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any
from urllib.parse import quote, urlencode

from . import exit_codes


class CtlError(Exception):
    """One line for stderr, and the exit code that goes with it."""

    def __init__(self, text: str, code: int = exit_codes.FAILED) -> None:
        super().__init__(text)
        self.code = code


_CODES = {
    400: exit_codes.USAGE,
    403: exit_codes.PERMISSION,
    404: exit_codes.NOT_FOUND,
    405: exit_codes.USAGE,
}


def candidates() -> list[str]:
    """Where a service's control socket may be, most likely first; as conf/places.py decides."""
    folders = []
    if given := os.environ.get("RUNTIME_DIRECTORY"):
        folders.append(given.split(":")[0])
    if os.geteuid() != 0:
        if given := os.environ.get("XDG_RUNTIME_DIR"):
            folders.append(os.path.join(given, "gpusup"))
        folders.append(os.path.join(tempfile.gettempdir(), f"gpusup-{os.geteuid()}"))
    folders.append("/run/gpusup")
    return [os.path.join(folder, "control.sock") for folder in folders]


def find_socket(given: str | None) -> str:
    """`--socket`, else GPUSUP_CONTROL, else the first that is there. A folder means its socket."""
    path = given or os.environ.get("GPUSUP_CONTROL", "")
    if path:
        return os.path.join(path, "control.sock") if os.path.isdir(path) else path
    places = candidates()
    for place in places:
        if os.path.exists(place):
            return place
    raise CtlError(
        f"no gpusup is running here: there is no {' or '.join(places)}; name one with --socket",
        exit_codes.UNREACHABLE,
    )


class _UnixConnection(HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("gpusup", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """Calls the control API. Every method raises CtlError with the right exit code."""

    def __init__(self, path: str, timeout: float = 30.0) -> None:
        self.path = path
        self._timeout = timeout

    def get(self, *parts: str, timeout: float | None = None, **query: Any) -> Any:
        return json.loads(self.raw("GET", _path(parts, query), timeout=timeout))

    def post(self, *parts: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self.raw("POST", _path(parts, {}), body))

    def text(self, *parts: str) -> str:
        return self.raw("GET", _path(parts, {})).decode()

    def stream(self, *parts: str, **query: Any) -> Iterator[Any]:
        """One object a line, until the service ends."""
        connection, response = self._ask("GET", _path(parts, query), None, None)
        try:
            while line := response.readline():
                yield json.loads(line)
        except (OSError, HTTPException) as error:
            raise CtlError(
                f"gpusup at {self.path} has ended: {error}", exit_codes.UNREACHABLE
            ) from error
        finally:
            connection.close()

    def raw(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        connection, response = self._ask(method, path, body, timeout or self._timeout)
        try:
            return response.read()
        except (OSError, HTTPException) as error:
            raise self._lost(error) from error
        finally:
            connection.close()

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout: float | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        connection = _UnixConnection(self.path, timeout)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, path, body=data, headers=headers)
            response = connection.getresponse()
        except (OSError, HTTPException) as error:
            connection.close()
            raise self._lost(error) from error
        if response.status >= 400:
            try:
                raise _refusal(response)
            finally:
                connection.close()
        return connection, response

    def _lost(self, error: Exception) -> CtlError:
        if isinstance(error, PermissionError):
            return CtlError(f"may not connect to {self.path}", exit_codes.PERMISSION)
        if isinstance(error, TimeoutError):
            return CtlError(f"no answer from {self.path} in time", exit_codes.UNREACHABLE)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return CtlError(f"no gpusup answers at {self.path}: {reason}", exit_codes.UNREACHABLE)


def _path(parts: tuple[str, ...], query: Mapping[str, Any]) -> str:
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    return f"{path}?{urlencode(query)}" if query else path


def _refusal(response: HTTPResponse) -> CtlError:
    try:
        answer = json.loads(response.read())
    except (OSError, HTTPException, ValueError):
        answer = {}
    text = answer.get("error", f"HTTP status {response.status}")
    change = answer.get("change", "")
    if change and change not in text:
        text = f"{text} (change {change})"
    return CtlError(text, _CODES.get(response.status, exit_codes.FAILED))
