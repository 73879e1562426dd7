"""Logging: one line for each event, for people on a terminal and as JSON elsewhere.

    set_up(config.log, "supervisor")
    event("worker-exited", slot="gpu0", generation=3, cause="exit -9")
      -> 16:33:57.120 INFO    supervisor worker-exited slot=gpu0 generation=3 cause="exit -9"
      -> {"time":"2026-11-29T16:33:57.120Z","level":"info","process":"supervisor", ...}

It stands on the standard library's logging, so what libraries say comes out in the same form. A
line is at most 1,000 bytes, control characters are escaped, and a field that could hold a secret
or a body is hidden by its name. Tracebacks are for level "debug"; else a line says what and where.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
import traceback
from typing import Any, Final, Literal

from .schema import LogConfig

LINE_LIMIT: Final = 1000
VALUE_LIMIT: Final = 400

Level = Literal["debug", "info", "warning", "error"]

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
#: As syslog counts; journald reads them at a line's start and takes them off.
_PRIORITIES: Final = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3}
_HIDDEN: Final = frozenset(
    {"body", "data", "key", "api_key", "authorization", "cookie", "password", "secret", "token"}
)
_PLAIN: Final = re.compile(r"^[^\s\"'={}]+$")

_logger: Final = logging.getLogger("gpusup")


def event(name: str, level: Level = "info", /, **fields: object) -> None:
    """Log one event. `name` is a few words with hyphens, the same every time it happens."""
    number = _LEVELS[level]
    if _logger.isEnabledFor(number):
        _logger.log(number, name, extra={"fields": fields})


def set_up(config: LogConfig, name: str) -> None:
    """Send all logging of this process to where `config` says, in its form, under `name`.

    A log file that can't be opened is not worth a stop: lines go to standard error, with one that
    says so.
    """
    root = logging.getLogger()
    for old in list(root.handlers):
        if isinstance(old, LineHandler):
            root.removeHandler(old)
            old.close()
    handler = LineHandler(config.file)
    handler.setFormatter(formatter_for(config.format, name, handler))
    root.addHandler(handler)
    root.setLevel(_LEVELS[config.level])
    # A line for each request at "info" is what the proxy samples by itself.
    for noisy in ("aiohttp.access", "asyncio"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, _LEVELS[config.level]))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk must not print tracebacks
    if handler.problem:
        event("log-file-unusable", "warning", path=config.file, error=handler.problem)


def reopen() -> None:
    """Open the log file anew, since somebody has moved it away. For SIGHUP and the like."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.reopen()
            if handler.problem:
                event("log-file-unusable", "warning", path=handler.path, error=handler.problem)


class LineHandler(logging.Handler):
    """Writes each line with one write(2), so that lines of several processes never mix."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path
        self.problem = ""
        self._fd = -1
        if path:
            self.reopen()

    @property
    def fd(self) -> int:
        """Where the lines go."""
        return self._fd if self._fd >= 0 else 2

    def reopen(self) -> None:
        """On failure the old file stays in use and `problem` says why."""
        if not self.path:
            return
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        except OSError as error:
            self.problem = error.strerror or str(error)
            return
        self.problem = ""
        self.acquire()
        try:
            old, self._fd = self._fd, fd
            if old >= 0:
                os.close(old)
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as error:
            line = f"cannot format a log line: {type(error).__name__}"
        # A reader that is gone, a full disk: the service goes on without its log.
        with contextlib.suppress(OSError):
            os.write(self.fd, line.encode("utf-8", "backslashreplace") + b"\n")

    def close(self) -> None:
        self.acquire()
        try:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
        finally:
            self.release()
        super().close()


def formatter_for(
    form: Literal["auto", "human", "json"], name: str, handler: LineHandler
) -> logging.Formatter:
    fd = handler.fd
    journal = goes_to_journal(fd)
    if form == "human" or (form == "auto" and not journal and os.isatty(fd)):
        return HumanFormatter(name)
    return JsonFormatter(name, priorities=journal)


def goes_to_journal(fd: int) -> bool:
    """Whether `fd` is the stream that systemd said it had connected to its journal."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))


class HumanFormatter(logging.Formatter):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text, fields = content(record)
        head = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._name} {text}"
        line = " ".join([head, *(f"{key}={_bare(value)}" for key, value in fields.items())])
        return cut(line) + _traceback(record)


class JsonFormatter(logging.Formatter):
    def __init__(self, name: str, *, priorities: bool = False) -> None:
        super().__init__()
        self._name = name
        self._priorities = priorities

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text, fields = content(record)
        entry: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._name,
            "pid": record.process,
            "event": text,
        }
        trace = _traceback(record)
        # Ours come last: a field may not pretend to be another process.
        line = _dump({**entry, **{k: v for k, v in fields.items() if k not in entry}})
        if len(line.encode()) > LINE_LIMIT:
            entry["truncated"] = True
            for key, value in fields.items():
                with_it = {**entry, key: value}
                if key not in entry and len(_dump(with_it).encode()) <= LINE_LIMIT:
                    entry = with_it
            line = _dump(entry)
        if trace:
            line = _dump({**json.loads(line), "traceback": trace})
        prefix = f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._priorities else ""
        return prefix + line


def content(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    """The event and its fields, each short, printable and without secrets."""
    fields: dict[str, Any] = {}
    given: dict[str, object] = getattr(record, "fields", {})
    for key, value in given.items():
        fields[key] = "<hidden>" if key.lower() in _HIDDEN else _short(value)
    if record.name != "root" and record.name.partition(".")[0] != "gpusup":
        fields.setdefault("logger", record.name)
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        fields["error"] = _short(f"{type(error).__name__}: {error}")
        frames = traceback.extract_tb(error.__traceback__)
        if frames:
            fields["where"] = f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"
    return str(_short(record.getMessage())), fields


def cut(line: str) -> str:
    """At most LINE_LIMIT bytes of UTF-8."""
    raw = line.encode("utf-8", "backslashreplace")
    if len(raw) <= LINE_LIMIT:
        return line
    return raw[: LINE_LIMIT - 3].decode("utf-8", "ignore") + "..."


def _traceback(record: logging.LogRecord) -> str:
    wanted = logging.getLogger().level <= logging.DEBUG
    if not (wanted and record.exc_info and record.exc_info[0]):
        return ""
    return "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()


def _short(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        # JSON has no NaN, and nobody reads the tenth digit.
        return round(value, 6) if value - value == 0 else str(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return f"<{len(value)} bytes>"
    text = "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(value)
    )
    return text if len(text) <= VALUE_LIMIT else text[: VALUE_LIMIT - 3] + "..."


def _bare(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)


def _dump(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"), default=str)
