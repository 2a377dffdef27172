"""Twenty runs of the tiny pipeline, each killed once at a random moment and resumed: `docs/evidence/kills.md`.

`python -m tests.evidence kills [COUNT]`
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ledger
from helpers.kills import Moment, Reference, Story, disturbed
from helpers.products import NODES, Product

COUNT = 20

ABOUT = """\
The tiny pipeline of `tests/helpers/products.py` (all stages of the quickstart) is run once undisturbed. Then it is run
again in an empty workspace, SIGKILL goes to the stage's worker or to the parent at a moment drawn from the seed, and
`posttrain resume` goes on until the run is completed. (A parent that dies after the last stage leaves a completed run;
`posttrain sync` then tells MLflow of it.) Afterwards these must hold:

- the digests of all outputs of all stages are those of the undisturbed run;
- no object was ever visible in the store before it was complete (looked at every 10 ms);
- `posttrain store verify --full` finds nothing, and `posttrain store gc --delete` leaves no scratch and no work;
- no process is left;
- MLflow has one finished run for each stage, and each step of each metric once.
"""

LEGEND = """\
Moment: seconds after the start of the victim (the stage's worker, or the stage when the parent was killed), and the
share of its time in the undisturbed run. A worker that had ended by then is followed by the next one, of the stage in
brackets. Exit codes: of `run`, then of each `resume`; −9 is the killed parent, 1 a run whose worker was killed, 0
completed."""


def main() -> int:
    """Kill, resume, compare, and write the page; 1 when something was lost."""
    count = int(sys.argv[1]) if sys.argv[1:] else COUNT
    with tempfile.TemporaryDirectory(prefix="kills-") as directory:
        reference = Reference.of(Product.tiny(_made(Path(directory) / "reference")))
        stories = []
        for seed in range(count):
            moment = Moment.drawn(seed, stages=(NODES[seed % len(NODES)],))
            story = disturbed(Product.tiny(_made(Path(directory) / str(seed))), moment, reference)
            stories.append(story)
            print(_row(story, reference), *story.problems, flush=True)
    command = "python -m tests.evidence kills" + (f" {count}" if sys.argv[1:] else "")
    data = {
        "undisturbed": {"seconds": reference.seconds, "outputs": reference.outputs},
        "kills": [story.as_dict() for story in stories],
    }
    ledger.write("kills", "Killed at random moments", command, _page(stories, reference), data)
    return int(not all(map(_sound, stories)))


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _sound(story: Story) -> bool:
    return story.equal and not story.problems


def _page(stories: Sequence[Story], reference: Reference) -> list[str]:
    return [
        *ABOUT.splitlines(),
        "",
        f"**{sum(map(_sound, stories))} of {len(stories)} kills: all of this held.**",
        "",
        "| seed | stage | killed | moment | exit codes | digests equal | problems |",
        "|---|---|---|---|---|---|---|",
        *(_row(story, reference) for story in stories),
        "",
        *LEGEND.splitlines(),
    ]


def _row(story: Story, reference: Reference) -> str:
    moment = story.moment
    late = f" ({story.stage})" if story.stage != moment.stage else ""
    cells = [
        str(moment.seed),
        moment.stage + late,
        moment.victim,
        f"{reference.delay(moment):.2f} s ({moment.share:.0%})",
        ", ".join(map(str, story.codes)).replace("-", "−"),
        "yes" if story.equal else "**no**",
        str(len(story.problems)) if story.problems else "none",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
