"""Graphs: matrices expanded, ports connected, smoke runs, and every mistake with its place and both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.planning import CHAIN, catalogue, graph, problems
from helpers.planning_stages import STAGES
from helpers.plugins import catalogue_of

from posttrain.contracts.registration import Registration
from posttrain.errors import SpecError
from posttrain.planning.graph import Reference, select

MATRIX = """
    stages:
      chats: {uses: try/rows}
      sft: {uses: try/train, inputs: {data: chats.train}}
      dpo:
        uses: try/train
        inputs: {data: chats.train, model: sft}
        matrix: {seed: [0, 1], loss.beta: [0.1, 0.2]}
      eval: {uses: try/compare, inputs: {models: [sft, EVALUATED]}}
"""


def test_nodes_come_in_the_written_order_where_it_is_free() -> None:
    built = graph("""
        stages:
          late: {uses: try/train, inputs: {data: first.train}}
          alone: {uses: try/rows}
          first: {uses: try/rows}
    """)
    assert built.order == ("alone", "first", "late")
    assert built.dependencies == {"alone": (), "first": (), "late": ("first",)}


def test_a_matrix_makes_a_node_for_every_combination() -> None:
    built = graph(MATRIX.replace("EVALUATED", '"dpo[*]"'))
    names = [f"dpo[seed={seed},loss.beta={beta}]" for seed in (0, 1) for beta in (0.1, 0.2)]
    assert [name for name in built.order if name.startswith("dpo")] == names
    node = built.nodes["dpo[seed=1,loss.beta=0.2]"]
    assert (node.stage, node.config.seed, node.config.loss.options) == ("dpo", 1, {"beta": 0.2})
    assert built.nodes["eval"].inputs["models"] == tuple(Reference(name, "model") for name in ["sft", *names])


def test_a_selector_chooses_the_nodes_with_these_values() -> None:
    built = graph(MATRIX.replace("EVALUATED", '"dpo[seed=1]"'))
    chosen = [reference.node for reference in built.nodes["eval"].inputs["models"]]
    assert chosen == ["sft", "dpo[seed=1,loss.beta=0.1]", "dpo[seed=1,loss.beta=0.2]"]


def test_a_matrix_without_a_selector_is_refused() -> None:
    (problem,) = problems(MATRIX.replace("EVALUATED", "dpo"))
    assert problem.startswith("file:9:52: stage `dpo` has a matrix, so it is several nodes")
    assert 'fix: write "dpo[*]" for all of them' in problem
    (problem,) = problems(MATRIX.replace("EVALUATED", "dpo.model"))
    assert 'fix: write "dpo[*].model" for all of them' in problem


def test_needs_waits_for_all_nodes_of_a_matrix() -> None:
    text = MATRIX.replace("EVALUATED", '"dpo[seed=0]"') + "      last: {uses: try/rows, needs: [dpo, sft]}\n"
    built = graph(text)
    assert len(built.nodes["last"].needs) == 5
    assert built.dependencies["last"][-1] == "sft"


def test_a_circle_is_shown() -> None:
    (problem,) = problems("""
        stages:
          a: {uses: try/train, inputs: {data: rows.train, model: c}}
          b: {uses: try/train, inputs: {data: rows.train, model: a}}
          c: {uses: try/train, inputs: {data: rows.train, model: b}}
          after: {uses: try/compare, inputs: {models: c}}
          rows: {uses: try/rows, needs: []}
    """)
    assert problem.startswith("file:3:3: these stages depend on each other in a circle")
    assert "found: a → b → c → a" in problem


def test_an_unconnected_port_is_named_with_what_it_takes() -> None:
    (problem,) = problems("stages:\n  sft: {uses: try/train}\n")
    assert problem.splitlines() == [
        "file:2:3: input port `data` of stage `sft` (try/train) is not connected",
        "  expected: an artifact of kind dataset",
        "  fix: add `data: STAGE` under `inputs:`",
    ]


def test_an_ill_typed_connection_names_both_ends() -> None:
    (problem,) = problems("""
        stages:
          chats: {uses: try/rows}
          eval: {uses: try/compare, inputs: {models: chats.test}}
    """)
    assert problem.splitlines() == [
        "file:4:46: chats.test does not fit input port `models` of eval",
        "  found: dataset from chats (try/rows)",
        "  expected: model for eval (try/compare)",
        "  fix: add a stage that makes a model",
    ]


@pytest.mark.parametrize(
    ("written", "message", "rest"),
    [
        ("chats.trian", "chats (try/rows) has no output `trian`", "fix: did you mean `chats.train`?"),
        ("chats", "chats (try/rows) has several outputs", "expected: one of chats.train, chats.test"),
        ("none", "none (try/silent) puts out nothing", "found: none"),
        (
            "[chats.train, chats.test]",
            "input port `data` of sft (try/train) takes one artifact",
            "found: 2: ",
        ),
    ],
)
def test_outputs_that_are_not_meant(written: str, message: str, rest: str) -> None:
    (problem,) = problems(f"""
        stages:
          chats: {{uses: try/rows}}
          none: {{uses: try/silent}}
          sft: {{uses: try/train, inputs: {{data: {written}}}}}
    """)
    assert problem.startswith(f"file:5:41: {message}")
    assert rest in problem


def test_a_single_port_takes_no_whole_matrix() -> None:
    text = MATRIX.replace("EVALUATED", '"dpo[*]"')
    (problem,) = problems(
        text + '      more: {uses: try/train, inputs: {data: chats.train, model: "dpo[seed=0]"}}\n'
    )
    assert "input port `model` of more (try/train) takes one artifact" in problem
    assert "found: 2: dpo[seed=0,loss.beta=0.1].model, dpo[seed=0,loss.beta=0.2].model" in problem


def test_an_unknown_port_and_plugin_have_suggestions() -> None:
    first, second = problems("""
        stages:
          chats: {uses: try/row}
          sft: {uses: try/trian, inputs: {data: chats}}
    """)
    assert first.startswith("file:3:17: there is no stage 'try/row'") and "try/rows" in first
    assert second.startswith("file:4:15: ") and "`try/train`" in second
    (problem,) = problems("""
        stages:
          chats: {uses: try/rows}
          sft: {uses: try/train, inputs: {dta: chats.train, data: chats.train}}
    """)
    assert problem.startswith("file:4:35: try/train has no input port `dta`")
    assert "did you mean `data`?" in problem


def test_the_problems_of_all_stages_come_together_and_once() -> None:
    found = problems("""
        stages:
          a: {uses: try/train, matrix: {seed: [0, 1]}}
          b: {uses: try/train}
    """)
    assert [each.splitlines()[0].partition(": ")[0] for each in found] == ["file:3:3", "file:4:3"]


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        ("{learning_rat: 1}", "file:5:11", "there is no option 'learning_rat'"),
        ("{loss: {name: margin, betta: 1}}", "file:5:32", "there is no option 'betta'"),
        ("{loss: {name: margin, beta: -1}}", "file:5:38", "the value does not fit"),
        ("{loss: margn}", "file:5:17", "there is no loss 'margn'"),
        ("{loss: {name: margn}}", "file:5:24", "there is no loss 'margn'"),
        ("{seed: one}", "file:5:17", "the value does not fit"),
        ("{seed: 1, token: hunter2}", "file:5:27", "this looks like a secret"),
    ],
)
def test_a_wrong_option_is_pointed_at(options: str, place: str, message: str) -> None:
    (problem,) = problems(f"""
        stages:
          chats: {{uses: try/rows}}
          sft: {{uses: try/train, inputs: {{data: chats.train}},
           with: {options}}}
    """)
    assert problem.startswith(f"{place}: {message}")
    assert "hunter2" not in problem


def test_a_misspelt_component_option_has_a_suggestion() -> None:
    (problem,) = problems(
        "stages:\n  chats: {uses: try/rows}\n"
        "  sft: {uses: try/train, inputs: {data: chats.train}, with: {loss: {name: margin, betta: 1}}}"
    )
    assert "expected: one of beta" in problem
    assert "fix: did you mean `beta`?" in problem


def test_values_from_defaults_overrides_and_matrices_know_their_place() -> None:
    text = """
        defaults:
          try/t*:
            with: {learning_rate: fast, epochs: 1}
        stages:
          chats: {uses: try/rows}
          sft: {uses: try/train, inputs: {data: chats.train}, matrix: {loss.beta: [0.1, -2]}}
    """
    rate, beta = problems(text)
    assert rate.startswith("file:4:27: the value does not fit")
    assert 'found: "fast"' in rate
    assert beta.startswith("file:7:81: the value does not fit")
    override = "stages.sft.with.learning_rate=1"
    assert [each[:9] for each in problems(text, override)] == ["file:7:81"]
    (problem,) = problems(text, override, "stages.sft.matrix={seed: [0]}", "stages.sft.with.seed_=3")[:1]
    assert problem.startswith("--set stages.sft.with.seed_: there is no option 'seed_'")


def test_an_axis_that_leads_nowhere_is_pointed_at() -> None:
    (problem,) = problems("""
        stages:
          chats: {uses: try/rows, with: {rows: 3}, matrix: {rows.deep: [1]}}
    """)
    assert problem.startswith("file:3:53: `with.rows` has nothing below it")


def test_every_option_knows_where_it_was_set() -> None:
    built = graph(
        """
        defaults:
          try/train: {with: {epochs: 1}}
        stages:
          chats: {uses: try/rows}
          sft:
            uses: try/train
            inputs: {data: chats.train}
            with: {loss: margin}
            matrix: {seed: [4]}
        """,
        "stages.sft.with.learning_rate=0.001",
    )
    assert built.nodes["sft[seed=4]"].origins == {
        "loss.name": "file:9:18",
        "loss.beta": "default",
        "learning_rate": "--set stages.sft.with.learning_rate",
        "epochs": "file:3:30",
        "steps": "default",
        "seed": "file:10:21",
        "logging": "default",
        "token": "default",
        "fail": "default",
    }


def test_the_command_line_beats_the_file_though_it_gives_the_default() -> None:
    text = CHAIN.replace("inputs: {data: chats.train}}", "inputs: {data: chats.train}, with: {epochs: 1}}")
    assert graph(text).nodes["sft"].config.epochs == 1
    assert graph(text, "stages.sft.with.epochs=3.0").nodes["sft"].config.epochs == 3


def test_sources_are_absolute(tmp_path: Path) -> None:
    built = graph("stages:\n  chats: {uses: try/rows, with: {path: rows.txt, tags: [b, a]}}", base=tmp_path)
    node = built.nodes["chats"]
    assert node.config.path == str(tmp_path / "rows.txt")
    assert node.config.tags == {"a", "b"}
    assert node.origins["path"] == "file:2:40"


class TestTiny:
    def test_takes_away_what_would_contradict(self) -> None:
        text = CHAIN.replace(
            "inputs: {data: chats.train}}", "inputs: {data: chats.train}, with: {epochs: 1}}"
        )
        node = graph(text, tiny=True).nodes["sft"]
        assert (node.config.steps, node.config.epochs) == (2, 3.0)
        assert graph(text, tiny=True).nodes["chats"].config.rows == 2
        assert {node.origins[name] for name in ("steps", "loss.beta")} == {"--tiny"}
        assert node.origins["epochs"] == "default"

    def test_keeps_what_the_component_was_and_opens_bare_names(self) -> None:
        text = CHAIN.replace("{data: chats.train}}", "{data: chats.train}, with: {loss: margin}}")
        built = graph(text, tiny=True)
        assert built.nodes["sft"].config.loss.model_dump() == {"name": "try/margin", "beta": 0.5}
        assert built.nodes["dpo"].config.loss.model_dump() == {"name": "try/margin", "beta": 0.5}

    def test_yields_to_the_command_line_and_to_a_matrix(self) -> None:
        built = graph(MATRIX.replace("EVALUATED", '"dpo[*]"'), "stages.sft.with.steps=7", tiny=True)
        assert built.nodes["sft"].config.steps == 7
        assert built.nodes["dpo[seed=0,loss.beta=0.2]"].config.loss.options == {"beta": 0.2}
        assert built.nodes["dpo[seed=0,loss.beta=0.2]"].config.steps == 2

    def test_a_contradiction_with_the_command_line_is_said(self) -> None:
        found = problems(CHAIN, "stages.sft.with.epochs=1", tiny=True)
        assert len(found) == 1 and "epochs would be ignored beside steps" in found[0]

    def test_what_it_sets_itself_is_blamed_on_it(self) -> None:
        broken = type("Broken", (STAGES["rows"],), {"tiny": {"rows": "few"}})
        plugins = catalogue_of(stages=[Registration("rows", "rows", broken)])
        (problem,) = problems("stages:\n  a: {uses: rows, with: {rows: 3}}", tiny=True, plugins=plugins)
        assert problem.startswith("--tiny: the value does not fit")

    def test_is_told_the_options(self) -> None:
        def shrink(self: Any, config: Any) -> dict[str, Any]:
            return {"rows": config.rows // 2}

        halved = type("Halved", (STAGES["rows"],), {"shrink": shrink})
        plugins = catalogue_of(stages=[Registration("rows", "rows", halved)])
        built = graph("stages:\n  a: {uses: rows, with: {rows: 8}}", tiny=True, plugins=plugins)
        assert built.nodes["a"].config.rows == 4


def test_a_broken_outputs_names_the_plugin() -> None:
    def outputs(self: Any, config: Any) -> Any:
        raise ZeroDivisionError("oops")

    broken = type("Broken", (STAGES["rows"],), {"outputs": outputs, "__module__": __name__})
    plugins = catalogue_of(
        stages=[Registration("rows", "rows", broken), Registration("train", "train", STAGES["train"])],
        losses=[Registration("margin", "margin", catalogue().load("loss", "try/margin"))],
    )
    (problem,) = problems(
        "stages:\n  a: {uses: rows}\n  b: {uses: train, inputs: {data: a.x}}", plugins=plugins
    )
    assert "`outputs` of the stage rows of memory failed at a: ZeroDivisionError: oops" in problem
    assert "test_planning_graph.py:" in problem


class TestSelection:
    def test_only_keeps_what_is_needed(self) -> None:
        built = select(graph(CHAIN), only=["sft"])
        assert (built.order, built.required) == (("chats", "sft"), frozenset())

    def test_from_requires_what_comes_before(self) -> None:
        built = select(graph(CHAIN), start=["dpo"])
        assert built.order == ("chats", "sft", "dpo", "eval")
        assert built.required == {"chats", "sft"}

    def test_both_cut_at_both_ends(self) -> None:
        built = select(graph(CHAIN), only=["dpo"], start=["sft"])
        assert (built.order, built.required) == (("chats", "sft", "dpo"), {"chats"})

    def test_a_stage_means_all_its_nodes(self) -> None:
        whole = graph(MATRIX.replace("EVALUATED", '"dpo[*]"'))
        assert len(select(whole, only=["dpo"]).order) == 6
        assert select(whole, only=["dpo[seed=0,loss.beta=0.1]"]).order[-1] == "dpo[seed=0,loss.beta=0.1]"

    def test_a_wrong_name_and_an_empty_selection_are_refused(self) -> None:
        with pytest.raises(SpecError, match="did you mean `sft`") as caught:
            select(graph(CHAIN), only=["sftt"])
        assert caught.value.where == "--only"
        with pytest.raises(SpecError, match="nothing is selected"):
            select(graph(CHAIN), only=["sft"], start=["dpo"])
