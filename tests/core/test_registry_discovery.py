"""Every way in which a plugin can be wrong, and that it disturbs no other."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.plugins import install, status_of, write_distribution
from helpers.wrong_plugins import BUILTIN, HEAD, HEALTHY, IMPORT_ERROR, REWARD, assert_rest_works

from posttrain.contracts.registration import Group
from posttrain.errors import PluginError
from posttrain.registry import hooks
from posttrain.registry.catalogue import Catalogue
from posttrain.registry.discovery import discover
from posttrain.registry.examination import GROUP_OF, satisfies
from posttrain.registry.status import Status


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Discover with a built-in plugin, a healthy one and the given broken one, `acme-losses`."""

    def look(source: str, **options: object) -> Catalogue:
        write_distribution(tmp_path, "posttrain", BUILTIN, entry="builtin", module="fake_builtin")
        write_distribution(tmp_path, "healthy", HEALTHY, module="fake_healthy")
        write_distribution(tmp_path, "acme-losses", source, entry="acme")
        install(tmp_path, monkeypatch)
        return discover(**options)

    return look


def broken(source: str, found, status: Status) -> str:
    catalogue = found(source)
    assert_rest_works(catalogue)
    acme = status_of(catalogue, "acme")
    assert acme.status is status
    assert acme.error is not None and "\n" not in acme.error
    assert (acme.distribution, acme.version, acme.provides) == ("acme-losses", "1.0", ())
    assert acme.file is not None and acme.file.endswith("acme_losses.py")
    with pytest.raises(PluginError, match="there is no loss 'simpo2'") as error:
        catalogue.entry(Group.LOSS, "simpo2")
    assert (
        error.value.fix is not None and "acme-losses 1.0" in error.value.fix and acme.error in error.value.fix
    )
    return acme.error


def test_every_hookspec_has_a_group() -> None:
    specs = {name for name in dir(hooks) if name.startswith("posttrain_")}
    assert specs == set(GROUP_OF)
    assert set(GROUP_OF.values()) == set(Group)


def test_loaded(found) -> None:
    catalogue = found(HEAD + REWARD.format(name="acme/judge"))
    acme = status_of(catalogue, "acme")
    assert (acme.status, acme.error, acme.hooks) == (Status.LOADED, None, ("posttrain_rewards",))
    assert acme.provides == ((Group.REWARD, "acme/judge"),)
    assert catalogue.plugins[0].name == "builtin"
    assert catalogue.troubles() == []


def test_import_error_names_the_place_inside_the_plugin(found, tmp_path: Path) -> None:
    error = broken(IMPORT_ERROR, found, Status.IMPORT_ERROR)
    assert error == f"RuntimeError: broken in two lines ({tmp_path / 'acme_losses.py'}:5)"


def test_syntax_error(found, tmp_path: Path) -> None:
    error = broken("x = 1\ndef f(:\n", found, Status.IMPORT_ERROR)
    assert error.startswith("SyntaxError: ") and f"({tmp_path / 'acme_losses.py'}:2)" in error


def test_missing_dependency_is_blamed_on_the_importing_line(found, tmp_path: Path) -> None:
    error = broken("import posttrain\nimport no_such_thing\n", found, Status.IMPORT_ERROR)
    assert error == f"ModuleNotFoundError: No module named 'no_such_thing' ({tmp_path / 'acme_losses.py'}:2)"


def test_exit_at_import(found) -> None:
    assert broken("raise SystemExit(3)", found, Status.IMPORT_ERROR).startswith("SystemExit: 3 (")


def test_keyboard_interrupt_passes_through(found) -> None:
    with pytest.raises(KeyboardInterrupt):
        found("raise KeyboardInterrupt")


def test_misspelt_hook(found) -> None:
    source = HEAD + "\n@posttrain.hookimpl\ndef posttrain_loses():\n    return []\n"
    error = broken(source, found, Status.INVALID)
    assert "posttrain_loses is no hook; did you mean `posttrain_losses`?" in error
    assert "acme_losses.py:" in error


def test_misspelt_hook_without_the_prefix(found) -> None:
    error = broken(HEAD + "\n@posttrain.hookimpl\ndef losses():\n    return []\n", found, Status.INVALID)
    assert "unknown hook 'losses'" in error


def test_missing_hookimpl(found) -> None:
    error = broken(HEAD + "\ndef posttrain_losses():\n    return []\n", found, Status.INVALID)
    assert "posttrain_losses is missing @posttrain.hookimpl" in error


def test_wrong_arguments(found) -> None:
    source = (
        HEAD
        + REWARD.format(name="judge")
        + "\n@posttrain.hookimpl\ndef posttrain_losses(trainer):\n    return []\n"
    )
    assert "{'trainer'}" in broken(source, found, Status.INVALID)


def test_no_hook_at_all(found) -> None:
    assert "implements no hook" in broken(HEAD, found, Status.INVALID)


@pytest.mark.parametrize("specifier", [">=2", "<1", "==7", ">=1,<2,!=1"])
def test_incompatible_api(found, specifier: str) -> None:
    error = broken(f"POSTTRAIN_API = {specifier!r}\nraise_if_called = 1\n", found, Status.INCOMPATIBLE)
    assert f"wants posttrain API {specifier}, this is 1" in error


def test_hooks_of_an_incompatible_plugin_are_not_called(found, capfd: pytest.CaptureFixture[str]) -> None:
    hook = "\n@posttrain.hookimpl\ndef posttrain_losses():\n    print('called')\n"
    source = HEAD.replace(">=1,<2", ">=2") + hook
    broken(source, found, Status.INCOMPATIBLE)
    assert "called" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "POSTTRAIN_API is missing; state the API"),
        ("POSTTRAIN_API = 1", "POSTTRAIN_API is not a string; state the API"),
        ("POSTTRAIN_API = '~=1.0'", "'~=1.0' is not a comparison with a whole number"),
        ("POSTTRAIN_API = ''", "'' is not a comparison"),
    ],
)
def test_unusable_api_statement(found, line: str, message: str) -> None:
    source = "import posttrain\n@posttrain.hookimpl\ndef posttrain_losses():\n    return []\n" + line
    assert message in broken(source, found, Status.INVALID)


def test_specifiers() -> None:
    assert satisfies(1, ">=1,<2") and satisfies(3, ">=1, != 2") and satisfies(2, "==2")
    assert not satisfies(2, ">=1,<2") and not satisfies(2, ">2") and satisfies(2, "<=2")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no')", "posttrain_losses raised ValueError: no ("),
        ("raise SystemExit", "posttrain_losses raised SystemExit"),
        ("return None", "posttrain_losses returned NoneType, expected a list"),
        ("return 'simpo2'", "posttrain_losses returned str, expected a list"),
        ("yield", "posttrain_losses returned generator, expected a list"),
        ("return ['simpo2']", "holds str 'simpo2', expected posttrain.Registration"),
        ("return [Registration('Simpo', 's', 'a:b')]", "the name 'Simpo' does not match"),
        ("return [Registration('a/b/c', 's', 'a:b')]", "the name 'a/b/c' does not match"),
        ("return [Registration('simpo2\\n', 's', 'a:b')]", "does not match"),
        ("return [Registration('simpo2', '', 'a:b')]", "'simpo2' needs a summary of one line"),
        (
            "return [Registration('simpo2', 's', 'a.b')]",
            "the target 'a.b' is not of the form 'module:attribute'",
        ),
        ("return [Registration('simpo2', 's', None)]", "'simpo2' has no target"),
        ("return [Registration('simpo2', 's', 'a:b', numerics=0)]", "numerics is 0, expected a whole number"),
        ("return [Registration('simpo2', 's', 'a:b')] * 2", "registers the loss 'simpo2' twice"),
    ],
)
def test_bad_hooks_drop_all_registrations(found, body: str, message: str) -> None:
    source = (
        HEAD + REWARD.format(name="judge") + f"\n@posttrain.hookimpl\ndef posttrain_losses():\n    {body}\n"
    )
    assert message in broken(source, found, Status.INVALID)


def test_a_hook_wrapper_is_refused(found) -> None:
    source = HEAD + "\n@posttrain.hookimpl(wrapper=True)\ndef posttrain_losses():\n    return (yield)\n"
    assert "is a hook wrapper" in broken(source, found, Status.INVALID)


def test_an_attribute_that_raises_is_the_plugins_own_fault(found) -> None:
    source = HEAD + "\ndef __dir__():\n    raise OSError('no')\n"
    assert "OSError: no" in broken(source, found, Status.INVALID)


def test_a_trainer_and_a_stage_share_names(found) -> None:
    hook = "\n@posttrain.hookimpl\ndef posttrain_{}():\n    return [Registration('train.x', 's', 'a:b')]\n"
    error = broken(HEAD + hook.format("stages") + hook.format("trainers"), found, Status.INVALID)
    assert "registers the trainer 'train.x' twice" in error


def test_a_taken_name_stays_with_the_builtin(found) -> None:
    two = '[Registration("exact", "Mine.", "a:b"), Registration("acme/judge", "Mine too.", "a:b")]'
    catalogue = found(HEAD + f"\n@posttrain.hookimpl\ndef posttrain_rewards():\n    return {two}\n")
    acme = status_of(catalogue, "acme")
    assert acme.status is Status.INVALID
    assert (
        acme.error is not None and "claims the taken name 'exact' (reward, owned by posttrain)" in acme.error
    )
    assert catalogue.entry(Group.REWARD, "exact").plugin.builtin
    assert catalogue.names(Group.REWARD) == ["acme/judge", "exact", "healthy"]
    assert acme.provides == ((Group.REWARD, "acme/judge"),)
    assert catalogue.conflicts() == []


def test_two_third_parties_claim_one_name(found) -> None:
    catalogue = found(HEALTHY)
    assert [each.status for each in catalogue.plugins] == [Status.LOADED] * 3
    assert catalogue.names(Group.REWARD) == ["exact"]
    with pytest.raises(PluginError) as error:
        catalogue.entry(Group.REWARD, "healthy")
    text = str(error.value)
    assert "acme-losses 1.0" in text and "healthy 1.0" in text
    assert "acme_losses.py" in text and "fake_healthy.py" in text
    assert "POSTTRAIN_DISABLE_PLUGINS=acme" in text and "acme-losses/healthy" in text
    (conflict,) = catalogue.conflicts()
    assert (conflict.group, conflict.name) == (Group.REWARD, "healthy")
    assert catalogue.troubles()[0].startswith("the reward 'healthy' is claimed by 2 plugins: ")


def test_denying_one_of_two_ends_the_conflict(found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTTRAIN_DISABLE_PLUGINS", "acme")
    catalogue = found(HEALTHY)
    assert_rest_works(catalogue)
    assert catalogue.entry(Group.REWARD, "healthy").plugin.distribution == "healthy"


def test_printing_at_import_and_in_hooks_goes_to_stderr(found, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        HEAD
        + "print('at import')\n"
        + REWARD.format(name="judge").replace("return", "print('in hook')\n    return")
    )
    catalogue = found(source)
    assert status_of(catalogue, "acme").status is Status.LOADED
    streams = capsys.readouterr()
    assert streams.out == "" and streams.err == "at import\nin hook\n"
