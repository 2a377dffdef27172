"""What a machine has, and what it lacks for a stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from posttrain.errors import SpecError
from posttrain.planning import capacity
from posttrain.planning.capacity import Machine
from posttrain.planning.spec import Resources

MACHINE = Machine(4, ("0", "1"), 2**30)


@pytest.mark.parametrize(
    ("resources", "what", "found", "expected"),
    [
        ({"cpus": 5}, "CPUs", "5", "at most 4"),
        ({"gpus": 3}, "GPUs", "3", "at most 2"),
        ({"memory": "2GiB"}, "memory", "2.0 GiB", "at most 1.0 GiB"),
        ({"memory": "1048577KiB"}, "memory", "1,073,742,848 bytes", "at most 1,073,741,824 bytes"),
    ],
)
def test_the_impossible_is_refused(
    resources: dict[str, object], what: str, found: str, expected: str
) -> None:
    MACHINE.require("x", Resources(cpus=4, gpus=2, memory="1GiB"))
    with pytest.raises(SpecError, match=f"asks for more {what} than this machine has") as refused:
        MACHINE.require("x", Resources.model_validate(resources))
    error = refused.value
    (option,) = resources
    assert (error.where, error.found, error.expected) == (f"x.resources.{option}", found, expected)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("0,3", ("0", "3")),
        ("GPU-1, GPU-5", ("GPU-1", "GPU-5")),
    ],
)
def test_visible_gpus_are_respected(
    visible: str, gpus: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = Machine.here()
    assert here.gpus == gpus and here.cpus >= 1 and here.memory > 2**20


def test_the_limits_of_control_groups_are_respected(tmp_path: Path) -> None:
    own = next(
        line.removeprefix("0::").lstrip("/")
        for line in [*Path("/proc/self/cgroup").read_text().splitlines(), "0::/"]
        if line.startswith("0::")
    )
    group = tmp_path / own
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.max").write_text("150000 100000\n")
    (group / "memory.max").write_text("1048576\n")
    assert capacity._cpu_quotas(tmp_path) == [2]
    assert capacity._memory_limits(tmp_path) == [1048576]
    (group / "cpu.max").write_text("max 100000\n")
    (group / "memory.max").write_text("max\n")
    assert capacity._cpu_quotas(tmp_path) == [] and capacity._memory_limits(tmp_path) == []
