"""Forms are taken apart where they lie."""

from __future__ import annotations

import pytest

from gpusup.proxy.arena import Arena
from gpusup.proxy.body import Body
from gpusup.proxy.errors import InvalidInput
from gpusup.proxy.multipart import MOST_FIELDS, split

KIND = 'multipart/form-data; boundary="zz"'


def body(data: bytes) -> Body:
    return Body(data, Arena(0))


def fields(data: bytes) -> list[tuple[str, bytes, str, str]]:
    whole = body(data)
    return [
        (f.name, whole.copy(f.start, f.end - f.start), f.content_type, f.filename)
        for f in split(whole, KIND)
    ]


def test_fields_with_and_without_types_and_names() -> None:
    assert fields(
        b'preamble\r\n--zz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n\r\n'
        b'--zz  \r\ncontent-disposition:form-data;name=b;filename="x.png"\r\n'
        b"Content-Type: image/png\r\n\r\n--zy\r\n\r\n--zz--\r\nepilogue"
    ) == [("a", b"1\r\n", "", ""), ("b", b"--zy\r\n", "image/png", "x.png")]


def test_empty_fields_are_fields() -> None:
    assert fields(b'--zz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n--zz--\r\n') == [
        ("a", b"", "", "")
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "boundary of"),
        (b'--zz\r\nContent-Disposition: form-data; name="a"\r\n\r\n1', "closing boundary"),
        (b'--zz\r\nContent-Disposition: form-data; name="a"', "no end of head"),
        (b"--zz\r\nContent-Type: text/plain\r\n\r\n1\r\n--zz--", "field 1 .* no name"),
        (b"--zz", "closing boundary"),
    ],
)
def test_broken_forms_are_refused_with_what_is_missing(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        split(body(data), KIND)


def test_a_form_without_a_boundary_is_refused() -> None:
    with pytest.raises(InvalidInput, match="boundary"):
        split(body(b"x"), "multipart/form-data")


def test_the_number_of_fields_has_a_limit() -> None:
    field = b'--zz\r\nContent-Disposition: form-data; name="a"\r\n\r\n\r\n'
    with pytest.raises(InvalidInput, match=str(MOST_FIELDS)):
        split(body(field * (MOST_FIELDS + 1) + b"--zz--"), KIND)
