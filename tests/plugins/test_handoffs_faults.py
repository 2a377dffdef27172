"""Injected failures are found when `docs/evidence/handoff-faults.md` says; nothing is found where nothing is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.handoff_faults import DOCUMENTED, FOR_RULES, HEALTHY, INVENTED, Fault
from helpers.handoff_lab import Lab, Watcher

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "handoff-faults.json"
RECORDED = {each["name"]: each["moment"] for each in json.loads(EVIDENCE.read_text())["results"]}
EARLY = [fault for fault in (*DOCUMENTED, *INVENTED) if RECORDED[fault.name] == "plan"]
OTHERS = [
    fault for fault in (*DOCUMENTED, *INVENTED) if fault.apply is not None and RECORDED[fault.name] != "plan"
]


def watched(fault: Fault, directory: Path) -> Watcher:
    lab = Lab(directory / "lab")
    assert fault.apply is not None
    fault.apply(lab)
    watcher = Watcher(lab)
    watcher.run()
    return watcher


def moment(watcher: Watcher) -> str:
    return watcher.seen[0].moment if watcher.seen else "missed"


def test_the_record_is_about_these_faults() -> None:
    written = {fault.name for fault in FOR_RULES}
    recorded = [name for name in RECORDED if name not in written]
    assert recorded == [fault.name for fault in (*DOCUMENTED, *INVENTED, *HEALTHY)]
    absent = {fault.name for fault in DOCUMENTED if fault.apply is None}
    assert absent == {name for name, found in RECORDED.items() if found == "not applicable"}
    assert {RECORDED[fault.name] for fault in HEALTHY} == {"missed"}


@pytest.mark.parametrize("fault", EARLY, ids=lambda fault: fault.name)
def test_found_by_the_plan(fault: Fault, tmp_path: Path) -> None:
    assert moment(watched(fault, tmp_path)) == "plan"


@pytest.mark.slow
@pytest.mark.parametrize("fault", OTHERS, ids=lambda fault: fault.name)
def test_found_when_it_was(fault: Fault, tmp_path: Path) -> None:
    assert moment(watched(fault, tmp_path)) == RECORDED[fault.name]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FOR_RULES, ids=lambda fault: fault.name)
def test_a_rule_finds_what_it_is_for(fault: Fault, tmp_path: Path) -> None:
    first = watched(fault, tmp_path).seen[0]
    assert first.text.startswith(fault.name.removeprefix("R-"))
    assert first.moment in ("plan", "bind")


@pytest.mark.slow
@pytest.mark.parametrize("fault", HEALTHY, ids=lambda fault: fault.name)
def test_no_alarm_where_nothing_is_wrong(fault: Fault, tmp_path: Path) -> None:
    watcher = watched(fault, tmp_path)
    assert (watcher.status, watcher.seen) == ("completed", [])
