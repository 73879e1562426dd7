from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpusup.conf.precedence import NICE
from gpusup.supervisor import install
from gpusup.supervisor.__main__ import main

#: "Exposure" by systemd's own count, 0 to 10. Below it nothing is left that CUDA would survive.
MOST_EXPOSED = 5.0

#: Each of these hides the GPU or breaks what torch does with it.
BREAKS_CUDA = (
    "PrivateDevices",
    "MemoryDenyWriteExecute",
    "ProtectControlGroups",
    "ProtectKernelLogs",
    "ProcSubset",
    "PrivateUsers",
)


def wish(
    prefix: Path, user: str = "gpusup", program: str = "/opt/gpusup/bin/gpusup"
) -> install.Wish:
    return install.Wish(user=user, prefix=prefix, program=program, control=f"{program}ctl")


def unit(prefix: Path, **changes: str) -> str:
    return install.render(wish(prefix, **changes))["etc/systemd/system/gpusup.service"]


def settings(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def test_it_writes_unit_socket_configuration_folders_and_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-unit", "--prefix", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    for name in (
        "etc/systemd/system/gpusup.service",
        "etc/systemd/system/gpusup.socket",
        "etc/systemd/system/gpusup.slice",
        "etc/gpusup/gpusup.toml",
        "etc/tmpfiles.d/gpusup.conf",
        "etc/sysusers.d/gpusup.conf",
    ):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o644
        assert f"wrote    {tmp_path / name}" in said
    assert "systemctl enable --now gpusup.socket gpusup.service" in said
    assert not list(tmp_path.rglob("*.new"))


def test_a_dry_run_shows_all_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-unit", "--prefix", str(tmp_path), "--dry-run", "--user", "infer"]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert "User=infer" in said
    assert 'u infer -:infer "gpusup"' in said


def test_a_configuration_that_is_there_stays_and_its_port_becomes_the_sockets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "etc/gpusup/gpusup.toml"
    config.parent.mkdir(parents=True)
    config.write_text('[server]\nlisten = ":9000"\n')
    assert main(["install-unit", "--prefix", str(tmp_path)]) == 0
    assert config.read_text() == '[server]\nlisten = ":9000"\n'
    assert "ListenStream=9000\n" in (tmp_path / "etc/systemd/system/gpusup.socket").read_text()
    config.write_text('[server]\nlisten = "9000"\n')
    assert main(["install-unit", "--prefix", str(tmp_path)]) == 2
    assert f"cannot take the port from {config}" in capsys.readouterr().err


def test_a_second_run_says_what_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-unit", "--prefix", str(tmp_path)]) == 0
    (tmp_path / "etc/systemd/system/gpusup.socket").write_text("older")
    capsys.readouterr()
    assert main(["install-unit", "--prefix", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"same     {tmp_path}/etc/systemd/system/gpusup.service" in said
    assert f"replaced {tmp_path}/etc/systemd/system/gpusup.socket" in said
    assert f"kept     {tmp_path}/etc/gpusup/gpusup.toml" in said


def test_a_users_name_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-unit", "--prefix", str(tmp_path), "--user", "a b"]) == 2
    assert capsys.readouterr().err == 'gpusup: "a b" is no name of a user\n'


def test_the_unit_is_what_the_service_speaks(tmp_path: Path) -> None:
    found = settings(unit(tmp_path))
    assert found["Type"] == ["notify"]
    assert found["ExecStart"] == ["/opt/gpusup/bin/gpusup run /etc/gpusup/gpusup.toml"]
    assert found["ExecReload"][-1] == "/opt/gpusup/bin/gpusupctl reload-config"
    assert (found["OOMPolicy"], found["KillMode"]) == (["continue"], ["mixed"])
    assert int(found["WatchdogSec"][0]) > 0
    assert found["Nice"] == [str(NICE)]  # what certify runs with
    weights = install.render(wish(tmp_path))[f"{install.UNITS}/{found['Slice'][0]}"]
    assert int(settings(weights)["CPUWeight"][0]) > 100  # what all others have


def test_nothing_in_the_unit_breaks_cuda(tmp_path: Path) -> None:
    found = settings(unit(tmp_path))
    assert [name for name in BREAKS_CUDA if name in found] == []
    assert "char-nvidia* rw" in found["DeviceAllow"]
    assert "AF_NETLINK" in found["RestrictAddressFamilies"][0]


def test_a_program_in_a_home_folder_can_be_seen_by_the_service(tmp_path: Path) -> None:
    there = unit(tmp_path, program="/home/ada/venv/bin/gpusup")
    assert settings(there)["ProtectHome"] == ["read-only"]
    assert settings(unit(tmp_path))["ProtectHome"] == ["yes"]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The rendered unit with programs that exist, which `verify` asks for."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze (Debian's package systemd)")
    true = shutil.which("true") or "/bin/true"
    made = install.Wish(user="gpusup", prefix=tmp_path, program=true, control=true)
    list(install.write(made, install.render(made)))
    return tmp_path / "etc/systemd/system/gpusup.service"


def test_systemd_finds_nothing_wrong_with_unit_socket_and_slice(installed: Path) -> None:
    others = (installed.with_suffix(suffix) for suffix in (".socket", ".slice"))
    asked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", installed, *others],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (asked.returncode, asked.stderr) == (0, "")


def test_systemd_counts_little_exposure(installed: Path) -> None:
    asked = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", installed],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if asked.returncode and "offline" in asked.stderr:
        pytest.skip("this systemd-analyze can't look at a file (250 and later can)")
    level = re.search(r"exposure level for gpusup.service: ([\d.]+)", asked.stdout)
    assert level, asked.stdout + asked.stderr
    assert float(level[1]) <= MOST_EXPOSED
