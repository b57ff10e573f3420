"""An own table from training to answers: its columns are remembered, and every file can be joined with it."""

import csv
import json
import re

from cloze.launch.cli import main
from tests.launch.finetune.running import finetune, lines


def test_from_a_table_to_answers(model, files, tmp_path, capsys):
    paths = []
    for path in files:
        rows = [line.split("\t") for line in path.read_text().splitlines()[1:]]
        paths.append(tmp_path / f"{path.stem}.csv")
        with open(paths[-1], "w", newline="") as file:  # as a spreadsheet of a country with decimal commas writes it
            writer = csv.writer(file, delimiter=";")
            writer.writerow(("number", "review", "verdict"))
            writer.writerows(
                (f"r{n}", text.replace(" ", "\n", 1), ("bad", "good")[int(label)])
                for n, (text, label) in enumerate(rows)
            )
    output = tmp_path / "run"
    _, said = finetune(
        "classification",
        model,
        *paths,
        output,
        "--text_columns",
        "review",
        "--label_columns",
        "verdict",
        "--train.max_steps",
        12,
    )
    with open(paths[1], newline="") as file:
        table = list(csv.DictReader(file, delimiter=";"))
    predictions = lines(output / "predictions" / "validation.jsonl")
    assert [{name: each[name] for name in table[0]} for each in predictions] == table
    assert predictions[1]["place"] == "row 3 (line 5)"  # the header is row 1; each record has two lines
    assert "12 = " in said and said.count(" peak, ") == 1, "the rate is said once"
    assert re.search(r"the peak (as given|by the model's size)", re.sub(r"[│\s]+", " ", said))
    last = said.strip().splitlines()[-5:]
    assert [line.split()[0] for line in last] == ["model", "results", "mistakes", "confusion", "next"]
    assert last[-1].endswith(f'cloze predict classify {output} "TEXT"')

    capsys.readouterr()
    assert main(["predict", "classify", str(output), "--file", str(paths[1]), "--format", "json"]) == 0
    asked = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["number"] for each in asked] == [row["number"] for row in table]
    assert [each["labels"][0]["label"] for each in asked] == [each["prediction"] for each in predictions]
