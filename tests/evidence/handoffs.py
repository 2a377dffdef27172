"""Failures at the hand-offs of SFT → DPO, injected one by one: `docs/evidence/handoff-faults.md`.

`python -m tests.evidence handoffs [NAME…]`; with names, only these are run and printed, and no page is written.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import ledger
from helpers.handoff_faults import DOCUMENTED, FOR_RULES, HARMLESS, HEALTHY, INVENTED, Fault
from helpers.handoff_lab import Lab, Seen, Watcher, base_model

ABOUT = """\
One small pipeline (`tests/helpers/handoff_lab.py`): a model of 21,248 parameters and demonstrations from files, SFT,
preference pairs from a file or of the policy itself, DPO, an evaluation of both, a gate and a promotion. Each fault of
`tests/helpers/handoff_faults.py` is put into its files, its options, or a stage of somebody else's between two
trainings (`tests/helpers/foreign_stages.py`), in a workspace of its own. The first warning or error that the same
pipeline without the fault does not have counts; what is a note does not. The five healthy pipelines must run to
their end without any.

The first list is a survey's of documented failures of post-training pipelines; letters tell variants apart. The
second was written down before the rules were. The third has a fault for each rule that was written for neither list and
that neither tries; it shows that the rule works, and is counted nowhere.
"""

LIMITS = """\
How far these figures go:

- The rules were written by whoever had written the second list, and knew it. The list is independent of the rules, the
  rules are not of the list: of faults that nobody has thought of, a smaller share will be found.
- Rule H067 was added after a first run had missed I01, so I01 is no test of it.
- I09 and I11 have longer answers than the first run had, which found them by an accident of a task with few and short
  answers; both are missed since. The base model was trained for longer, so that 16 is not found by a score of exactly
  0. What the gate says counts as *later*, though it is said when the gate is bound.
- "Found" means that something was said first, not that it names the cause. I02 is first noticed as rows that are too
  long; I06 and I15 by what the evaluation gives; 15 is told before the gate refuses it.
- 6a adds ordinary tokens, which texts can give. Special tokens that the template never writes are only noted, since
  Gemma 3 comes with one; a row that holds one is refused.
- One model, one task, one seed. The healthy pipelines were written after the rules, by the same hand.
"""

LEGEND = """\
- **plan**: by `posttrain plan`, before anything runs. **bind**: inputs are known, the stage has not started.
- **load**: by a stage that reads rows or a model, before the training behind it. **step 0**: by a training stage,
  before its first update. **later**: after a training, mostly by the evaluation or the gate.
- Seconds from the start of planning until it was said, in one process with all libraries loaded. Most of it is the
  work of the stages before: a fault that can only be known after SFT takes as long as SFT."""

TUNED = "I01"
"""The fault that a rule was added for after it had been missed."""
MOMENTS = ("plan", "bind", "load", "step 0", "later", "missed")


@dataclass(frozen=True)
class Outcome:
    """How one fault came out.

    Args:
        name: The fault.
        title: What it is.
        moment: When it was found: one of `MOMENTS`, or `not applicable`.
        seconds: Until it was found.
        text: What was said, or why it does not apply.
        alarms: How many warnings and errors there were.
        status: How the run ended.
    """

    name: str
    title: str
    moment: str
    seconds: float | None
    text: str
    alarms: int
    status: str


def main() -> int:
    """Inject, watch, and write the page; 1 when a healthy pipeline raised an alarm or did not complete."""
    warnings.simplefilter("ignore", FutureWarning)
    chosen = sys.argv[1:]
    groups = [[fault for fault in group if not chosen or fault.name in chosen]
              for group in (DOCUMENTED, INVENTED, FOR_RULES, HEALTHY)]  # fmt: skip
    for bos in (False, True):
        base_model(bos)
    # The very first run imports the libraries; nobody's seconds should hold that.
    _observed(HEALTHY[0])
    found = [[_told(_observed(fault)) for fault in group] for group in groups]
    if not chosen:
        lines = _page(*found)
        data = [asdict(each) for group in found for each in group]
        ledger.write(
            "handoff-faults", "Faults at hand-offs", "python -m tests.evidence handoffs", lines, data
        )
    return int(any(each.alarms or each.status != "completed" for each in found[-1]))


def _observed(fault: Fault) -> Outcome:
    if fault.apply is None:
        return Outcome(fault.name, fault.title, "not applicable", None, fault.reason, 0, "not run")
    directory = Path(tempfile.mkdtemp(prefix="handoff-"))
    try:
        lab = Lab(directory / "lab")
        fault.apply(lab)
        watcher = Watcher(lab)
        return _outcome(fault, watcher.run(), watcher.status)
    finally:
        _remove(directory)


def _outcome(fault: Fault, seen: Sequence[Seen], status: str) -> Outcome:
    if not seen:
        return Outcome(fault.name, fault.title, "missed", None, HARMLESS.get(fault.name, ""), 0, status)
    first = _first(seen)
    return Outcome(
        fault.name, fault.title, first.moment, round(first.seconds, 2), first.text, len(seen), status
    )


def _first(seen: Sequence[Seen]) -> Seen:
    """Return what was said first; of several things at one moment about one node, an error."""
    first = seen[0]
    same = [each for each in seen if (each.moment, each.node) == (first.moment, first.node)]
    return next((each for each in same if each.level == "error"), first)


def _remove(directory: Path) -> None:
    """Remove a workspace, whose objects are read-only."""
    for path in directory.rglob("*"):
        if path.is_dir():
            path.chmod(0o755)
    shutil.rmtree(directory)


def _told(outcome: Outcome) -> Outcome:
    print(f"{time.strftime('%H:%M:%S')} {outcome.name}: {outcome.moment} {outcome.text[:150]}", flush=True)
    return outcome


def _page(
    documented: Sequence[Outcome],
    invented: Sequence[Outcome],
    for_rules: Sequence[Outcome],
    healthy: Sequence[Outcome],
) -> list[str]:
    alarms = sum(each.alarms for each in healthy)
    ran = sum(each.status == "completed" for each in healthy)
    return [
        *ABOUT.splitlines(),
        "",
        f"**Documented: {_summary(documented)}. Invented: {_summary(invented)}. False alarms on "
        f"{len(healthy)} healthy pipelines: {alarms}; {ran} of them ran to their end.** Of the invented ones without "
        f"I01: {_summary([each for each in invented if each.name != TUNED])}.",
        "",
        *LIMITS.splitlines(),
        "",
        *LEGEND.splitlines(),
        "",
        "## Documented failures",
        "",
        *_table(documented),
        "",
        "## Invented failures",
        "",
        *_table(invented),
        "",
        "## Failures for single rules",
        "",
        *_table(for_rules),
        "",
        "## Missed",
        "",
        *_misses([*documented, *invented, *for_rules]),
        "",
        "## Healthy pipelines",
        "",
        "| | pipeline | warnings and errors | run |",
        "|---|---|---|---|",
        *(f"| {each.name} | {each.title} | {each.alarms} | {each.status} |" for each in healthy),
    ]


def _summary(outcomes: Sequence[Outcome]) -> str:
    counts = Counter(each.moment for each in outcomes)
    applicable = len(outcomes) - counts["not applicable"]
    found = applicable - counts["missed"]
    parts = ", ".join(f"{counts[moment]} {moment}" for moment in MOMENTS if counts[moment])
    return f"{found} of {applicable} found ({parts})"


def _table(outcomes: Sequence[Outcome]) -> list[str]:
    lines = ["| | fault | found | seconds | what was said |", "|---|---|---|---|---|"]
    for each in outcomes:
        moment = f"**{each.moment}**" if each.moment == "missed" else each.moment
        seconds = "" if each.seconds is None else f"{each.seconds:.1f}"
        lines.append(f"| {each.name} | {each.title} | {moment} | {seconds} | {_cell(each.text)} |")
    return lines


def _misses(outcomes: Sequence[Outcome]) -> list[str]:
    missed = [each for each in outcomes if each.moment == "missed"]
    return [
        "These pass without a word:",
        "",
        *(f"- {each.name}, {each.title}" + (f" ({each.text})" if each.text else "") for each in missed),
    ]


def _cell(text: str) -> str:
    """Return the text in one line of a table, without digests, which change."""
    short = text.replace("|", "\\|").replace("\n", " ")
    return short if len(short) <= 160 else f"{short[:159]}…"


if __name__ == "__main__":
    sys.exit(main())
