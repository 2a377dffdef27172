"""Checks of gradients: against finite differences, in the promised direction, and none where nothing is learned."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from posttrain.contracts.loss import Family
from posttrain_plugins.testing.draws import Draw
from posttrain_plugins.testing.losses.subject import LossSubject, Monotone
from posttrain_plugins.testing.stepping import reduced

__tracebackhide__ = True

_PROMISED: Mapping[Monotone | None, tuple[int, int]] = {
    Monotone.MARGIN: (-1, 1),
    Monotone.BETTER: (0, 1),
    Monotone.WORSE: (-1, 0),
    None: (0, 0),
}
"""Which directions count: from less of worse answers, −1, to more of better ones, 1."""
_ROUNDING = 1e-9
"""Slopes of this size, relative to the largest, are rounding."""


def gradcheck(subject: LossSubject) -> None:
    """Gradients in float64 are those of finite differences, token by token, with `stats` and `state` held fixed."""
    drawn = subject.draw(seed=5, examples=3)
    taken = subject.take(drawn)
    _, leaves = drawn.with_leaves()

    def total(*values: Tensor) -> Tensor:
        moved = drawn.with_tokens(**dict(zip(drawn.learned, values, strict=True)))
        output = subject.plugin(moved.batch(), subject.config, taken.stats, taken.state)
        return reduced(output, moved.part())

    try:
        torch.autograd.gradcheck(total, leaves, eps=1e-6, atol=1e-6, rtol=1e-4)
    except GradcheckError as error:
        told = " ".join(str(error).split())
        raise subject.refuse(f"its gradient is not that of finite differences: {told:.400}") from error


def proportion(subject: LossSubject) -> None:
    """Rows of twice the weight have twice the loss."""
    drawn = subject.draw(seed=6, examples=5)
    once = subject.take(drawn).total.item()
    twice = subject.take(drawn.with_rows(weight=2 * drawn.rows["weight"])).total.item()
    if abs(twice - 2 * once) > 1e-9 * max(1.0, abs(once)):
        raise subject.refuse(
            f"with every weight doubled the loss is {twice} and not {2 * once}; the row's weight multiplies its values"
        )


def weightless(subject: LossSubject) -> None:
    """A row of weight 0 has no gradient."""
    drawn, here = _with_weightless(subject)
    _, found = subject.slopes(drawn)
    for name, slope in zip(drawn.learned, found, strict=True):
        if bool((slope[here] != 0).any()):
            raise subject.refuse(
                f"a row of weight 0 has a gradient of up to {float(slope[here].abs().max()):.3g} in `{name}`; "
                "the row's weight multiplies its values"
            )


def absence(subject: LossSubject) -> None:
    """The numbers of a row of weight 0 change nothing: neither the loss nor the gradient of another row."""
    drawn, here = _with_weightless(subject)
    taken, found = subject.slopes(drawn)
    other, moved = subject.slopes(_with_others(drawn, here))
    change = abs(taken.total.item() - other.total.item())
    if change > 1e-12 * max(1.0, abs(taken.total.item())):
        raise subject.refuse(f"numbers of a row of weight 0 change the loss by {change:.3g}")
    for name, one, two in zip(drawn.learned, found, moved, strict=True):
        if not torch.allclose(one, two, rtol=1e-9, atol=1e-12):
            raise subject.refuse(
                f"numbers of a row of weight 0 change the gradient of other rows in `{name}`"
            )


def _with_weightless(subject: LossSubject) -> tuple[Draw, Tensor]:
    """Return a step with a row of weight 0, and which tokens are that row's."""
    drawn = subject.draw(seed=6, examples=5)
    weight = drawn.rows["weight"].clone()
    weight[1] = 0
    return drawn.with_rows(weight=weight), drawn.owner[drawn.sequence] == 1


def _with_others(drawn: Draw, here: Tensor) -> Draw:
    """Return the same rows, with other numbers of the policy and the reference where `here` is true."""
    columns = ("logp", "reference", "value", "entropy", "squares", "mean_logp")
    scales = dict(zip(columns, (1.7, 0.6, -1.3, 0.5, 0.5, 1.5), strict=True))
    rows = torch.zeros(drawn.size, dtype=torch.bool).index_fill(0, drawn.owner[drawn.sequence[here]], True)
    other = torch.where(rows, drawn.rows["mismatched"] * 0.5, drawn.rows["mismatched"])
    return drawn.with_rows(mismatched=other).with_tokens(
        **{
            name: torch.where(here, drawn.tokens[name] * scale, drawn.tokens[name])
            for name, scale in scales.items()
        }
    )


def isolation(subject: LossSubject) -> None:
    """With `stats` and `state` held fixed, the values of a row do not depend on the numbers of another."""
    drawn = subject.draw(seed=7)
    taken = subject.take(drawn)
    moved = _with_others(drawn, drawn.owner[drawn.sequence] == 1)
    output = subject.plugin(moved.batch(), subject.config, taken.stats, taken.state)
    for number, (one, two) in enumerate(zip(taken.outputs[0].terms, output.terms, strict=True)):
        owner = drawn.belongs(one.values)
        if owner is not None and not torch.equal(one.values[owner != 1], two.values[owner != 1]):
            raise subject.refuse(
                f"values of term {number} depend on the numbers of another row; declare `scope = Scope.STEP` for a "
                "loss that mixes examples, or take what it needs of the whole step from `measure`"
            )


def monotone(subject: LossSubject) -> None:
    """The loss does not rise where a better answer becomes likelier, or a worse one less so, as was promised."""
    for seed in range(8, 12):
        drawn = subject.draw(seed, examples=6)
        _, found = subject.slopes(_spread(drawn, seed))
        slope = found[0]
        direction = _better(drawn).clamp(*_PROMISED[subject.monotone])
        rising = slope * direction
        worst = int(rising.argmax())
        if float(rising[worst]) > _ROUNDING * max(1.0, float(slope.abs().max())):
            way = (
                "a better answer becomes likelier"
                if direction[worst] > 0
                else "a worse answer becomes less likely"
            )
            raise subject.refuse(
                f"it rises where {way}: the slope is {float(slope[worst]):.3g} at token {worst}"
            )


def _spread(drawn: Draw, seed: int) -> Draw:
    """Return the same rows with numbers of very different sizes."""
    source = torch.Generator().manual_seed(seed)
    size = len(drawn.sequence)
    stretch = 16.0 ** (seed % 4 - 1) * torch.rand(size, generator=source, dtype=torch.float64)
    return drawn.with_tokens(**{name: drawn.tokens[name] * stretch for name in ("logp", "value")})


def _better(drawn: Draw) -> Tensor:
    """Return for every token 1 where the policy should give more, −1 where less, and 0 where nothing is promised."""
    if drawn.family is Family.PROCESS_REWARD:
        return (2 * drawn.tokens["label"] - 1).sign() * (drawn.tokens["label"] % 1 == 0)
    signs = {
        Family.TOKEN: _every,
        Family.PREFERENCE: _by_answer,
        Family.THREE_WAY: _by_answer,
        Family.UNPAIRED: _by_label,
        Family.REWARD: _by_score,
    }[drawn.family](drawn)
    return signs[drawn.sequence]


def _every(drawn: Draw) -> Tensor:
    return torch.ones(len(drawn.owner), dtype=torch.float64)


def _by_answer(drawn: Draw) -> Tensor:
    """The rejected answer is the second one; a gold answer is a good one."""
    return torch.where(drawn.answer == 1, -1.0, 1.0).double()


def _by_label(drawn: Draw) -> Tensor:
    signs = torch.where(drawn.rows["desirable"][drawn.owner], 1.0, -1.0).double()
    return signs * (drawn.answer == 0)


def _by_score(drawn: Draw) -> Tensor:
    """The best answer of each row, and its worst."""
    scores, signs = drawn.sequences["score"], torch.zeros(len(drawn.owner), dtype=torch.float64)
    for row in range(drawn.size):
        here = (drawn.owner == row).nonzero()[:, 0]
        signs[here[scores[here].argmax()]] = 1
        signs[here[scores[here].argmin()]] = -1
    return signs
