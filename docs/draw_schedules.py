"""Draw every schedule, by the functions that training uses: `python docs/draw_schedules.py` writes docs/schedules.svg.

Needs matplotlib: pip install -e '.[pictures]'.
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  (after the backend is chosen)

from cloze.launch.config import ScheduleConfig  # noqa: E402
from cloze.launch.training.schedules import multiplier  # noqa: E402

STEPS = 1000
# Title, schedules by label. Constants are those of the recipes where there is one.
PANELS = {
    "linear, cosine, constant": {
        "linear": ScheduleConfig(name="linear", warmup_share=0.06),
        "cosine": ScheduleConfig(name="cosine", warmup_share=0.06),
        "constant": ScheduleConfig(name="constant", warmup_share=0.06),
    },
    "polynomial and poly_nvidia, power .5, warmup .2843": {
        "polynomial": ScheduleConfig(name="polynomial", warmup_share=0.2843),
        "poly_nvidia": ScheduleConfig(name="poly_nvidia", warmup_share=0.2843),
    },
    "inverse_sqrt, exponential": {
        "inverse_sqrt": ScheduleConfig(name="inverse_sqrt", warmup_share=0.06),
        "exponential, x .9 every 33 of 1,000": ScheduleConfig(name="exponential", warmup_share=0.06, factor_steps=33),
    },
    "wsd, decay_share .2": {
        "decay_shape linear": ScheduleConfig(name="wsd", warmup_share=0.06, decay_share=0.2),
        "decay_shape sqrt": ScheduleConfig(name="wsd", warmup_share=0.06, decay_share=0.2, decay_shape="sqrt"),
    },
    "final_share .1, initial_share .25": {
        "the BERT release's phase 1: poly_nvidia, power 1": ScheduleConfig(
            name="poly_nvidia", power=1.0, warmup_share=0.011, final_share=0.1
        ),
        "crammed: linear, warmup .75": ScheduleConfig(name="linear", warmup_share=0.75, initial_share=0.25),
    },
}


def main() -> None:
    plt.rcParams |= {"svg.hashsalt": "cloze", "svg.fonttype": "none"}  # the same bytes each time; text as text
    figure, axes = plt.subplots(len(PANELS), 1, figsize=(7, 10), sharex=True, sharey=True, layout="constrained")
    for axis, (title, schedules) in zip(axes, PANELS.items(), strict=True):
        for label, config in schedules.items():
            axis.plot(
                range(0, STEPS + 1, 4),
                [multiplier(config, step, STEPS) for step in range(0, STEPS + 1, 4)],
                label=label,
                linewidth=1.5,
            )
        axis.set_title(title, fontsize=9, loc="left")
        axis.legend(fontsize=8, frameon=False, loc="lower center")
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step, of 1,000 (or share of the time budget)")
    figure.supylabel("share of train.learning_rate", fontsize=9)
    figure.savefig(Path(__file__).with_name("schedules.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
