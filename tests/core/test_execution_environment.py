"""What a worker finds in its environment, and where a secret never turns up."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pydantic
import pytest
from helpers.lab import Lab

from posttrain.errors import ExitCode, SpecError, StageError
from posttrain.execution import environment
from posttrain.execution.environment import variables, with_posttrain, without_secrets, worker_environment
from posttrain.execution.sequential import SequentialRunner
from posttrain.execution.session import execute

CANARY = "canary-5f0e9a77c1d2"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", "x"),
        ("GITHUBTOKEN", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("PGPASSWORD", "x"),
        ("api_key", "x"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/x.json"),
        ("DATABASE_URL", "postgres://me:hunter2@host/db"),
        ("INNOCENT", "hf_" + "a" * 34),
        ("GITHUB_PAT", "x"),
        ("GPG_PASSPHRASE", "x"),
        ("SENTRY_DSN", "x"),
        ("MYSQL_PWD", "x"),
        ("SESSION_COOKIE", "x"),
    ],
)
def test_secrets_are_removed_unless_declared(name: str, value: str) -> None:
    environ = {name: value, "PATH": "/bin"}
    assert without_secrets(environ) == {"PATH": "/bin"}
    assert without_secrets(environ, {name}) == environ


def test_what_merely_sounds_like_a_secret_stays() -> None:
    environ = {
        "TOKENIZERS_PARALLELISM": "true", "KEYBOARD": "us", "HOME": "/root", "LANG": "C.UTF-8", "PWD": "/",
        "OLDPWD": "/", "PATH": "/bin", "SSH_AUTH_SOCK": "/s", "COMPATIBLE": "1", "PYTHONPATH": "/p",
    }  # fmt: skip
    assert without_secrets(environ) == environ


@pytest.mark.parametrize(
    ("library", "kept"),
    [("glibc 2.41", True), ("glibc 2.36", True), ("glibc 2.35", False), ("musl 1.2", False), (None, False)],
)
def test_freed_blocks_are_kept_by_a_glibc_that_can_be_asked_to(
    monkeypatch: pytest.MonkeyPatch, library: str | None, kept: bool
) -> None:
    environment._heap.cache_clear()
    monkeypatch.setattr(os, "confstr", lambda name: library)
    assert ("GLIBC_TUNABLES" in worker_environment({}, threads=1)) is kept
    given = {"GLIBC_TUNABLES": "glibc.malloc.check=3"}
    assert worker_environment(given, threads=1)["GLIBC_TUNABLES"] == "glibc.malloc.check=3"
    environment._heap.cache_clear()


def test_a_system_without_a_c_library_to_ask_has_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise ValueError("unrecognized configuration name")

    environment._heap.cache_clear()
    monkeypatch.setattr(os, "confstr", unknown)
    assert "GLIBC_TUNABLES" not in worker_environment({}, threads=1)
    environment._heap.cache_clear()


def test_a_worker_gets_threads_devices_and_no_network() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1,2", "MY_TOKEN": "t", "OTHER_TOKEN": "o"}
    found = worker_environment(
        environ, threads=3, gpus=("1", "2"), secrets=["MY_TOKEN"], extra={"A": "env:OTHER_TOKEN"}
    )
    expected = {
        "CUDA_VISIBLE_DEVICES": "1,2", "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3", "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1", "TOKENIZERS_PARALLELISM": "false", "MY_TOKEN": "t",
        "A": "o",
    }  # fmt: skip
    assert {name: found.get(name) for name in expected} == expected
    assert "OTHER_TOKEN" not in found
    assert worker_environment(environ, threads=1)["CUDA_VISIBLE_DEVICES"] == ""
    with pytest.raises(SpecError, match="not set"):
        worker_environment({}, threads=1, extra={"A": "env:MISSING"})


@pytest.mark.parametrize("launcher", ["process", "inline"])
def test_a_secret_is_written_nowhere(
    lab_secret: Lab, launcher: str, capfd: pytest.CaptureFixture[str]
) -> None:
    lab = lab_secret
    lab.launcher = launcher
    pipeline = {
        "rows": {"uses": "test/write"},
        "bad": {
            "uses": "test/fail",
            "inputs": {"data": "rows"},
            "with": {"how": "leak", "token": "env:POSTTRAIN_TEST_TOKEN"},
        },
    }
    report = lab.run(pipeline)
    error = report.results["bad"].error
    assert error is not None and error["message"] == "RuntimeError: cannot log in with [redacted]"
    assert lab.notes("bad") == ["token [redacted]"]
    holding = [
        path for path in lab.workspace.rglob("*") if path.is_file() and CANARY.encode() in path.read_bytes()
    ]
    assert holding == []
    assert CANARY not in repr(lab.events)
    assert "Traceback" in (lab.attempt("bad") / "output.log").read_text()


@pytest.fixture
def lab_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("POSTTRAIN_TEST_TOKEN", CANARY)
    return Lab(tmp_path)


def test_a_secret_that_is_not_set_is_named(tmp_path: Path) -> None:
    pipeline: dict[str, Any] = {
        "rows": {"uses": "test/write"},
        "bad": {
            "uses": "test/fail",
            "inputs": {"data": "rows"},
            "with": {"how": "leak", "token": "env:POSTTRAIN_TEST_UNSET"},
        },
    }
    error = Lab(tmp_path).run(pipeline).results["bad"].error
    assert error is not None and error["message"] == "the secret env:POSTTRAIN_TEST_UNSET is not set"


def test_a_runtimes_environment_reaches_the_stage_and_its_key(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    threads = {"rows": {"uses": "test/write", "runtime": {"env": {"OMP_NUM_THREADS": "7"}}}}
    assert lab.run(threads).exit_code == ExitCode.OK
    assert "threads 7" in lab.notes("rows")
    assert lab.run({"rows": {"uses": "test/write"}}).results["rows"].status == "completed"


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter that has pydantic and pluggy, but not posttrain."""
    root = tmp_path / "runtime"
    venv.create(root, symlinks=True)
    python = root / "bin" / "python"
    places = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Only a path: the editable install of posttrain is made by a .pth file, which is not read there.
    site = Path(str(pydantic.__file__)).parents[1]
    (Path(places.stdout.strip()) / "libraries.pth").write_text(f"{site}\n")
    return python


def test_a_stage_runs_under_another_interpreter_that_lacks_posttrain(
    tmp_path: Path, bare_python: Path
) -> None:
    missing = subprocess.run([bare_python, "-P", "-c", "import posttrain"], capture_output=True, check=False)
    if missing.returncode == 0:
        pytest.skip("posttrain is installed beside its dependencies here")
    lab = Lab(tmp_path)
    report = lab.run({"rows": {"uses": "test/write", "runtime": {"python": str(bare_python)}}})
    assert report.exit_code == ExitCode.OK, report.results["rows"].error
    assert f"interpreter {bare_python}" in lab.notes("rows")


def test_an_interpreter_that_lacks_what_posttrain_needs_is_told(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", symlinks=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    error = (
        Lab(tmp_path)
        .run({"rows": {"uses": "test/write", "runtime": {"python": python}}})
        .results["rows"]
        .error
    )
    assert error is not None
    assert error["message"] == "posttrain cannot be imported by the interpreter of this stage"
    assert "pydantic" in error["found"] and error["fix"] == f"{python} -m pip install posttrain"


def test_an_interpreter_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="does not start"):
        with_posttrain({}, str(tmp_path / "nowhere"), tmp_path)


def test_an_interpreter_that_has_posttrain_gets_no_bridge(tmp_path: Path) -> None:
    environ = {"PATH": "/bin"}
    assert with_posttrain(environ, sys.executable, tmp_path) == environ
    assert not (tmp_path / "bridges").exists()


def test_files_in_the_working_directory_do_not_shadow_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    monkeypatch.chdir(tmp_path)
    assert Lab(tmp_path).run({"rows": {"uses": "test/write"}}).exit_code == ExitCode.OK


NAMES = "CANARY WREN"


@pytest.mark.parametrize(
    ("launcher", "uses"),
    [("process", "test/environ"), ("auto", "test/environ.forked"), ("inline", "test/environ")],
)
def test_a_stage_sees_the_secrets_it_declared_and_no_other_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: str, uses: str
) -> None:
    monkeypatch.setenv("CANARY", CANARY)
    monkeypatch.setenv("WREN", "wren-77aa01")
    lab = Lab(tmp_path, launcher)
    pipeline: dict[str, Any] = {
        "one": {"uses": "test/environ", "with": {"text": NAMES, "token": "env:CANARY"}},
        "two": {
            "uses": "test/environ",
            "with": {"text": f"{NAMES} TWO"},
            "runtime": {"env": {"WREN": "env:WREN"}},
        },
        "rest": {"uses": uses, "with": {"text": f"{NAMES} REST"}},
    }
    run = lab.prepare(pipeline)
    report = execute(run, SequentialRunner(), pipeline="test", runner_name="sequential")
    assert report.exit_code == ExitCode.OK
    assert [lab.notes(node) for node in pipeline] == [["CANARY"], ["WREN"], ["none"]]
    zygote = run._launchers.zygote
    assert (zygote is not None) == (launcher == "auto")
    assert zygote is None or not {"CANARY", "WREN"} & zygote._environment.keys()
    assert (os.environ["CANARY"], os.environ["WREN"]) == (CANARY, "wren-77aa01")


def test_no_line_of_a_secret_reaches_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["first-half-5f0e9a77", "second-half-c1d2e3f4"]
    monkeypatch.setenv("CANARY", "\n".join(lines))
    lab = Lab(tmp_path)
    lab.run({"one": {"uses": "test/environ", "with": {"text": "CANARY", "token": "env:CANARY"}}})
    assert (lab.attempt("one") / "output.log").read_text() == "[redacted]\n[redacted]\n"


def test_variables_are_put_back() -> None:
    before = dict(os.environ)
    with variables({"POSTTRAIN_A": "1", "HOME": "/elsewhere"}, hidden=["PATH", "HOME", "POSTTRAIN_ABSENT"]):
        assert (os.environ["POSTTRAIN_A"], os.environ["HOME"]) == ("1", "/elsewhere")
        assert "PATH" not in os.environ
    assert dict(os.environ) == before
