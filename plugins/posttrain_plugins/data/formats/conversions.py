"""How rows of one canonical format become rows of another: pure functions of a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from posttrain.contracts.format import Row
from posttrain.contracts.passage import Turns
from posttrain_plugins.data.conversation import as_messages, completion_messages
from posttrain_plugins.data.formats.passages import others


def last_answer(row: Row) -> Iterable[Row]:
    """`messages`: the last assistant turn that is learned answers what stands before it; what follows is left out."""
    return _learned(row)[-1:]


def every_answer(row: Row) -> Iterable[Row]:
    """`messages`: every assistant turn that is learned answers what stands before it."""
    return _learned(row)


def every_prompt(row: Row) -> Iterable[Row]:
    """`messages`: what stands before each assistant turn, or all of it where there is none."""
    found = _answers(row) or [others(row, "messages") | {"prompt": row["messages"]}]
    return [others(each, "completion") for each in found]


def before_last_answer(row: Row) -> Iterable[Row]:
    """`messages`: what stands before the last assistant turn, or all of it where there is none."""
    return list(every_prompt(row))[-1:]


def prompt_alone(row: Row) -> Iterable[Row]:
    """Leave the prompt and what travels along."""
    dropped = ("completion", "completions", "chosen", "rejected", "label", "labels", "score", "scores")
    return (others(row, *dropped),)


def joined(row: Row) -> Iterable[Row]:
    """`prompt_completion`: prompt and completion as one conversation, of which only the completion is learned."""
    messages = [*_unlearned(as_messages(row["prompt"])), *completion_messages(row["completion"])]
    return (others(row, "prompt", "completion") | {"messages": messages},)


def chosen_alone(row: Row) -> Iterable[Row]:
    """`preference`: the better answer."""
    return (others(row, "chosen", "rejected") | {"completion": row["chosen"]},)


def chosen_joined(row: Row) -> Iterable[Row]:
    """`preference`: the conversation with the better answer."""
    return [each for chosen in chosen_alone(row) for each in joined(chosen)]


def both_sides(row: Row) -> Iterable[Row]:
    """`preference`: a good completion and a bad one."""
    rest = others(row, "chosen", "rejected")
    return tuple(
        rest | {"completion": row[side], "label": good}
        for side, good in (("chosen", True), ("rejected", False))
    )


def good_alone(row: Row) -> Iterable[Row]:
    """`unpaired_preference`: the completion, where it is good."""
    return (others(row, "label"),) if row["label"] else ()


def good_joined(row: Row) -> Iterable[Row]:
    """`unpaired_preference`: the conversation, where the completion is good."""
    return [each for good in good_alone(row) for each in joined(good)]


def score_left_out(row: Row) -> Iterable[Row]:
    """`scored`: the completion, however good it is."""
    return (others(row, "score"),)


def each_scored(row: Row) -> Iterable[Row]:
    """`ranked`: every completion with its score."""
    rest = others(row, "completions", "scores")
    pairs = zip(row["completions"], row["scores"], strict=True)
    return tuple(rest | {"completion": completion, "score": score} for completion, score in pairs)


def best_and_worst(row: Row) -> Iterable[Row]:
    """`ranked`: the first of the best completions and the first of the worst; nothing where all are as good."""
    scores, rest = row["scores"], others(row, "completions", "scores")
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    if scores[best] > scores[worst]:
        yield rest | {"chosen": row["completions"][best], "rejected": row["completions"][worst]}


def steps_together(row: Row) -> Iterable[Row]:
    """`stepwise`: the whole answer, good where every step is right (at least one half)."""
    rest = others(row, "completions", "labels")
    completion = whole(row["prompt"], row["completions"])
    yield rest | {"completion": completion, "label": all(label >= 0.5 for label in row["labels"])}


def right_steps(row: Row) -> Iterable[Row]:
    """`stepwise`: the whole answer, where every step is right."""
    return [each for together in steps_together(row) for each in good_alone(together)]


def whole(prompt: Turns, steps: Sequence[Turns]) -> Turns:
    """Return the steps of an answer as one completion: lines of one text, or turn after turn."""
    if not isinstance(steps[0], str):
        return [message for step in steps for message in as_messages(step)]
    *lines, last = map(str, steps)
    text = "".join(line if line.endswith("\n") else f"{line}\n" for line in lines) + last
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def _learned(row: Row) -> list[Row]:
    """Return the answers without those of weight 0, which no trainer would learn."""
    return [each for each in _answers(row) if each["completion"][0].get("weight") != 0]


def _answers(row: Row) -> list[Row]:
    messages, rest = row["messages"], others(row, "messages")
    return [
        rest | {"prompt": messages[:index], "completion": [message]}
        for index, message in enumerate(messages)
        if index and message["role"] == "assistant"
    ]


def _unlearned(messages: Sequence[Row]) -> list[Row]:
    """Mark the assistant turns of a prompt, which are not learned."""
    return [{**each, "weight": 0} if each["role"] == "assistant" else each for each in messages]
