# ruff: noqa: E501  (the tables hold whole lines as people see them)

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpusup.conf.load import ConfigError, load, load_file, parse
from gpusup.conf.schema import Config

MODEL = '[models.a]\nhandler = "gpusup.worker.digits:Digits"\n'


def problems(text: str, base: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(text, base, "gpusup.toml")
    assert all(line.startswith("gpusup.toml: ") for line in error.value.lines)
    return [line.removeprefix("gpusup.toml: ") for line in error.value.lines]


def test_without_a_file_the_bundled_model_is_served() -> None:
    config = load(None)
    assert list(config.models) == ["digits"]
    assert config.models["digits"].retry == "safe"
    assert config.server == Config().server


def test_units_become_plain_numbers(tmp_path: Path) -> None:
    config = parse(
        '[server]\nbody_limit = "1MB"\nrequest_timeout = "250ms"\n[watermark]\nqueue = "80%"\n'
        '[devices.memory]\ngpu0 = "24GiB"\n',
        tmp_path,
    )
    assert config.server.body_limit == 1_000_000
    assert config.server.request_timeout == 0.25
    assert config.watermark.queue == 0.8
    assert config.devices.memory == {"gpu0": 24 * 2**30}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[server]\nlisen = "x"', '[server] lisen: unknown key; did you mean "listen"?'),
        ("[sever]", '[sever]: unknown section; did you mean "server"?'),
        ("server = 3", "[server]: expected a table, got 3"),
        ("[server]\nqueue_per_slot = 3", "[server] queue_per_slot: unknown key here; it belongs into [watermark]"),
        ("[server]\nrequest-timeout = 3", '[server] request-timeout: unknown key; did you mean "request_timeout"?'),
        ("[server]\nlisten = 8000", "[server] listen: expected a string, got 8000"),
        ('[server]\nlisten = "8000"', '[server] listen: expected "host:port", got "8000"'),
        ('[server]\nlisten = "::1:80"', '[server] listen: an IPv6 address needs brackets: "[::1]:80"'),
        ('[server]\nlisten = "a:99999"', '[server] listen: expected a port between 0 and 65535 after the colon, got "99999"'),
        ("[server]\ncompress = 1", "[server] compress: expected true or false, got 1"),
        ("[server]\nproxies = 0", '[server] proxies: expected a whole number of at least 1 or "auto", got 0'),
        ("[server]\nbacklog = true", "[server] backlog: expected a whole number of at least 1, got true"),
        ('[server]\ncors_origins = "x"', '[server] cors_origins: expected a list (each a string), got "x"'),
        ('[server]\ntls_cert = "/dev/null"', "[server] tls_key: is needed with tls_cert"),
        ('[server]\nmetrics = "servr"', '[server] metrics: expected one of "control", "server", got "servr"; did you mean "server"?'),
        ('[server]\ncontrol_group = "no-such-group"', '[server] control_group: there is no group "no-such-group"'),
        ('[server]\ndefault_model = "b"', '[server] default_model: no model "b"; there are: digits'),
        ("[watermark]\nqueue = 0.95", "[watermark] queue: 0.95 must be below shed, which is 0.92"),
        ('[supervision]\nkeep_alive = "5s"', "[supervision] keep_alive: 5s must be below suspect_after, which is 3s"),
        ('[supervision.backoff]\ninitial = "1m"', "[supervision.backoff] initial: 60s is above limit, which is 30s"),
        ("[supervision.backoff]\nfactor = nan", "[supervision.backoff] factor: expected a number of at least 1, got nan"),
        ('[devices]\nuse = ["gpu0", "gpuO"]', """[devices] use: "gpuO" is no device's name; devices are named like "gpu0", "GPU-<uuid>", "MIG-<uuid>" or "cpu\""""),
        ('[devices.memory]\ngpu0 = "512MiB"', "[devices.memory] gpu0: 512MiB is not above safety, which is 1GiB"),
        ("[models.a]", "[models.a] handler: is missing"),
        ('[models."a b"]\nhandler = "x:Y"', """[models] "a b": not usable as a name: expected a name of at most 64 letters, digits, '.', '_' and '-', got "a b\""""),
        (MODEL + "buckets = [[3, 0]]", "[models.a] buckets[0]: sizes must be above 0, got [3, 0]"),
        (MODEL + "budget_p99 = 1", "[models.a] budget_p99: must be 0 or at least 2 times, got 1"),
        (MODEL + "buckets = [[]]", "[models.a] buckets[0]: sizes must be above 0, got []"),
        (MODEL + "buckets = [1]", "[models.a] buckets[0]: expected a list (each a whole number), got 1"),
        (MODEL + 'degrade = [{ step = "sleep" }]', '[models.a.degrade[0]] step: expected one of "cpu_fallback", "lower_precision", "skip_post_processing", got "sleep"'),
        (MODEL + "version = 2", '[models.a] version: expected a string of digits, such as "1", got 2'),
        (MODEL + 'version = "2\\n"', '[models.a] version: expected a string of digits, such as "1", got "2\\n"'),
        (MODEL + 'env = { CUDA_VISIBLE_DEVICES = "0" }', "[models.a] env.CUDA_VISIBLE_DEVICES: is set by the supervisor; use devices to choose GPUs"),
        ('[devices]\nuse = ["gpu0"]\n' + MODEL + 'devices = ["gpu1"]', '[models.a] devices: "gpu1" is not among [devices] use: gpu0'),
        ('[models.a]\nhandler = "nowhere"', '[models.a] handler: expected "package.module:Class" or "path/file.py:Class", got "nowhere"'),
        ("[models.a]\nhandler = 'gpusup.worker.digits:Digit'", None),
        ("[server", None),
        ("a = 1\na = 2", None),
        ("x = " + "[" * 5000, None),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_place(
    tmp_path: Path, text: str, complaint: str | None
) -> None:
    lines = problems(text, tmp_path)
    assert all("\n" not in line for line in lines)
    if complaint is not None:
        assert complaint in lines


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    lines = problems('[server]\nlisen = "x"\nbacklog = -1\n[probe]\ninterval = 3\n', tmp_path)
    assert len(lines) == 3


def test_files_are_found_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("from somewhere import Base\nclass Mine(Base): ...\n")
    (tmp_path / "w.safetensors").write_bytes(b"")
    (tmp_path / "gpusup.toml").write_text(
        '[models.a]\nhandler = "mine.py:Mine"\nweights = "w.safetensors"\n'
        '[models.b]\nhandler = "mine:Mine"\nweights = "w{version}"\n[server]\nrun_dir = "run"\n'
    )
    (tmp_path / "w1").mkdir()
    monkeypatch.chdir("/")
    loaded = load_file(tmp_path / "gpusup.toml")
    models = loaded.config.models
    assert models["a"].handler == models["b"].handler == f"{tmp_path.resolve()}/mine.py:Mine"
    assert models["a"].weights == str(tmp_path / "w.safetensors")
    assert models["b"].weights == str(tmp_path / "w{version}")
    assert loaded.config.server.run_dir == str(tmp_path / "run")
    assert loaded.base == tmp_path


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ('handler = "gone.py:X"', "handler: cannot read {base}/gone.py: No such file or directory"),
        ('handler = "bad.py:X"', "handler: cannot parse {base}/bad.py:2: "),
        ('handler = "good.py:Y"', "handler: {base}/good.py defines no Y; it has X"),
        ('handler = "no.such.module:Y"', "handler: cannot find module no.such.module"),
        (
            'handler = "good.py:X"\nweights = "gone.pt"',
            "weights: cannot read {base}/gone.pt: No such",
        ),
        ('handler = "good.py:X"\ngolden = "gone"', "golden: cannot read {base}/gone: No such file"),
        ('handler = "good.py:X"\npython = "good.py"', "python: {base}/good.py is not executable"),
        ('handler = "good.py:X"\npython = "no"', "python: there is no interpreter at {base}/no"),
    ],
)
def test_missing_and_broken_files_are_named(tmp_path: Path, keys: str, complaint: str) -> None:
    (tmp_path / "good.py").write_text("class X: ...\n")
    (tmp_path / "bad.py").write_text("import os\nclass X(:\n")
    lines = problems("[models.a]\n" + keys, tmp_path)
    assert any(line.startswith("[models.a] " + complaint.format(base=tmp_path)) for line in lines)


def test_handlers_are_found_without_running_them(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text("class X: ...\nraise SystemExit('was imported')\n")
    assert (
        parse('[models.a]\nhandler = "loud:X"', tmp_path).models["a"].handler.endswith("loud.py:X")
    )


def test_an_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpusup.toml"
    path.touch(mode=0)
    if os.geteuid() == 0:  # root may read everything

        def refuse(self: Path, *_: object, **__: object) -> str:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

        monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ConfigError, match=f"cannot read {path}: Permission denied"):
        load(path)


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda p: None, "No such file or directory"),
        (lambda p: p.mkdir(), "Is a directory"),
        (lambda p: p.write_bytes(b"\xff\xfe"), "byte 0 is not UTF-8"),
    ],
)
def test_what_can_not_be_read_is_said(tmp_path: Path, make: object, complaint: str) -> None:
    path = tmp_path / "gpusup.toml"
    make(path)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=f"cannot read {path}: {complaint}"):
        load(path)


def test_a_run_dir_too_long_for_sockets_is_refused_with_both_numbers(tmp_path: Path) -> None:
    folder = "/tmp/" + "x" * 95
    (line,) = problems(f'[server]\nrun_dir = "{folder}"', tmp_path)
    assert "is 100 bytes, at most 85 leave room" in line
    assert "107 bytes" in line


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    section=st.sampled_from(["server", "devices", "watermark", "models.a", "log"]),
    key=st.sampled_from(["listen", "use", "queue", "handler", "file", "buckets", "golden", "x"]),
    value=st.sampled_from(
        ["1", '"x"', "[]", "{}", "true", "-1.5", "nan", "[[[]]]", '"\\u0000"', "1979-05-27", "inf"]
    ),
)
def test_odd_values_give_lines_and_never_another_exception(
    tmp_path: Path, section: str, key: str, value: str
) -> None:
    with contextlib.suppress(ConfigError):
        parse(f"[{section}]\n{key} = {value}\n", tmp_path)
