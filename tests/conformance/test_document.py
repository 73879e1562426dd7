"""Our OpenAPI document against our server: schemathesis makes a bounded number of requests."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

CHECKS = (
    "not_a_server_error,content_type_conformance,response_schema_conformance,"
    "status_code_conformance,unsupported_method,allow_header_conformance"
)


def test_the_document_and_the_answers_agree(url: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "schemathesis",
        reason="schemathesis is not installed (tests/conformance/requirements.txt)",
    )
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json",
        "--checks", CHECKS, "--max-examples", "5", "--phases", "examples,coverage,fuzzing",
        "--include-path-regex", "/(v1|livez|readyz|v2/health|v2/repository|v2/models$|v2/models/m)",
        "--suppress-health-check", "all", "--generation-database", "none", "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_every_path_of_the_document_is_there(url: str) -> None:
    with urllib.request.urlopen(f"{url}/openapi.json") as answer:
        document = json.load(answer)
    for path, item in document["paths"].items():
        if "get" not in item:
            continue
        with urllib.request.urlopen(url + path) as answer:
            assert answer.status == 200
