"""multipart/form-data, taken apart where it lies: fields are ranges of the body, not copies. Pure.

Lenient about what clients do (no type for a file, raw UTF-8 names, %22 for quotes, a preamble),
strict about what would make two readers disagree: a missing end, a nameless field.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Protocol

from .errors import InvalidInput

MOST_FIELDS: Final = 256
_HEAD_BYTES: Final = 16 * 1024
_BOUNDARY: Final = re.compile(r'boundary\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;]+))', re.IGNORECASE)
_PARAMETER: Final = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^;]*))')


@dataclass(frozen=True, slots=True)
class Field:
    """The bytes `start` to `end` of the body."""

    name: str
    start: int
    end: int
    content_type: str
    filename: str


class Searchable(Protocol):
    def __len__(self) -> int: ...

    def find(self, what: bytes, start: int, end: int | None = None) -> int: ...

    def copy(self, start: int = 0, length: int | None = None) -> bytes: ...


def boundary_of(content_type: str) -> bytes:
    found = _BOUNDARY.search(content_type)
    text = (found[1] or found[2] or "") if found else ""
    if not 0 < len(text) <= 200:
        raise InvalidInput("multipart/form-data without a boundary")
    return text.encode("utf-8", "surrogateescape")


def split(body: Searchable, content_type: str) -> list[Field]:
    """Raises InvalidInput, which names the field or the missing piece."""
    mark = b"--" + boundary_of(content_type)
    at = body.find(mark, 0)
    # A preamble may come first, but the mark begins a line.
    while at > 0 and body.copy(at - 2, 2) != b"\r\n":
        at = body.find(mark, at + 1)
    if at < 0:
        raise InvalidInput("the boundary of multipart/form-data is not in the body")
    between = b"\r\n" + mark
    fields: list[Field] = []
    at += len(mark)
    while (tail := body.copy(at, 2)) != b"--":
        if tail != b"\r\n":
            # Blanks may follow the mark on its line.
            line_end = body.find(b"\r\n", at, min(len(body), at + 256))
            if line_end < 0 or body.copy(at, line_end - at).strip(b" \t"):
                raise InvalidInput("multipart/form-data ends without its closing boundary")
            at = line_end
        if len(fields) >= MOST_FIELDS:
            raise InvalidInput(f"multipart/form-data has more than {MOST_FIELDS} fields")
        # A part without any header begins with the blank line itself.
        blank = body.find(b"\r\n\r\n", at, min(len(body), at + _HEAD_BYTES))
        if blank < 0:
            raise InvalidInput(f"field {len(fields) + 1} of multipart/form-data has no end of head")
        start = blank + 4
        end = body.find(between, blank + 2)
        if end < 0:
            raise InvalidInput("multipart/form-data ends without its closing boundary")
        head = body.copy(at + 2, max(0, blank - at - 2))
        fields.append(_field(head, start, end, len(fields) + 1))
        at = end + len(between)
    return fields


def _field(head: bytes, start: int, end: int, number: int) -> Field:
    name: str | None = None
    filename = content_type = ""
    for line in head.decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        match key.strip().lower():
            case "content-disposition":
                for parameter in _PARAMETER.finditer(value):
                    text = parameter[2] if parameter[2] is not None else (parameter[3] or "")
                    text = _unquote(text.strip())
                    if parameter[1].lower() == "name":
                        name = text
                    elif parameter[1].lower() == "filename":
                        filename = text
            case "content-type":
                content_type = value.strip()
            case _:
                pass
    if not name:
        raise InvalidInput(f"field {number} of multipart/form-data has no name")
    return Field(name, start, max(start, end), content_type, filename)


def _unquote(text: str) -> str:
    """Browsers write a quote as %22, others as a backslash and a quote."""
    return text.replace('\\"', '"').replace("\\\\", "\\").replace("%22", '"')
