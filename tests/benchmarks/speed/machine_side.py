"""What the machine itself can do: float32 matrix products, measured in turn with the trainers."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from gates import Gate

from posttrain_plugins.training.processor import quick_products

SIZE, TIMES = 2048, 4
OPERATIONS = 2 * SIZE**3 * TIMES


def main() -> None:
    """Multiply as often as the driver asks, as torch does it and by the fastest library that stays exact."""
    gate = Gate()
    torch.set_num_threads(gate.job["threads"])
    left, right, out = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
    ways = {"product": nullcontext, "quick product": lambda: quick_products(left, SIZE**3)}
    for way in ways.values():
        with way():
            torch.mm(left, right, out=out)
    gate.tell(operations=OPERATIONS)
    while True:
        for kind, way in ways.items():
            gate.wait(kind)
            with way():
                for _ in range(TIMES):
                    torch.mm(left, right, out=out)
            gate.done()


if __name__ == "__main__":
    main()
