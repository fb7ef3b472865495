# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases: a table of layers, sortable summary fields, a chart, the page, and one alert.

A report goes into the job's own run, or into a new one if somebody asked for it. It must never stop
or stall a training job: wandb is imported only here, every error becomes one line, and waiting is
bounded.
"""

import contextlib
import math
import netrc
import os
import shlex
import sys
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from megatron_ttrace.report import table, wording
from megatron_ttrace.trace.records import Direction, Outcome, Result, Summary, Verdict
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

COLUMNS = (
    *("layer", "direction", "verdict", "worst tensor"),
    *("relative error", "error in ε", "tolerance", "margin"),
    *("failures", "tensors", "unchecked", "ranks", "note"),
)
INIT_SECONDS = 20.0
TOTAL_SECONDS = 120.0
_FORMER_HOST = "api.wandb.ai"
"""Keys stored for this host are valid for the public service under its newer name too."""

_OFFLINE = "an offline run; upload it with: wandb sync "


def is_wanted(asked: bool) -> bool:
    """Whether to make a run where the job has none: if the user or the environment asks for one."""
    mode = os.environ.get("WANDB_MODE", "")
    return mode != "disabled" and bool(asked or mode or os.environ.get("WANDB_PROJECT"))


def active_run() -> Any:
    """The run that this process has open, or ``None``; does not import wandb.

    ``getattr`` would import a package that nothing has used yet (``forkserver.preload``).
    """
    return vars(sys.modules.get("wandb") or sys).get("run")


def log(
    summary: Summary,
    verdicts: Sequence[Verdict],
    html_path: Path,
    *,
    run: Any = None,
    directory: Path,
    online: bool = False,
) -> str:
    """Log a check and return one line that says where it is, as :func:`logged` does.

    The page is attached if it exists. The other arguments are those of :func:`logged`.
    """
    about = summary.run.to_json() if summary.run else {}
    return logged(
        "report",
        lambda wandb, run: _log(wandb, run, summary, verdicts, html_path),
        run=run,
        directory=directory,
        project="ttrace",
        config={"layout": summary.config, "versions": summary.versions, "run": about},
        online=online,
    )


def logged(
    subject: str,
    fill: Callable[[Any, Any], None],
    *,
    run: Any = None,
    directory: Path,
    project: str,
    config: dict[str, Any],
    online: bool,
) -> str:
    """Fill a W&B run and return one line that says where it is; empty if there is none to fill.

    ``fill`` is called with the wandb module and the run. Without ``run`` the active one is filled,
    or one of our own, if it is wanted (:func:`is_wanted`), made and finished. ``online`` asks for
    one that is sent to the server; ``project``, which is also its type of job, ``config`` and
    ``directory`` are of that. ``subject`` names what is logged in the line about a failure. Never
    raises.
    """
    active = active_run() if run is None else run
    if active is None and not is_wanted(online):
        return ""
    warning = f"ttrace: WARNING: W&B logging failed, the {subject} itself is complete"
    try:
        import wandb
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        return f"{warning}: wandb cannot be imported ({clean(error, 200)})"
    try:
        if active is not None:
            fill(wandb, active)
            return f"W&B: logged to {_where(active)}"
        options = {
            "project": os.environ.get("WANDB_PROJECT") or project,
            "job_type": project,
            "dir": str(directory),
            "config": _harmless(config),
            "settings": _settings(wandb),
        }
        return _within(TOTAL_SECONDS, lambda: _own_run(wandb, fill, options))
    except Exception as error:  # noqa: BLE001 - this sink fails open
        return f"{warning}: {type(error).__name__}: {clean(error, 300)}"


def _harmless(value: Any) -> Any:
    """A configuration that W&B can show and send: clean texts, finite numbers."""
    if isinstance(value, dict):
        return {clean(key, 60): _harmless(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, int) else clean(value, NOTE_LIMIT)


def _own_run(wandb: Any, fill: Callable[[Any, Any], None], options: dict[str, Any]) -> str:
    """Make, fill and finish a run; offline if the server does not answer."""
    mode, why = _mode(wandb)
    if "offline" in (mode, os.environ.get("WANDB_MODE")):
        # wandb's service reports its own errors to its makers, also from an offline run.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # The address of a service that a parent process started. It may have ended, or end before it
    # has written the run. Where this process has opened a run before, its service stays in use.
    os.environ.pop("WANDB_SERVICE", None)
    try:
        run = wandb.init(mode=mode, **options)
    except Exception as error:
        if mode != "online":
            raise
        run = wandb.init(mode="offline", **options)
        why = f" (WARNING: online logging failed: {clean(error, 200)})"
    try:
        fill(wandb, run)
        where = _where(run)
    finally:
        run.finish(exit_code=0)
    return f"W&B: logged to {where}{why}"


def _within(seconds: float, work: Callable[[], str]) -> str:
    """Run ``work`` for at most ``seconds``; a hanging upload is left behind, not waited for."""
    answer: Future[str] = Future()

    def target() -> None:
        try:
            answer.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised again by the caller
            answer.set_exception(error)

    # A thread of an executor would be waited for when the process ends.
    threading.Thread(target=target, name="ttrace-wandb", daemon=True).start()
    if not wait([answer], seconds).done:
        raise TimeoutError(f"no end after {seconds:.0f} s; try WANDB_MODE=offline")
    return answer.result()


def _settings(wandb: Any) -> Any:
    """Quiet, small, and with bounded waits; names that this wandb does not know are left out."""
    wanted = {
        "silent": True,
        "console": "off",
        "disable_git": True,
        "x_disable_meta": True,
        "disable_code": True,
        "disable_job_creation": True,
        "x_disable_stats": True,
        "init_timeout": INIT_SECONDS,
        "finish_timeout": 60.0,
        "login_timeout": 10.0,
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def _mode(wandb: Any) -> tuple[str | None, str]:
    """The mode of an own run, and why where it is not what the user may expect."""
    if os.environ.get("WANDB_MODE"):
        return None, ""
    settings = wandb.setup().settings
    if settings.mode != "online":
        return None, ""  # as 'wandb offline' has set it
    base_url = os.environ.get("WANDB_BASE_URL") or str(settings.base_url)
    hosts = [urllib.parse.urlsplit(base_url).netloc]
    if base_url == wandb.Settings().base_url:
        hosts.append(_FORMER_HOST)
    if not (getattr(settings, "api_key", None) or _has_key(hosts)):
        return "offline", " (no API key: 'wandb login' to log online)"
    return "online", ""


def _has_key(hosts: Sequence[str]) -> bool:
    """Whether wandb would find an API key without asking; its own check may prompt or warn."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    for file in filter(None, [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]):
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            keys = netrc.netrc(os.path.expanduser(file))
            if any(map(keys.authenticators, hosts)):
                return True
    return False


def _where(run: Any) -> str:
    """A link, or the folder and the command that uploads it."""
    offline = bool(getattr(run, "offline", False))
    # Asking an offline run for its address prints a warning.
    url = None if offline else getattr(run, "url", None)
    if url:
        return clean(url, NOTE_LIMIT)
    return f"{_OFFLINE}{_word(Path(str(run.dir)).parent)}"


def left_offline(directory: Path, since: float) -> str:
    """Where the offline run made in ``directory`` since a time is; empty if there is none."""
    runs = [run for run in directory.glob("wandb/offline-run-*") if run.stat().st_mtime >= since]
    return f"W&B: {_OFFLINE}{_word(max(runs))}" if runs else ""


def _word(path: Path) -> str:
    """A path as a word of the command that uploads a run."""
    return shlex.quote(clean(path, NOTE_LIMIT))


def _log(
    wandb: Any, run: Any, summary: Summary, verdicts: Sequence[Verdict], html_path: Path
) -> None:
    """Log everything; the step of a training run is left as it is (``commit=False``).

    Media have names without a slash, so that their files are directly in ``files/media/table``.
    """
    rows = table.layer_rows(verdicts)
    data: dict[str, Any] = {
        "ttrace_verdicts": wandb.Table(columns=list(COLUMNS), data=[_row(row) for row in rows]),
    }
    bars = [[clean(layer, 60), margin] for layer, margin in table.layer_margins(rows).items()]
    if bars:
        data["ttrace_worst_margin_per_layer"] = wandb.plot.bar(
            wandb.Table(columns=["layer", "margin"], data=bars),
            "layer",
            "margin",
            title="ttrace: worst margin per layer (above 1 fails)",
        )
    if html_path.is_file():
        page = html_path.read_text(encoding="utf-8")
        data["ttrace_report"] = wandb.Html(page, inject=False)
    run.log(data, commit=False)
    run.summary.update(summary_fields(summary, verdicts))
    if summary.verdict is Result.DIVERGED:
        title, text = alert_text(summary, verdicts)
        run.alert(title=title, text=text, level=wandb.AlertLevel.ERROR)


def _row(row: table.LayerRow) -> list[Any]:
    worst = row.group.worst
    numbers = (worst.rel_err, worst.rel_err_eps, worst.tolerance)
    return [
        clean(row.layer, 60),
        row.direction.value,
        worst.verdict.value,
        clean(row.tensor),
        *(n if n is not None and math.isfinite(n) else None for n in numbers),
        table.finite_margin(worst),
        row.group.failures,
        row.group.total,
        row.group.unchecked,
        wording.ranks_text(worst.ranks),
        clean(worst.note, NOTE_LIMIT),
    ]


def summary_fields(summary: Summary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """The fields by which a table of runs is sorted and filtered."""
    counts = summary.counts or table.tally(verdicts)
    fields: dict[str, Any] = {
        "ttrace/verdict": summary.verdict.value,
        "ttrace/tensors": sum(counts.values()),
        "ttrace/failures": sum(counts.get(o.value, 0) for o in Outcome if o.is_failure),
        "ttrace/unchecked": counts.get(Outcome.UNCHECKED.value, 0),
        "ttrace/not_exercised": len(summary.not_exercised),
    }
    if run := summary.run:
        fields |= {
            "ttrace/megatron": wording.code_text(run.megatron),
            "ttrace/megatron_ttrace": wording.code_text(run.ttrace),
            "ttrace/command": clean(shlex.join(run.command), NOTE_LIMIT),
            "ttrace/run": clean(run.id),
        }
    fields |= {f"ttrace/count/{outcome}": counts.get(outcome, 0) for outcome in Outcome}
    margins = {
        direction: margin
        for direction in Direction
        if (margin := table.finite_margin(table.worst_of(verdicts, direction))) is not None
    }
    if margins:
        fields["ttrace/worst_margin"] = max(margins.values())
    fields |= {f"ttrace/margin/{direction}": margin for direction, margin in margins.items()}
    if summary.culprits:
        first = summary.culprits[0]
        alike = table.folded(table.by_cause(summary.culprits)[0], summary.execution_order)
        fields |= {
            "ttrace/culprit": clean(first.name),
            "ttrace/direction": first.direction.value,
            "ttrace/ranks": wording.ranks_text(first.ranks),
            "ttrace/culprits": clean(", ".join(alike), NOTE_LIMIT),
            "ttrace/explanation": clean(first.explanation, NOTE_LIMIT),
            "ttrace/hint": clean(first.hint, NOTE_LIMIT),
            "ttrace/where": clean(first.where, NOTE_LIMIT),
        }
    return fields


def alert_text(summary: Summary, verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Title and text of the one alert: what a person needs without opening anything."""
    if summary.culprits:
        groups = table.by_cause(summary.culprits)
        first = groups[0][0]
        why = "; ".join(f"{label}: {text}" for label, text in wording.cause_pairs(first, 1))
        text = f"{wording.sentence(first)}. {why}"
        if len(groups[0]) > 1:
            text += f". All: {', '.join(table.folded(groups[0], summary.execution_order))}"
        more = len(groups) - 1
        text += f" ({more} more culprit{'s' if more > 1 else ''})" if more else ""
        return f"ttrace: {clean(first.name, 80)} diverges ({first.direction.value})", text
    worst = table.worst_of(verdicts)
    sentence = wording.sentence(worst) if worst is not None else ""
    layout = wording.layout_text(summary.config)
    return "ttrace: the run diverges from its reference", f"{sentence} [{layout}]".strip()
