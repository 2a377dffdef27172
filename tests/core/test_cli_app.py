"""The command itself: verbs of plugins, unknown verbs, errors, and what it never imports."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.planning import CHAIN, Told, alone, command, write_pipeline
from helpers.plugins import install, write_distribution

from posttrain import __version__
from posttrain.cli import output
from posttrain_pipelines.tracking import watermark
from posttrain_pipelines.tracking.tracker import complete

VERB = """
import posttrain

POSTTRAIN_API = ">=1,<2"


@posttrain.hookimpl
def posttrain_commands():
    return [posttrain.Registration("hello", "Says hello.", "{target}")]
"""
PARTS = """
import typer


def hello(name: str = "you", times: int = 1) -> None:
    for _ in range(times):
        print(f"hello {name}")


def fails(name: str = "you") -> None:
    raise ZeroDivisionError("oops")


def ends(name: str = "you") -> None:
    raise typer.Exit(7)


def odd(name: "NoSuchType") -> None:
    pass


number = 3
"""
HEAVY = ("torch", "transformers", "prefect", "mlflow", "datasets", "numpy", "pandas")
PROBE = """
import sys
sys.argv = ["posttrain", *{arguments!r}]
from posttrain.cli import main
try:
    main()
finally:
    sys.stderr.write("\\nIMPORTED " + " ".join(sorted(set({heavy!r}) & set(sys.modules))) + "\\n")
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(tmp_path, monkeypatch, flows=True)


def add(monkeypatch: pytest.MonkeyPatch, *distributions: str, target: str = "verb_parts:hello") -> None:
    """Install distributions that bring the verb `hello`."""
    root = Path("site").absolute()
    root.mkdir()
    (root / "verb_parts.py").write_text(PARTS)
    for name in distributions:
        write_distribution(root, name, VERB.format(target=target))
    install(root, monkeypatch)


def test_help_and_version() -> None:
    told = command("--help")
    assert told.code == 0
    for verb in (
        "run",
        "plan",
        "resume",
        "status",
        "explain",
        "diff",
        "init",
        "doctor",
        "sync",
        "ui",
        "down",
    ):
        assert f"\n  {verb} " in told.out
    assert command("--version").out == f"posttrain {__version__}\n"
    assert "--tiny" in command("run", "--help").out
    told = command()
    assert told.code == 2 and told.err.startswith("Usage:")


def test_a_verb_of_a_plugin_parses_its_own_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "acme")
    assert "hello" in command("--help").out and "Says hello." in command("--help").out
    assert command("hello", "--name", "sea", "--times", "2").out == "hello sea\nhello sea\n"
    assert "--times" in command("hello", "--help").out
    told = command("hello", "--times", "many")
    assert told.code == 2 and "--times" in told.err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("verb_parts:gone", "the command 'hello' of acme 1.0 cannot be imported: AttributeError"),
        ("nowhere:hello", "the command 'hello' of acme 1.0 cannot be imported: ModuleNotFoundError"),
        ("verb_parts:number", "the command 'hello' of acme 1.0 breaks the contract"),
        ("verb_parts:odd", "the verb 'hello' of acme 1.0 is no command"),
        ("verb_parts:fails", "the verb 'hello' of acme 1.0 failed: ZeroDivisionError: oops"),
    ],
)
def test_a_broken_verb_is_blamed_on_its_plugin(
    target: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(monkeypatch, "acme", target=target)
    told = command("hello")
    assert told.code == 2
    assert message in told.err
    assert "Traceback" not in told.err
    assert command("--help").code == 0


def test_a_verb_decides_on_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "acme", target="verb_parts:ends")
    assert command("hello").code == 7


def test_a_verb_that_two_plugins_claim_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, "acme", "bolt")
    told = command("hello")
    assert told.code == 2
    assert "the command 'hello' is claimed by 2 plugins" in told.err
    assert "acme" in told.err and "bolt" in told.err
    assert command("status").code == 0


def test_an_unknown_verb_has_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    told = command("pln", "x")
    assert told.code == 2
    assert "posttrain: there is no such verb" in told.err and "plan" in told.err.partition("fix:")[2]


def test_an_unknown_verb_may_be_that_of_a_broken_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path("site").absolute()
    root.mkdir()
    write_distribution(root, "acme", "raise RuntimeError('no')")
    install(root, monkeypatch)
    told = command("hello")
    assert told.code == 2 and "acme" in told.err and "RuntimeError: no" in told.err


def test_wrong_usage_exits_2() -> None:
    for arguments in (["plan"], ["plan", "x", "--nosuch"], ["--nosuch"], ["store", "nosuch"]):
        told = command(*arguments)
        assert told.code == 2 and "Traceback" not in told.err, arguments


def test_a_traceback_is_shown_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from posttrain.cli.app import run
    from posttrain.errors import SpecError

    monkeypatch.setenv("POSTTRAIN_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["posttrain", "plan", "gone.yaml"])
    with pytest.raises(SpecError):
        run()


@pytest.mark.parametrize(
    "verb", [["status"], ["store", "ls"], ["resume"], ["explain", "sft"], ["diff", "a", "b"], ["store", "gc"]]
)
def test_a_workspace_that_is_a_file_is_no_traceback(verb: list[str]) -> None:
    Path("file").write_text("")
    told = command(*verb, "--workspace", "file")
    assert told.code in (0, 1, 2)
    assert "Traceback" not in told.err


def test_unwritable_text_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    stream.reconfigure(errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    output.say("0.1 → 0.2\x1b[31m")
    assert raw.getvalue() == b"0.1 \\u2192 0.2[31m\n"
    stream.detach()


def probe(*arguments: str | Path) -> Told:
    source = PROBE.format(arguments=list(map(str, arguments)), heavy=HEAVY)
    child = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    return Told(child.returncode, child.stdout, child.stderr)


def imported(told: Told) -> list[str]:
    (line,) = [line for line in told.err.splitlines() if line.startswith("IMPORTED")]
    return line.split()[1:]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plugins", "list"],
        ["plugins", "check", "--all"],
        ["plan", "quickstart"],
        ["plan", "quickstart", "--tiny", "--json"],
        ["status"],
        ["schema"],
        ["doctor"],
        ["recipes"],
        ["data", "--help"],
        ["data", "dedup", "--help"],
    ],
)
def test_nothing_heavy_is_imported(arguments: list[str]) -> None:
    told = probe(*arguments)
    assert told.code == 0, told.err
    assert imported(told) == []


def test_a_cached_run_imports_nothing_heavy_and_makes_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_pipeline(Path("chain.yaml"), CHAIN)
    with monkeypatch.context() as patch:
        patch.setenv("POSTTRAIN_DISABLE_PLUGINS", "flows")
        assert command("run", file, "--runner", "inline").code == 0
    (run,) = Path(".posttrain/runs").iterdir()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    tracked(run.name)
    told = probe("run", file)
    assert told.code == 0, told.err
    assert told.out.rstrip().endswith("nothing to do")
    assert imported(told) == []
    assert list(Path(".posttrain/runs").iterdir()) == [run]
    assert not Path(".posttrain/services").exists()


def tracked(run: str) -> None:
    """Note, as the MLflow tracker does after a sync, that its server has all of this run."""
    workspace = Path(".posttrain").absolute()
    watermark.write(workspace, run, {**complete(workspace, run), "status": "completed"})
