"""What certify shows while it works: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from .certify_result import Check, Result

_STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


class Shown:
    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: Any = None
        self._share = 0.0
        self._part = 0.0

    def __enter__(self) -> Shown:
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(),
                console=self._console, transient=True,
            )  # fmt: skip
            self._progress.start()
            self._task = self._progress.add_task("starting", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def test(self, number: int, count: int, title: str) -> None:
        self._share, self._part = number / count, 1 / count
        if self._progress is None:
            self.say(f"[{number + 1}/{count}] {title}")
        else:
            self._progress.update(self._task, description=title, completed=self._share)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def step(self, text: str, done: float) -> None:
        """`done`: share of the test. Steps are for those who watch; a log needs only results."""
        if self._progress is not None:
            at = self._share + self._part * done
            self._progress.update(self._task, description=text, completed=at)

    def result(self, result: Result) -> None:
        style = _STYLES[result.verdict]
        self._console.print(
            f"[{style}]{result.verdict:8}[/] {result.name} in {result.took_s:.0f} s"
        )
        if result.skipped:
            self.say(f"           {result.skipped}")
        for check in result.checks:
            self._check(check)

    def _check(self, check: Check) -> None:
        style = _STYLES[check.verdict]
        self._console.print(f"  [{style}]{check.verdict:8}[/] ", end="")
        self._console.print(f"{check.name}: {check.text}", markup=False)
