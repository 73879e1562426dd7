"""`gpusupctl`: how an operator sees and steers a running service.

    gpusupctl status
    gpusupctl drain gpu1 && ... && gpusupctl uncordon gpu1
    gpusupctl reload-model resnet50 --version 3

Exit codes: 0 ok, 1 failed, 2 usage, 3 degraded (status), 4 not found, 5 permission, 6 rolled back
(the old version serves), 7 no service answers, 124 timed out (the change goes on), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from . import ctl_reports, ctl_view, exit_codes
from .ctl_client import Client, CtlError, find_socket
from .ctl_parser import make_parser

_CHANGE_CODES = {
    "done": exit_codes.OK,
    "waiting": exit_codes.OK,
    "failed": exit_codes.FAILED,
    "aborted": exit_codes.FAILED,
    "rolled-back": exit_codes.ROLLED_BACK,
}
_REDRAW_S = 1.0
_POLL_S = 20.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    sys.exit(run(argv))


def run(argv: Sequence[str] | None = None) -> int:
    """The whole command; returns the exit code."""
    parser = make_parser(__doc__ or "")
    try:
        given = parser.parse_args(argv)
    except SystemExit as leaving:  # argparse has said what is wrong; --help is no error
        return leaving.code if isinstance(leaving.code, int) else exit_codes.USAGE
    try:
        if given.verb == "completion":
            from . import ctl_completion

            ctl_view.out([ctl_completion.script(given.shell, parser)])
            return exit_codes.OK
        return VERBS[given.verb](Client(find_socket(getattr(given, "socket", None))), given)
    except CtlError as error:
        sys.stderr.write(f"gpusupctl: {error}\n")
        return error.code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except BrokenPipeError:  # `gpusupctl events | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return exit_codes.OK


def _show(found: Any, output: str, write: Callable[[Any], Iterable[str]]) -> None:
    """As it came with `-o json`, else as text."""
    ctl_view.out([json.dumps(found, indent=2)] if output == "json" else write(found))


# -- looking -------------------------------------------------------------------------------------


def status(client: Client, given: argparse.Namespace) -> int:
    view = _chosen(client.get("status"), given.slots)
    if not given.watch:
        return _show_status(view, given)
    shown = 0
    tty = sys.stdout.isatty()
    while True:
        if tty and given.output != "json":
            lines = ctl_view.status(
                view, wide=given.output == "wide", colours=ctl_view.colours_wanted(sys.stdout)
            )
            # Redrawn in place: the history of the terminal stays as it was.
            sys.stdout.write(f"\x1b[{shown}A" if shown else "")
            sys.stdout.write("".join(f"\x1b[2K{line}\n" for line in lines))
            sys.stdout.write("\x1b[0J")
            sys.stdout.flush()
            shown = len(lines)
        else:
            ctl_view.out([json.dumps(view)])
        time.sleep(_REDRAW_S)
        view = _chosen(client.get("status"), given.slots)


def _chosen(view: Any, names: Sequence[str]) -> Any:
    """Only the named slots (or devices, or models)."""
    if not names:
        return view
    kept = [s for s in view["slots"] if {s["slot"], s["device"], s["model"]}.intersection(names)]
    known = {value for s in kept for value in (s["slot"], s["device"], s["model"])}
    for name in names:
        if name not in known:
            raise CtlError(f"there is no slot {name}", exit_codes.NOT_FOUND)
    return {**view, "slots": kept}


def _show_status(view: Any, given: argparse.Namespace) -> int:
    wide, colours = given.output == "wide", ctl_view.colours_wanted(sys.stdout)
    _show(view, given.output, lambda view: ctl_view.status(view, wide=wide, colours=colours))
    if given.slots:
        good = all(
            s["state"] == "ready" and s["slot_state"] == "schedulable" for s in view["slots"]
        )
    else:
        good = view["state"] == "ready"
    return exit_codes.OK if good else exit_codes.DEGRADED


def changes(client: Client, given: argparse.Namespace) -> int:
    found = client.get("changes")["changes"]
    colours = ctl_view.colours_wanted(sys.stdout)
    _show(
        found,
        given.output,
        lambda found: ctl_view.changes(found, colours=colours) if found else ["no changes"],
    )
    return exit_codes.OK


def change(client: Client, given: argparse.Namespace) -> int:
    if given.wait:
        return _follow(client, given.id, given.timeout, given.output)
    colours = ctl_view.colours_wanted(sys.stdout)
    found = client.get("changes", given.id)
    _show(found, given.output, lambda found: ctl_view.change(found, colours=colours))
    return exit_codes.OK


def logs(client: Client, given: argparse.Namespace) -> int:
    if given.follow:
        for piece in client.stream("slots", given.target, "logs", lines=given.lines, follow=1):
            ctl_view.out(piece["lines"])
        return exit_codes.OK
    found = client.get("slots", given.target, "logs", lines=given.lines)["lines"]
    ctl_view.out(found)
    if not found:
        sys.stderr.write(f"gpusupctl: the workers of {given.target} have printed nothing\n")
    return exit_codes.OK


def events(client: Client, given: argparse.Namespace) -> int:
    if given.follow:
        # From the beginning of what is kept, unless only the new ones are wanted.
        since = given.since
        found = client.stream("events", since=since, follow=1)
    else:
        found = iter(client.get("events", since=given.since)["events"])
    for one in found:
        if one.get("kind") == "following":
            continue
        ctl_view.out([json.dumps(one) if given.output == "json" else ctl_view.event(one)])
    return exit_codes.OK


def dump(client: Client, given: argparse.Namespace) -> int:
    ctl_view.out([client.post("slots", given.slot, "dump")["text"].rstrip("\n")])
    return exit_codes.OK


def top(client: Client, given: argparse.Namespace) -> int:
    from . import ctl_top

    return ctl_top.run(client, once=given.once)


def report(
    path: Callable[[argparse.Namespace], tuple[str, ...]],
    write: Callable[[Any], list[str]],
) -> Callable[[Client, argparse.Namespace], int]:
    """A verb that shows what the service says, as text or as it came."""

    def show(client: Client, given: argparse.Namespace) -> int:
        _show(client.get(*path(given)), given.output, write)
        return exit_codes.OK

    return show


def metrics(client: Client, given: argparse.Namespace) -> int:
    sys.stdout.write(client.text("metrics"))
    return exit_codes.OK


def support_bundle(client: Client, given: argparse.Namespace) -> int:
    from . import ctl_bundle

    path = ctl_bundle.write(client, given.file)
    ctl_view.out([path])
    return exit_codes.OK


# -- steering ------------------------------------------------------------------------------------


def cordon(client: Client, given: argparse.Namespace) -> int:
    client.post("slots", given.slot, "cordon", body={"why": given.why})
    return _said(f"{given.slot} cordoned: it takes no new work")


def uncordon(client: Client, given: argparse.Namespace) -> int:
    client.post("slots", given.slot, "uncordon")
    return _said(f"{given.slot} uncordoned")


def reset_failed(client: Client, given: argparse.Namespace) -> int:
    client.post("slots", given.target, "reset-failed")
    return _said(f"{given.target}: tallies cleared, it starts again")


def drain(client: Client, given: argparse.Namespace) -> int:
    body = {} if given.limit is None else {"limit_s": given.limit}
    started = client.post("slots", given.slot, "drain", body=body)
    return _started(client, started, given)


def restart(client: Client, given: argparse.Namespace) -> int:
    kind = "proxies" if given.target.startswith("proxy") else "slots"
    return _started(client, client.post(kind, given.target, "restart"), given)


def reload_model(client: Client, given: argparse.Namespace) -> int:
    name, _, version = given.model.partition("@")
    body: dict[str, Any] = {
        "version": given.version or version,
        "weights": given.weights,
        "set": dict(given.set),
        "strategy": given.strategy,
        "slots": [slot for slot in given.slots.split(",") if slot],
        "canary": given.canary,
        "dry_run": given.dry_run,
    }
    if given.allow_gap is not None:
        body["allow_gap"] = given.allow_gap
    found = client.post("models", name, "reload", body=body)
    if given.dry_run:
        _show(found, given.output, ctl_reports.reload_plan)
        return exit_codes.OK
    return _started(client, found, given)


def model_verb(verb: str) -> Callable[[Client, argparse.Namespace], int]:
    def act(client: Client, given: argparse.Namespace) -> int:
        return _started(client, client.post("models", given.model, verb), given)

    return act


def abort(client: Client, given: argparse.Namespace) -> int:
    client.post("changes", given.id, "abort")
    return _said(f"change {given.id} is being aborted")


def stop(client: Client, given: argparse.Namespace) -> int:
    client.post("stop")
    if given.no_wait:
        return _said("gpusup is stopping")
    until = time.monotonic() + given.timeout
    while time.monotonic() < until:
        if not os.path.exists(client.path):
            return _said("gpusup has stopped")
        time.sleep(0.1)
    raise CtlError(f"gpusup is still there after {given.timeout:g} s", exit_codes.TIMED_OUT)


def reexec(client: Client, given: argparse.Namespace) -> int:
    before = client.get("status")
    began = time.monotonic()
    client.post("reexec")
    until = began + given.timeout
    while time.monotonic() < until:
        time.sleep(0.1)
        try:
            now = client.get("status", timeout=5.0)
        except CtlError:
            continue
        # The one from before would be up as much longer as we have waited.
        if now["uptime_s"] < before["uptime_s"] / 2 + (time.monotonic() - began):
            return _said(f"gpusup {now['version']} goes on as pid {now['pid']}")
    raise CtlError(f"no new gpusup within {given.timeout:g} s", exit_codes.TIMED_OUT)


def reload_config(client: Client, given: argparse.Namespace) -> int:
    begun = client.post("reload-config")["changes"]
    if not begun:
        return _said("configuration read again: nothing has changed")
    code = exit_codes.OK
    for one in begun:
        if given.no_wait:
            ctl_view.out([f"change {one} started"])
        else:
            code = _follow(client, one, given.timeout, given.output) or code
    return code


# -- changes -------------------------------------------------------------------------------------


def _said(text: str) -> int:
    ctl_view.out([text])
    return exit_codes.OK


def _started(client: Client, found: Any, given: argparse.Namespace) -> int:
    """Wait for a change that was just begun, unless that is not wanted."""
    change_id = found["change"]
    if given.no_wait:
        if given.output == "json":
            return _said(json.dumps({"change": change_id}))
        return _said(f"change {change_id} started")
    return _follow(client, change_id, given.timeout, given.output)


def _follow(client: Client, change_id: str, timeout: float | None, output: str) -> int:
    """Show the steps as they come; the exit code says how it ended."""
    until = None if timeout is None else time.monotonic() + timeout
    told = 0
    quiet = output == "json"
    live = not quiet and ctl_view.colours_wanted(sys.stdout)
    while True:
        if live:
            from . import ctl_live

            found = ctl_live.watch(client, change_id, until)
            told = len(found.get("steps", ()))
            if found["state"] in _CHANGE_CODES:
                break
        left = _POLL_S if until is None else min(_POLL_S, until - time.monotonic())
        wait = max(0.0, left)
        found = client.get(
            "changes", change_id, wait=f"{wait:.3f}", steps=told, timeout=wait + 30.0
        )
        steps = found.get("steps", ())
        if not quiet:
            ctl_view.out([ctl_view.step(one) for one in steps[told:]])
        told = len(steps)
        if found["state"] in _CHANGE_CODES:
            break
        if until is not None and time.monotonic() >= until:
            raise CtlError(
                f"change {change_id} ({found['title']}) is not through after {timeout:g} s; "
                f"it goes on: gpusupctl change {change_id}",
                exit_codes.TIMED_OUT,
            )
    code = _CHANGE_CODES[found["state"]]
    if quiet:
        ctl_view.out([json.dumps(found, indent=2)])
        return code
    line = ctl_view.change({**found, "steps": ()}, colours=False)
    if code:
        sys.stderr.write(f"gpusupctl: {line[0]}\n")
    else:
        ctl_view.out(line)
    return code


VERBS: dict[str, Callable[[Client, argparse.Namespace], int]] = {
    "status": status,
    "changes": changes,
    "change": change,
    "logs": logs,
    "events": events,
    "dump": dump,
    "top": top,
    "buckets": report(lambda given: ("models", given.model, "buckets"), ctl_reports.buckets),
    "plan": report(lambda given: ("plan",), ctl_reports.plan),
    "leases": report(lambda given: ("leases",), ctl_reports.leases),
    "metrics": metrics,
    "support-bundle": support_bundle,
    "cordon": cordon,
    "uncordon": uncordon,
    "drain": drain,
    "restart": restart,
    "reset-failed": reset_failed,
    "reload-model": reload_model,
    "rollback": model_verb("rollback"),
    "promote": model_verb("promote"),
    "load": model_verb("load"),
    "unload": model_verb("unload"),
    "abort": abort,
    "stop": stop,
    "reexec": reexec,
    "reload-config": reload_config,
}


if __name__ == "__main__":
    main()
