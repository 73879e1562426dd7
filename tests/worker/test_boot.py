from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpusup.conf.schema import ModelConfig
from gpusup.worker import boot, progress, wire
from gpusup.worker.entry import LoadProblem
from gpusup.worker.handlers import import_attribute, load_handler

from .conftest import LIMIT_S

BOTH = pytest.mark.parametrize("how", ["zygote", "exec"])
HANDLERS = Path(__file__).parents[1] / "handlers.py"


def ask(worker: Any, do: str, **params: Any) -> wire.Answer:
    proxy = worker.connect()
    try:
        proxy.send(wire.Work([wire.Item(1, (), params={"do": do, **params})]))
        answer: wire.Answer = proxy.receive().answers[0]
    finally:
        proxy.close()
    return answer


def environment_of(worker: Any) -> dict[str, str]:
    environment: dict[str, str] = json.loads(ask(worker, "environment").text)
    return environment


@BOTH
def test_a_worker_says_hello_loads_and_is_ready(house: Any, how: str) -> None:
    worker = house.start(how)
    assert isinstance(worker.control.receive(), wire.Loading)
    assert isinstance(worker.control.receive(), wire.WorkerReady)
    assert ask(worker, "echo").status == "ok"


@BOTH
def test_ps_shows_slot_model_version_and_generation(house: Any, how: str) -> None:
    worker = house.ready(how)
    title = Path(f"/proc/{worker.pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    generation = worker.spec.generation
    assert title == f"gpusup: worker cpu0 echo@1 (generation {generation})"


@BOTH
def test_a_worker_leads_its_own_session_and_leaves_no_core(house: Any, how: str) -> None:
    worker = house.ready(how)
    assert os.getsid(worker.pid) == worker.pid
    limits = Path(f"/proc/{worker.pid}/limits").read_text().splitlines()
    core = next(line for line in limits if line.startswith("Max core file size"))
    assert core.split()[4] == "0"
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) == 500


@BOTH
def test_its_environment_is_pinned_scrubbed_and_its_own(
    house: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("LISTEN_FDS", "1")
    worker = house.ready(how, env={"MINE": "yes", "OMP_NUM_THREADS": "3"})
    environment = environment_of(worker)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["MINE"] == "yes"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert not {"NOTIFY_SOCKET", "LISTEN_FDS", "MKL_NUM_THREADS"} & set(environment)


def test_a_cuda_worker_sees_only_its_device(house: Any) -> None:
    worker = house.ready(device="cuda", device_uuid="GPU-1234")
    environment = environment_of(worker)
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-1234"


@BOTH
def test_it_ends_at_once_when_the_control_socket_ends_even_if_stuck(house: Any, how: str) -> None:
    worker = house.ready(how)
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "hang"})]))
    worker.control.sock.close()
    assert worker.wait() == 1
    assert proxy.ended()
    proxy.close()


def test_it_takes_its_socket_away_when_the_control_socket_ends(house: Any) -> None:
    """The supervisor had given it up before it said hello, and so has nobody to tidy up after."""
    worker = house.ready()
    assert Path(worker.spec.data_path).exists()
    worker.control.sock.close()
    assert worker.wait() == 1
    assert not Path(worker.spec.data_path).exists()


def test_it_ends_with_the_control_socket_while_it_loads(house: Any) -> None:
    worker = house.start(settings={"fault": "load hangs"})
    worker.control.until(wire.Loading)
    worker.control.sock.close()
    assert worker.wait() == 1


def test_without_a_supervisor_to_connect_to_it_says_so_and_ends(house: Any) -> None:
    spec = house.spec(control_path=str(house.folder / "nobody.sock"))
    out, into = os.pipe()
    page = progress.create("page")
    answer = house.zygote.spawn(wire.encode(spec), [page, into])
    os.close(into)
    assert os.waitstatus_to_exitcode(os.waitpid(answer.pid, 0)[1]) == 1
    said = os.read(out, 65536).decode()
    assert said.startswith("gpusup: cannot connect to the supervisor at")
    assert "Traceback" not in said
    os.close(out)
    os.close(page)


@BOTH
def test_term_finishes_the_batch_and_leaves_with_0(house: Any, how: str) -> None:
    worker = house.ready(how)
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (wire.Part("x", b"a"),), params={"do": "slow", "s": 0.2})]))
    before = worker.progress.read().batches_started
    assert before in (0, 1)
    while worker.progress.read().batches_started == 0:
        pass
    os.kill(worker.pid, signal.SIGTERM)
    assert proxy.receive().answers[0].status == "ok"
    assert worker.wait() == 0
    assert not os.path.exists(worker.spec.data_path)
    proxy.close()


def test_term_ends_a_worker_that_loads(house: Any) -> None:
    worker = house.start(settings={"fault": "load hangs"})
    worker.control.until(wire.Loading)
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait() == 0


def test_a_process_the_model_forks_keeps_nothing_of_the_worker_alive(house: Any) -> None:
    worker = house.ready()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "fork"})]))
    child = int(proxy.receive().answers[0].text)
    pidfd = os.pidfd_open(child)
    second = ask(worker, "fork")
    os.kill(int(second.text), signal.SIGTERM)  # is not the worker's
    assert ask(worker, "echo").status == "ok"
    os.kill(worker.pid, signal.SIGKILL)
    assert proxy.ended()
    assert worker.control.ended()
    assert select.select([pidfd], [], [], 0) == ([], [], []), "the child has ended too"
    os.kill(child, signal.SIGKILL)
    os.close(pidfd)
    worker.wait()  # now they are ours
    for pid in (child, int(second.text)):
        os.waitpid(pid, 0)
    proxy.close()


SUPERVISOR = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conftest)
conftest.adopt_orphans(True)
house = conftest.House(Path(sys.argv[2]), conftest.Zygote())
pids = [house.zygote.process.pid]
for how in ("zygote", "exec"):
    worker = house.ready(how)
    proxy = worker.connect()
    item = conftest.wire.Item(1, (), params={"do": "hang with the GIL"})
    proxy.send(conftest.wire.Work([item]))
    while not worker.progress.read().batches_started:
        pass
    pids.append(worker.pid)
print(*pids, flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_the_supervisor_even_with_the_gil_held(house: Any, tmp_path: Path) -> None:
    (folder := tmp_path / "other").mkdir()
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(Path(__file__).parent / "conftest.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert supervisor.stdin is not None
    assert supervisor.stdout is not None
    pids = [int(pid) for pid in supervisor.stdout.readline().split()]
    assert len(pids) == 3
    supervisor.kill()
    supervisor.wait()
    for pid in pids:  # ours now: `house` made us a sub-reaper
        os.waitpid(pid, 0)
    supervisor.stdin.close()
    supervisor.stdout.close()


def test_interrupt_is_ignored(house: Any) -> None:
    worker = house.ready()
    os.kill(worker.pid, signal.SIGINT)
    assert ask(worker, "echo").status == "ok"


def test_usr2_shows_where_each_thread_is_even_in_a_hang(house: Any, wait: Any) -> None:
    worker = house.ready()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "hang"})]))
    wait(lambda: worker.progress.read().batches_started == 1)
    os.kill(worker.pid, signal.SIGUSR2)
    said = ""
    end = time.monotonic() + LIMIT_S
    while "in _answer" not in said or "in beat" not in said:
        left = max(0.0, end - time.monotonic())
        assert select.select([worker.output_fd], [], [], left)[0], said
        piece = os.read(worker.output_fd, 65536)
        assert piece, said
        said += piece.decode()
    proxy.close()


@BOTH
def test_the_beat_goes_on(house: Any, wait: Any, how: str) -> None:
    worker = house.ready(how)
    first = worker.progress.read().beat
    assert first > 0
    wait(lambda: worker.progress.read().beat > first)


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("config", wire.EXIT_CONFIG),
        ("oom", wire.EXIT_LOAD_OOM),
        ("device", wire.EXIT_WRONG_DEVICE),
        ("golden", 1),
        ("error", 1),
    ],
)
def test_a_failed_load_is_told_in_one_line_and_by_the_exit_code(
    house: Any, cause: str, code: int
) -> None:
    worker = house.start(settings={"fault": f"load-{cause}"})
    failed = worker.control.until(wire.LoadFailed)
    assert (failed.cause, failed.text) == (cause, "the fake was told to fail")
    assert worker.wait() == code


def test_a_surprise_while_loading_is_an_error_and_its_traceback_is_in_the_log(house: Any) -> None:
    worker = house.start(settings={"fault": "load raises"})
    failed = worker.control.until(wire.LoadFailed)
    assert (failed.cause, failed.text) == ("error", "RuntimeError: surprise")
    assert worker.wait() == 1
    assert "Traceback" in worker.output()


def test_an_engine_that_crashes_while_serving_says_nothing_of_loading(house: Any) -> None:
    worker = house.ready()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "crash"})]))
    assert worker.wait() == 1
    with pytest.raises(EOFError):
        worker.control.receive()
    assert "the engine crashed" in worker.output()
    proxy.close()


def test_a_poisoned_context_is_told_before_the_worker_leaves_with_70(house: Any) -> None:
    worker = house.ready()
    proxy = worker.connect()
    proxy.send(wire.Work([wire.Item(1, (), params={"do": "fence"})]))
    assert worker.control.until(wire.Fenced).text == "device-side assert"
    assert worker.wait() == wire.EXIT_FENCED
    assert proxy.ended()
    proxy.close()


def test_a_held_worker_waits_for_go(house: Any) -> None:
    worker = house.start(held=True)
    assert worker.control.until(wire.Prepared).host_bytes == 7
    worker.control.send(wire.Ping(1))
    assert isinstance(worker.control.receive(), wire.Pong)  # and not WorkerReady
    worker.control.send(wire.Go())
    assert isinstance(worker.control.receive(), wire.WorkerReady)


def test_a_spec_that_cannot_be_read_is_a_config_error(house: Any) -> None:
    page = progress.create("page")
    pid = house._exec(msgspec.msgpack.encode({"slot": 1}), page, page, "")
    os.close(page)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == wire.EXIT_CONFIG


def test_text_for_people_is_one_bounded_line() -> None:
    assert boot.one_line(ValueError("a\n  b\tc")) == "a b c"
    assert len(boot.one_line(ValueError("x" * 10_000))) == boot.TEXT_LIMIT
    assert boot.one_line(ValueError()) == "ValueError"


# -- with the real engine ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_zygote(zygote: Any) -> Iterator[Any]:
    real: Any = type(zygote)(engine=boot.ENGINE)
    yield real
    real.close()


def with_handler(house: Any, real_zygote: Any, name: str, **settings: Any) -> Any:
    house.zygote = real_zygote
    config = ModelConfig(handler=f"{HANDLERS}:{name}", settings=settings)
    return house.start(config=msgspec.to_builtins(config))


def test_the_real_engine_serves_a_handler_from_a_file(house: Any, real_zygote: Any) -> None:
    worker = with_handler(house, real_zygote, "Double")
    worker.control.until(wire.WorkerReady)
    proxy = worker.connect()
    parts = (wire.Part("body", b'{"value": 21}', content_type="application/json"),)
    proxy.send(wire.Work([wire.Item(1, parts)]))
    answer = proxy.receive().answers[0]
    assert (answer.status, json.loads(answer.parts[0].data)["value"]) == ("ok", 42.0)
    proxy.close()


def test_a_handler_that_refuses_its_weights_is_a_config_error(house: Any, real_zygote: Any) -> None:
    worker = with_handler(house, real_zygote, "RaisesInLoad", kind="config")
    failed = worker.control.until(wire.LoadFailed)
    assert failed.cause == "config"
    assert "weights.pt is of another architecture" in failed.text
    assert worker.wait() == wire.EXIT_CONFIG


def test_a_missing_handler_is_a_config_error(house: Any, real_zygote: Any) -> None:
    worker = with_handler(house, real_zygote, "NoSuchClass")
    failed = worker.control.until(wire.LoadFailed)
    assert failed.cause == "config"
    assert "NoSuchClass" in failed.text
    assert worker.wait() == wire.EXIT_CONFIG


# -- handlers ------------------------------------------------------------------------------------


def test_a_handler_is_found_by_file_and_by_module() -> None:
    by_file = load_handler(f"{HANDLERS}:Double")
    assert by_file.__name__ == "Double"
    assert load_handler(f"{HANDLERS}:Double") is by_file
    assert load_handler("gpusup.worker.echo:Echo").__name__ == "Echo"


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        ("no colon", 'should read "package.module:Class"'),
        ("/no/such/file.py:Model", "cannot import /no/such/file.py: no such file"),
        ("no_such_package.module:Model", "No module named 'no_such_package'"),
        (f"{HANDLERS}:NoSuchClass", "has no NoSuchClass"),
        (f"{HANDLERS}:TRIGGER", "is no subclass of gpusup.worker.model.Model"),
        (
            f"{HANDLERS.parent / 'bad_import.py'}:Model",
            "ImportError: no module named imaginary_ops",
        ),
    ],
)
def test_a_handler_that_cannot_be_used_is_named_with_the_reason(handler: str, said: str) -> None:
    with pytest.raises(LoadProblem) as caught:
        load_handler(handler)
    assert caught.value.cause == "config"
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_handler_file_may_import_its_neighbours_and_exit_is_no_way_out(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_a_handler.py").write_text("VALUE = 5")
    (tmp_path / "h.py").write_text("from neighbour_of_a_handler import VALUE")
    assert import_attribute(f"{tmp_path / 'h.py'}:VALUE") == 5
    (tmp_path / "quits.py").write_text("raise SystemExit(0)")
    with pytest.raises(LoadProblem, match="SystemExit"):
        import_attribute(f"{tmp_path / 'quits.py'}:X")
