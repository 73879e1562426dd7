"""`gpusup init DIR`: a commented configuration, a handler, its test, and an image to try."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from .exit_codes import FAILED, OK, USAGE

#: Name in the new folder -> where it comes from, below gpusup.conf.
FILES: Final = {
    "gpusup.toml": "template/gpusup.toml",
    "handler.py": "template/handler.py.txt",
    "test_handler.py": "template/test_handler.py.txt",
    "example.png": "template/example.png",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "init",
        help="begin with a model of your own",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("dir", type=Path, nargs="?", help="folder to write into; made if missing")
    parser.add_argument("--force", action="store_true", help="overwrite files that are there")
    parser.add_argument(
        "--show-defaults", action="store_true", help="print every key with its default and reason"
    )
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.show_defaults:
        sys.stdout.write((files("gpusup.conf") / "default.toml").read_text(encoding="utf-8"))
        return OK
    if args.dir is None:
        return _refuse("init: which folder? For example: gpusup init mymodel", USAGE)
    folder: Path = args.dir
    there = [name for name in FILES if (folder / name).exists()]
    if there and not args.force:
        names = ", ".join(there)
        return _refuse(f"{folder} has {names} already; --force overwrites", FAILED)
    try:
        write(folder)
    except OSError as error:
        return _refuse(f"cannot write {error.filename or folder}: {error.strerror}", FAILED)
    sys.stdout.write(
        f"{folder} has {', '.join(FILES)}. Next:\n"
        f"  cd {folder}\n"
        "  gpusup check gpusup.toml\n"
        "  gpusup try gpusup.toml classifier --input example.png\n"
        "  gpusup run gpusup.toml\n"
        "and in another terminal:\n"
        "  curl --data-binary @example.png http://127.0.0.1:8000/predictions/classifier\n"
        "  gpusupctl top\n"
    )
    return OK


def write(folder: Path) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, source in FILES.items():
        (folder / name).write_bytes((files("gpusup.conf") / source).read_bytes())


def _refuse(text: str, code: int) -> int:
    sys.stderr.write(f"gpusup: {text}\n")
    return code
