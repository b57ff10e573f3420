"""Draw the losses of a run of pretraining over its tokens: python docs/draw_run.py RUN PICTURE.svg"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

from cloze.launch.run.metrics_file import read_metrics

CURVES = {
    "train/next_token_loss": "training, next tokens",
    "train/mlm_loss": "training, at its rate of masking",
    "validation/mlm_loss": "held out, 15% masked",
}


def main() -> None:
    """Curves of the training's batches and of the validation split, which is left out while next tokens are trained: it
    has masked ones."""
    run, picture = sys.argv[1:]
    lines = read_metrics(Path(run))
    tokens = {line["step"]: line["data/tokens"] / 1e6 for line in lines if "data/tokens" in line}
    begin = max((line["step"] for line in lines if "train/next_token_loss" in line), default=-1)
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, label in CURVES.items():
        points = [
            (tokens[line["step"]], line[name])
            for line in lines
            if name in line and line["step"] in tokens and (name.startswith("train") or line["step"] > begin)
        ]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set(xlabel="tokens seen, millions", ylabel="loss of a token, nats")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


if __name__ == "__main__":
    main()
