"""What can't be planned."""

import pytest

from cloze.launch import cli


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "h100"], "plan: found neither data nor train.sequence_length"),
        (["--device", "h1000"], "plan.device: found 'h1000'"),
        (
            ["--device", "h100", "--gpus", "48", "--train.sequence_length", "128"],
            "train.global_batch_size: found 256, expected a multiple of the 48 processes",
        ),
        (
            ["--device", "h100", "--gpus", "1024", "--train.sequence_length", "128"],
            "train.global_batch_size: found 256, expected a multiple of the 1024 processes",
        ),
        (
            [
                "--device",
                "t4",
                "--train.sequence_length",
                "512",
                "--train.micro_batch_size",
                "auto",
                "--model.hidden_size",
                "16384",
                "--model.num_attention_heads",
                "64",
                "--model.num_hidden_layers",
                "4",
            ],
            "needed for one sequence at zero.stage 0",
        ),
        (["--gpus", "0"], "plan.gpus: found [0], expected 1 or more"),
        (["--tokens", "0"], "tokens: found 0.0, expected above 0"),
        (
            ["--tokens", "1e9", "--train.time_budget_hours", "1", "--schedule.warmup_steps", "null"],
            "plan.tokens: found 1e+09 with train.time_budget_hours 1",
        ),
    ],
)
def test_what_cannot_be_planned_ends_in_one_line(arguments, said, capsys):
    assert cli.main(["plan", *arguments]) == 2
    *traced, error = capsys.readouterr().err.splitlines()
    assert said in error and error.startswith("error: ") and all(line.startswith("tracing ") for line in traced)
