"""How far the effect of leaving a message out is from its derivative, on the runs of ``examples/lstm_packed.py``.

Run it with ``python experiments/linearity/lstm.py``.
"""

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import leaveout as lo

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from lstm_packed import collate, numbered, texts, trained


def linearity(folder: Path, examples: int = 160, shortest: tuple[int, ...] = (1, 5, 10)) -> None:
    """Compare the effect of messages with the derivative in their weight, for several eps and with clipping or without.

    In float64, for eight messages of the first batch. "small" changes their weight by 1e-4, "whole" leaves them out.
    """
    torch.set_default_dtype(torch.float64)
    messages, labels = texts(examples, 60)
    pairs, words = numbered(messages, labels, examples)
    print("steps     eps  clipping  SGD-IE, small  SGD-IE, whole  jump, whole")
    for eps, clip in ((1e-6, 0.5), (1e-6, 1e9), (1e-3, 0.5), (1e-3, 1e9), (1e-1, 0.5), (1e-1, 1e9)):
        model = trained(folder / f"{eps}-{clip}", pairs[:examples], words, -(-16 * shortest[-1] // examples), eps, clip)
        task = lo.Task(model, nn.CrossEntropyLoss(), pairs[:examples], collate=collate, clip_norm=clip)
        run = lo.open_run(folder / f"{eps}-{clip}")
        ids = run.record(0).ids.tolist()[:8]
        for steps in shortest:
            asked = (run.head(steps), task, pairs[examples:])
            names = {"small": lo.Replay(weight=1 - 1e-4), "whole": lo.Replay(), "sgdie": lo.SGDIE(), "jump": lo.ACC()}
            found = {name: method.score(*asked, ids=ids).values.flatten() for name, method in names.items()}
            found["small"] *= 1e4
            errors = [
                float((found[a] - found[b]).norm() / found[b].norm())
                for a, b in (("sgdie", "small"), ("sgdie", "whole"), ("jump", "whole"))
            ]
            said = "by norm" if clip < 1e9 else "none"
            print(f"{steps:5} {eps:7.0e}  {said:8}  {errors[0]:13.2%}  {errors[1]:13.0%}  {errors[2]:11.1%}")


if __name__ == "__main__":
    linearity(Path(tempfile.mkdtemp(prefix="leaveout-")))
