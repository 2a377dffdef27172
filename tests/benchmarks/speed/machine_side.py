"""What the machine itself can do: float32 matrix products, measured in turn with the trainers."""

from __future__ import annotations

import torch
from gates import Gate

SIZE, TIMES = 2048, 4


def main() -> None:
    """Multiply as often as the driver asks."""
    gate = Gate()
    torch.set_num_threads(gate.job["threads"])
    left, right, out = torch.rand(SIZE, SIZE), torch.rand(SIZE, SIZE), torch.empty(SIZE, SIZE)
    torch.mm(left, right, out=out)
    gate.tell(operations=2 * SIZE**3 * TIMES)
    while True:
        gate.wait("product")
        for _ in range(TIMES):
            torch.mm(left, right, out=out)
        gate.done()


if __name__ == "__main__":
    main()
