"""What the benchmarks print beside their figures: commands that run the contenders, with their variables."""

import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers

from cloze.model.bert import BertForPreTraining
from cloze.model.tasks import BertForMaskedLM
from cloze.pipeline.shards.manifest import Manifest
from tests.hostile_files import judge
from tests.launch.evaluate.plain_scores import BAD, GOOD, plain_score
from tests.launch.finetune.small import write_tsv
from tests.launch.tiny_models import save_model, tokenizer
from tests.launching import ROOT
from tests.pipeline import corpus
from tests.synthetic import make_shards


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark by its name, run with some arguments and what it measures with replaced."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def run(name: str, *arguments: str, **replaced):
        module = __import__(name)
        for target, value in replaced.items():
            monkeypatch.setattr(module, target, value)
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *arguments])
        return module.main()

    return run


def taken(names) -> dict[str, float]:
    return {name: 1.0 if name.startswith("cloze") else 2.0 for name in names}


def test_a_training_step_is_measured_on_all_devices(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    replaced = {
        "hardware": lambda device: f"a {device}",
        "matmul_peak": lambda *_: 1e12,
        "useful_flops": lambda *_: (1e11, 1e4),
        "measure": lambda *arguments: taken(arguments[4]),
    }
    benchmark("training_step", "--quick", **replaced)
    printed = capsys.readouterr().out
    assert "a cuda" in printed and "a cpu" not in printed, "both would take too long"
    benchmark("training_step", "--json", str(tmp_path / "figures"), **replaced)
    printed = capsys.readouterr().out
    assert "a cpu, 1 threads" in printed and "a cuda, 1 threads" in printed and "transformers 5" in printed
    assert "  MALLOC_MMAP_THRESHOLD_=4294967296 " in printed and " --device cuda " in printed
    names = ("ratio_to_transformers_default_128", "ratio_to_transformers_best_128", "share_of_matmul_peak")
    expected = {name + suffix: 0.1 if "share" in name else 2.0 for name in names for suffix in ("", "_cuda")}
    assert expected.items() <= json.loads((tmp_path / "figures").read_text()).items()


def test_a_training_step_is_measured_where_its_workload_is(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    replaced = {
        "hardware": lambda device: f"a {device}",
        "matmul_peak": lambda *_: 1e12,
        "useful_flops": lambda *_: (1e11, 1e4),
        "measure": lambda *arguments: taken(arguments[4]),
    }
    benchmark("training_step", "--workload", "BERT-large, 512", **replaced)
    printed = capsys.readouterr().out
    assert "a cuda" in printed and "a cpu" not in printed
    with pytest.raises(SystemExit, match="expected one of .*'cpu'"):
        benchmark("training_step", "--workload", "none", **replaced)


@pytest.mark.parametrize("shape", ["small", "modern"])
def test_both_contenders_of_a_step_have_the_same_model_and_tokens(monkeypatch, shape):
    """Counts of the peers' weights; losses over the same tokens, at random weights of four layers."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import synthetic_batches
    from synthetic_batches import SHAPES, build, concatenate, make_batch, peer, shape_of

    def count(model: torch.nn.Module) -> int:
        return sum(each.numel() for each in model.parameters())

    sizes = (shape, 512, 32)
    with torch.device("meta"):
        whole = (BertForPreTraining if shape in SHAPES else BertForMaskedLM)(shape_of(*sizes))
        assert count(whole) == count(peer(*sizes, "sdpa"))
    fewer = replace(shape_of(*sizes), num_hidden_layers=4)
    monkeypatch.setattr(synthetic_batches, "shape_of", lambda *_: fewer)
    small = partial(transformers.ModernBertConfig, num_hidden_layers=4)
    monkeypatch.setattr(
        "transformers.ModernBertConfig", small
    )  # by name: the module is another one since its first use
    ours = build("cloze", {}, *sizes, "cpu")
    theirs = build("transformers", {"attention": "sdpa"}, *sizes, "cpu")
    assert ours.config == fewer and count(ours) == count(theirs)
    batch = make_batch(512, 32, 0.5, 4, seed=0, pairs=shape in SHAPES)
    flat = concatenate(batch)
    assert len(flat["input_ids"]) == batch["attention_mask"].sum() and (batch["labels"] != -100).any()
    assert ours(**flat).loss.item() == pytest.approx(theirs(**batch).loss.item(), rel=0.1)


def test_contenders_of_fine_tuning_are_named(benchmark, capsys):
    benchmark(
        "finetuning",
        "--quick",
        "--device",
        "cpu",
        sentences=lambda *_: [],
        make_model=lambda *_: None,
        measure=lambda *arguments: taken(arguments[5]),
    )
    printed = capsys.readouterr().out
    assert " TOKENIZERS_PARALLELISM=false " in printed and "--worker 'transformers Trainer, its defaults'" in printed
    assert "'attention': 'eager'" in printed and "transformers 5" in printed


def test_planning_a_run_takes_little_memory_however_large_it_is(tmp_path):
    """The benchmark of 2 × 10¹² tokens on a hundredth of them, with a round of exchange: counts of 30,522 words for
    each shard would take 120 MB alone."""
    command = [sys.executable, "benchmarks/planning.py", "--tokens", "2e10", "--target_tokens", str(1 << 24)]
    subprocess.run([*command, "--json", str(tmp_path / "figures")], cwd=ROOT, check=True, capture_output=True)
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["rounds"] == 1 and figures["tasks"] == 7 * figures["files"] and figures["shards"] > 900
    assert figures["parent_bytes"] - figures["parent_bytes_at_first"] < 60 << 20


def test_peers_of_preparing_and_loading_are_named(benchmark, monkeypatch, capsys):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")  # which the benchmark sets for itself
    benchmark("prepare", "--quick", made_corpus=lambda *_: ["file"], run=lambda *_: None)
    printed = capsys.readouterr().out
    assert "TOKENIZERS_PARALLELISM=false python" in printed and "benchmarks/prepare.py --quick" in printed
    assert "tokenizers 0." in printed and "datasets " in printed
    benchmark(
        "loading",
        "--quick",
        make_shards=lambda *_, **__: ROOT,
        first_batch=lambda *_, **__: 0.0,
        timed=lambda *_: 1e6,
        ShardReader=lambda _: SimpleNamespace(num_samples=1, manifest=SimpleNamespace(max_length=128)),
    )
    printed = capsys.readouterr().out
    assert "benchmarks/loading.py --quick\n" in printed and "datasets " in printed.splitlines()[1]


def test_curves_are_compared_at_equal_tokens_and_at_equal_loss(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from pretraining_curves import compare

    def curve(seconds, *losses):
        return [{"seconds": seconds * number, "tokens": number, "loss": loss} for number, loss in enumerate(losses, 1)]

    found = compare(
        {"cloze pretrain": curve(10, 5.0, 3.0, 2.0), "slow": curve(40, 5.0, 4.0, 2.5), "fast": curve(20, 6.0, 5.0, 4.0)}
    )
    assert found == {
        "loss_difference_at_equal_tokens": -0.5,
        "time_ratio_at_equal_tokens": 2.0,
        "time_ratio_to_their_last_loss": pytest.approx(120 / 25),
    }


def test_curves_of_other_batches_are_refused(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from pretraining_curves import check_batches

    ours = [{"step": 2, "tokens": 70, "loss": 5.0}, {"step": 4, "tokens": 150, "loss": 4.0}]
    check_batches({"cloze pretrain": ours, "other": [{**point, "loss": 6.0} for point in ours]})
    for theirs in (ours[:1], [ours[0], {**ours[1], "tokens": 151}]):
        with pytest.raises(SystemExit, match="other: found other steps and tokens .*expected the same batches"):
            check_batches({"cloze pretrain": ours, "other": theirs})


def test_text_for_the_curves_is_prepared_once(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import pretraining_curves

    monkeypatch.setattr(pretraining_curves, "found_text", lambda: corpus.documents(300))
    data = pretraining_curves.prepare_text(None, tmp_path)
    manifest = Manifest.load(data)
    assert manifest.mask_sets == 0 and manifest.splits["validation"].counts["samples"]
    monkeypatch.setattr(pretraining_curves.subprocess, "run", None)
    assert pretraining_curves.prepare_text(None, tmp_path) == data


@pytest.mark.parametrize(
    ("status", "output", "same", "lost"),
    [
        (2, "reading\nerror: a.gz: broken\n", None, None),
        (0, "done\n", True, None),
        (None, "", None, "still there"),
        (0, "done\n", False, "another result"),
        (1, "Traceback (most recent call last):\n", None, "traceback"),
        (2, "error: one\nerror: two\n", None, "2 lines of errors"),
        (1, "error: one\n", None, "status 1"),
    ],
)
def test_what_is_lost_in_an_attack(status, output, same, lost):
    found = judge(status, output, lambda: same)
    assert found is None if lost is None else lost in found


def test_an_attack_that_loses_something_ends_with_1_and_repeats_no_part(benchmark, tmp_path, capsys):
    asked, figures = [], tmp_path / "figures"

    def kill(folder, count, seed):
        asked.append((count, seed))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return {
            "kills": count,
            "by moment": {"while saving": count - 1},
            "slowest": count / 2,
            "lost": ["the run: it hangs"] * (count == 5),
        }

    none = ("--files", "0", "--disturbed", "0", "--states", "0", "--values", "0", "--tables", "0", "--requests", "0")
    command = ("attack", "--kills", "35", *none, "--seed", "7", "--json", str(figures))
    with pytest.raises(KeyboardInterrupt):
        benchmark(*command, kill=kill)
    assert benchmark(*command, kill=kill) == 1
    assert asked == [(15, 7), (15, 8), (15, 8), (5, 9)], "the first part stood in the file"
    told = json.loads(figures.read_text())
    assert told["lost"] == 1 and told["training"] | {"seconds": 0} == {
        "kills": 35,
        "by moment": {"while saving": 32},
        "slowest": 7.5,
        "lost": ["the run: it hangs"],
        "seconds": 0,
    }
    said = capsys.readouterr().out
    assert (
        "kills 35, lost 1, tracebacks 0, hangs 0, crashes 0\nhostile files: none was made" in said
        and "lost 1; seed 7" in said
    )
    with pytest.raises(SystemExit, match="found figures of seed 7"):
        benchmark(*command, "--kills", "30", kill=kill)


@pytest.mark.slow
def test_a_small_attack_loses_nothing(tmp_path):
    command = [
        sys.executable,
        "benchmarks/attack.py",
        "--kills",
        "0",
        "--files",
        "6",
        "--disturbed",  # test_full_disks.py
        "0",
        "--states",  # launch/checkpoint/test_hostile_states.py
        "0",
        "--values",
        "100",
        "--tables",
        "300",
        "--requests",
        "30",
        "--connections",
        "40",
        "--json",
        str(tmp_path / "figures"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["files"]["files"] == 6 and figures["serving"]["requests"] >= 33 and figures["lost"] == 0
    assert figures["values"]["values"] == 100 and figures["tables"]["tables"] == 300


STUBS = {
    "fine": (0, "import json, sys; json.dump({'ratio_to_x': 2.5, 'parts': {'ratio_y': 0.5}}, open(sys.argv[1], 'w'))"),
    "broken": (7, "import sys; print('it broke'); sys.exit(7)"),
    "slow": (None, "import time; time.sleep(60)"),
}


def test_all_benchmarks_make_one_report_that_names_what_failed(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import run_all

    table = {
        name: run_all.Entry(f"Is it {name}?", ("-c", code, "FIGURES"), 1 if status is None else 30, bars=("ratio*",))
        for name, (status, code) in STUBS.items()
    }
    table["gpu"] = run_all.Entry("A GPU?", (), 1, gpu=True)
    replaced = {"TABLE": table, "has_gpu": lambda: False, "filled": lambda entry, *_: list(entry.arguments)}
    assert benchmark("run_all", "--output", str(tmp_path), **replaced) == 1
    assert "1 of 3 done" in (printed := capsys.readouterr().out) and "failed: broken, slow\n" in printed
    report = (tmp_path / "report.md").read_text()
    for line in (
        "| [fine](#fine) | Is it fine? | done |",
        "| Is it broken? | FAILED: status 7 |",
        "it broke",
        "| Is it slow? | FAILED: out of time |",
        "| gpu | A GPU? | left out: no GPU |",
        "![fine](fine.svg)",
        "| ratio_to_x | 2.5 |",
        "| parts: ratio_y | 0.5 |",
        "- commit: ",
        "- hardware: ",
        "- versions: Python 3.",
    ):
        assert line in report, line
    found = json.loads((tmp_path / "report.json").read_text())
    assert {name: each["status"] for name, each in found["benchmarks"].items()} == {
        name: status for name, (status, _) in STUBS.items()
    }
    assert found["benchmarks"]["fine"]["figures"]["ratio_to_x"] == 2.5
    picture = (tmp_path / "fine.svg").read_text()
    assert "<svg" in picture and not (tmp_path / "broken.svg").exists()
    monkeypatch.setattr("run_all.MINUTES", 0)
    assert benchmark("run_all", "--only", "fine", "--output", str(tmp_path / "late"), **replaced) == 1
    assert "no time was left for it" in (tmp_path / "late" / "report.md").read_text()


def test_every_benchmark_is_in_the_table_with_flags_that_it_has(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from run_all import TABLE, filled

    scripts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    helpers = {"run_all.py", "evidence_transformers.py", "synthetic_batches.py"}
    helpers |= {"planned_and_measured.py", "qkv_gradients.py"}  # parts of gpu.py
    scripts["against_run_mlm.py"] += scripts["compute_curve.py"]  # whose arguments it has
    assert {entry.arguments[0] for entry in TABLE.values()} == scripts.keys() - helpers
    for name, entry in TABLE.items():
        for data in (None, ROOT):
            script, *words = filled(entry, ROOT, ROOT, data)
            for word in words:
                known = not word.startswith("--") or f'"{word}"' in scripts[script.removeprefix("benchmarks/")]
                assert known and "{" not in word, (name, word)


def test_what_stands_in_for_a_task_has_its_form(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import run_all

    texts = [f"One {n} is one. Two {n} are two. Three {n} too." for n in range(9)]
    monkeypatch.setattr("run_all.found_text", lambda: texts)
    run_all.make_pairs(tmp_path)
    for name, count in run_all.PAIRS.items():
        header, *rows = [line.split("\t") for line in (tmp_path / "rte" / f"{name}.tsv").read_text().splitlines()]
        assert header == ["index", "sentence1", "sentence2", "label"] and len(rows) == count
        assert {row[3] for row in rows} == {"entailment", "not_entailment"}
        assert all((row[2] in row[1]) == (row[3] == "entailment") for row in rows)


def test_ngrams_have_the_probabilities_of_their_formula(monkeypatch):
    """Interpolated Kneser-Ney, written out with sets and dictionaries."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from ngram_baseline import KneserNey

    generator = np.random.default_rng(0)
    text = [generator.integers(1, 6, size).tolist() for size in generator.integers(1, 9, 40)]
    words, order = 8, 3  # 6 and 7 are in no sequence
    places = [tuple([0, 0, *each][end - order : end]) for each in text for end in range(order, len(each) + order)]
    counts = {order: Counter(places)}
    for n in (2, 1):
        counts[n] = Counter(longer[1:] for longer in counts[n + 1])

    def probability(gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / (words - 1)
        own = counts[len(gram)]
        size = Counter(own.values())
        discount = (size[1] + 1) / (size[1] + 2 * size[2] + 2)
        same = {each: count for each, count in own.items() if each[:-1] == gram[:-1]}
        total, shorter = sum(same.values()), probability(gram[1:])
        if not same:
            return shorter
        return max(own[gram] - discount, 0) / total + discount * len(same) / total * shorter

    model = KneserNey(text, words, order)
    for sequence in ([1, 2, 3], [5, 5, 5, 5], [4, 7, 1, 2], [6, 6]):
        whole = [0, 0, *sequence]
        expected = sum(math.log(probability(tuple(whole[end - 3 : end]))) for end in range(3, len(whole) + 1))
        assert model.log_probabilities([[1], sequence])[1] == pytest.approx(expected, rel=1e-12)
    each = np.exp(
        model.log_probabilities([[1, 2, word] for word in range(1, words)]) - model.log_probabilities([[1, 2]])
    )
    assert each.sum() == pytest.approx(1, rel=1e-12)


def test_objectives_are_compared_at_equal_flops(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import objectives

    called = []
    replaced = {
        "prepare_text": lambda *_: None,
        "cloze": lambda *words: called.append(words) or 60.0,
        "steps_for": lambda words, flops: (len(words), 10.0),
        "held_out_loss": lambda run, pairs: 2.5,
    }
    (tmp_path / "results.md").write_text("before\n<!-- objectives -->\nold\n<!-- /objectives -->\nbehind\n")
    for _ in range(2):  # the second finds all done
        benchmark("objectives", "--size", "tiny", "--output", str(tmp_path), "--page", str(tmp_path), **replaced)
    assert len(called) == len(objectives.CONTENDERS) == 6
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("before\n<!-- objectives -->\n| objective | steps |") and page.endswith("-->\nbehind\n")
    assert "| masked tokens | " in page and " M | 1.0 | 2.500 |" in page and "old" not in page
    shown = {
        "masked": {
            "steps": 2,
            "tokens": 4e6,
            "cpu_seconds": 30,
            "loss": None,
            "tasks": {"SST-2": [0.5, 0.7], "SICK relatedness": [0.25]},
        }
    }
    size = objectives.Size(1, 1, 1.0, ("SST-2", "SICK relatedness"), 2)
    assert objectives.table(shown, size).splitlines()[-1] == "| masked | 2 | 4.00 M | 0.5 | – | 0.600 ± 0.141 | 0.250 |"
    with pytest.raises(SystemExit):
        benchmark("objectives", "--size", "medium", "--output", str(tmp_path))
    assert "size medium fine-tunes" in capsys.readouterr().err
    shown["masked"]["vectors"] = 0.5
    assert "| – | 0.500 | 0.600 ± 0.141 | 0.250 |" in objectives.table(shown, size)


def test_vectors_of_the_compared_objectives_are_measured_on_sick(monkeypatch, tmp_path):
    """Texts that are the same are nearest: the correlation of two rows is 1, or -1 by scores that say the opposite."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import objectives

    model = save_model(tmp_path / "model")
    (tmp_path / "sick").mkdir()
    for scores, expected in (((5, 1), 1), ((1, 5), -1)):
        rows = [("1", "a cat", "a cat", scores[0], "NEUTRAL"), ("2", "a cat", "the dog", scores[1], "NEUTRAL")]
        write_tsv(
            tmp_path / "sick/test.tsv",
            ("pair_ID", "sentence_A", "sentence_B", "relatedness_score", "entailment_judgment"),
            rows,
        )
        assert objectives.similarity(model, tmp_path) == pytest.approx(expected)
        assert objectives.similarity(model, tmp_path, drawn=True) == pytest.approx(expected)


def test_the_steps_of_an_objective_follow_from_its_flops(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import objectives

    make_shards(tmp_path / "tiny/single", mask_sets=0, pairs=False)
    size = objectives.SIZES["tiny"]
    found = {
        name: objectives.steps_for(objectives.command(name, size, tmp_path / "tiny"), 1e11)
        for name in ("masked", "span-boundary", "replaced-tokens")
    }
    steps = {name: steps for name, (steps, _) in found.items()}
    # Of the same batches: the second term takes 4 H² + H V more for a masked token, ELECTRA a second encoder and no
    # vocabulary in its own.
    assert steps["masked"] > steps["span-boundary"] > steps["replaced-tokens"] > steps["masked"] / 4
    assert len({tokens for _, tokens in found.values()}) == 1


def test_the_held_out_loss_of_an_objective_is_its_last(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import objectives

    lines = [
        {"step": 0, "validation/mlm_loss": 9.0, "validation/mlm_loss/single": 8.0},
        {"step": 1, "train/loss": 3.0},
        {"step": 2, "validation/mlm_loss": 7.0, "validation/mlm_loss/single": 6.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for objective, pairs, expected in (("masked", False, 7.0), ("masked", True, 6.0), ("replaced_tokens", False, None)):
        (tmp_path / "config.yaml").write_text(f"objective: {objective}\n")
        assert objectives.held_out_loss(tmp_path, pairs) == expected


def test_ways_of_adapting_are_compared_over_seeds(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import adapting

    called = []

    def run(*words: str) -> float:
        called.append(words)
        if words[0] == "evaluate":
            found = {"log_likelihood_per_character": -2.0 - 0.1 * ("random" in words[1]), "tokens": 300}
            Path(words[-1]).write_text(json.dumps(found))
        if words[0] == "finetune":
            folder = Path(words[words.index("--output") + 1])
            folder.mkdir(parents=True)
            accuracy = int(words[words.index("--seed") + 1]) / 10
            (folder / "results.json").write_text(json.dumps({"validation": {"accuracy": accuracy}}))
        return 60.0

    page = tmp_path / "page"
    page.mkdir()
    (page / "adapt.md").write_text("before\n<!-- adapting -->\nold\n<!-- /adapting -->\nbehind\n")
    sizes = {"quick": replace(adapting.SIZES["quick"], seeds=2, vocabulary=8192, added=4096, steps=100)}
    replaced = {"run": run, "import_once": lambda: None, "SIZES": sizes}
    for _ in range(2):  # the second finds all runs done
        benchmark("adapting", "--quick", "--output", str(tmp_path), "--page", str(page), **replaced)
        counts = {name: sum(words[0] == name for words in called) for name in ("pretrain", "evaluate", "finetune")}
        assert counts == {"pretrain": 1 + 6 * 2, "evaluate": 2 * (1 + 6 * 2), "finetune": 7 * 2}
    text = (page / "adapt.md").read_text()
    assert (
        text.startswith("before\n<!-- adapting -->\n| way |") and text.endswith("-->\nbehind\n") and "old" not in text
    )
    # In GFLOPs of a step: 0.65 for the encoder's matrices, 0.10 for attention, 1.30 for 8,192 entries, 1.94 for 12,288.
    assert "| with replay | 100 | 60 |" in text and "| words added, rows `mean`, with replay | 76 | 60 |" in text
    assert "| vocabulary of the new text, `transplant`, with replay | 100 | 60 |" in text
    assert "rows `random`, with replay | **−0.100** | **−0.100** | +0.000 (noise) |" in text
    results = json.loads((page / "adapt.json").read_text())
    assert [each["accuracy"] for each in results["ways"]["mean"]] == [0.1, 0.2]
    drawn = (page / "adapt.svg").read_bytes()
    benchmark("adapting", "--draw", "--page", str(page))
    assert (page / "adapt.md").read_text() == text and (page / "adapt.svg").read_bytes() == drawn
    texts = {name: (tmp_path / "text" / f"{name}.jsonl").read_text() for name in ("own", "train", "dev")}
    held = (tmp_path / "text" / "own-held-out.txt").read_text().splitlines()
    assert len(held) == 8 and not any(json.dumps(line)[1:-1] in texts["own"] for line in held)
    assert not {*texts["train"].splitlines()} & {*texts["dev"].splitlines()}


def test_best_rates_are_searched_on_both_sides_and_drawn(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import rate_transfer

    trained = []

    def loss(measured, case, rate):
        """Least at 4e-3 with mup, and in proportion to 1 / width without."""
        trained.append((case, rate))
        best = 4e-3 * (1 if case.parametrization == "mup" else 64 / case.width)
        return None if rate > 4 * best else 2 + (math.log2(rate / best) - 0.25) ** 2

    monkeypatch.setattr(rate_transfer.Measured, "_train", loss)
    arguments = (
        "--quick",
        "--data",
        "x",
        "--json",
        str(tmp_path / "rates.json"),
        "--draw",
        str(tmp_path / "rates.svg"),
    )
    benchmark("rate_transfer", *arguments)
    printed = capsys.readouterr().out
    assert (
        "as multiples of the first one's: 0.50 to 1.00" in printed
        and "as multiples of the first one's: 1.00 to 1.00" in printed
    )
    assert f"64 x 1: {4e-3 * 2**0.25:.2e} (" in printed and (tmp_path / "rates.svg").stat().st_size > 1000
    assert len(trained) == len(set(trained)) and {case.layers for case, _ in trained} == {1}
    done = len(trained)
    benchmark("rate_transfer", *arguments)
    assert len(trained) == done, "what stands in the file is not trained again"
    assert rate_transfer.best_rate({1.0: 2.0, 2.0: 1.0, 4.0: math.inf}) == 2.0, "diverged on one side"
    with pytest.raises(SystemExit, match=r"rates.json: found runs of 5 steps, expected 360"):
        benchmark("rate_transfer", *arguments[1:])


@pytest.mark.parametrize(("until", "in_every_step"), [(0.5, False), (0.0, True), (0.6, True)])
def test_the_flops_of_a_budget_are_those_of_the_batches_of_its_run(until, in_every_step, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compute_curve

    from cloze.launch.commands import parse
    from cloze.launch.pretrain.inputs import open_inputs
    from cloze.launch.pretrain.schedules import run_masking
    from cloze.model.flops import TokenCounts
    from cloze.pipeline.loading.batches import BatchStream
    from cloze.pipeline.shards.reader import ShardReader

    data = make_shards(tmp_path / "data", mask_sets=0, pairs=False)
    recipe, size = compute_curve.QUICK[0.0], 16
    if in_every_step:
        size = 8
        options = recipe.options | {"train.causal_share": 0.5, "train.micro_batch_size": size}
        recipe = replace(recipe, options=options, next_tokens=until)
    cost = compute_curve.cost_of(recipe, data)
    found = cost.of_budget(1e10)
    run = open_inputs(parse("pretrain", compute_curve.command(found.options, str(data), str(tmp_path / "run"))), 1)
    assert (run.config.train.max_steps, run.config.masking.final_rate) == (found.steps, 0.15) and found.steps > 20
    stream = BatchStream(
        ShardReader(data, "train"),
        global_batch_size=16,
        micro_batch_size=size,
        rank=0,
        world_size=1,
        seed=1,
        streams=run.config.data_streams,
        masking=run_masking(run.config, run.data),
    )
    batches = [next(stream) for _ in range(found.steps)]
    stream.close()
    micro = [each for batch in batches for each in batch.micro_batches]
    flops = sum(run.objective.flops(TokenCounts.of_micro_batch(each)) for each in micro)
    assert found.flops == pytest.approx(flops, rel=0.01) and found.flops == pytest.approx(1e10, rel=0.02)
    assert found.tokens == pytest.approx(sum(batch.num_tokens for batch in batches), rel=0.01)
    assert found.epochs == found.steps * 16 / 200 and batches[-1].epoch == math.ceil(found.epochs) - 1
    causal = len(micro) * (until or 1) * (0.5 if in_every_step else 1)
    assert sum("causal" in each for each in micro) == pytest.approx(causal, abs=1)
    with pytest.raises(SystemExit, match="steps: found 4[0-9].[0-9] epochs, expected at most 10"):
        cost.of_budget(1e11 / 2)


class Stopping:
    """Stands in for what runs the commands of a comparison: writes what they would, and notes them."""

    called: list[list[str]] = []
    stops = 0

    def run(self, words, log, used=lambda seconds: None, **variables):
        self.called.append(words)
        used(1800.0)
        if Stopping.stops:
            Stopping.stops -= 1
            sys.exit(75)
        if "--worker" in words:
            made = json.loads(words[-1])
            Path(made["folders"]["run"]).mkdir()
            seconds = 0.5 if made["settings"].get("bf16") else 1.0
            found = {"steps": made["steps"], "seconds": made["steps"] * seconds, "step_seconds": seconds}
            text = json.dumps(found | {"tokens": 4096 * made["steps"], "parameters": 8_000_000})
            Path(made["folders"]["run"], "trained.json").write_text(text)
        elif "pretrain" in words:
            steps, run = int(words[words.index("--train.max_steps") + 1]), Path(words[words.index("--output") + 1])
            run.mkdir(parents=True)
            lines = [
                {"step": step, "speed/step_seconds": 2.0, "data/tokens": 100 * step} for step in (steps // 2, steps)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            assert words[words.index("evaluate") + 1].endswith("/run")
            path = Path(words[words.index("--json") + 1])
            budget = path.parent.name.split("-seed")[0]
            score = 60.0 if "mlm" in str(path) else 100 - 50 * (float(budget) / 1e14) ** -0.1
            blimp = {
                "mean_of_paradigms": score,
                "mean_of_phenomena": score + 2,
                "phenomena": {"anaphor_agreement": score + 4, "island_effects": score},
                "paradigms": {"a": score},
            }
            lines = {"log_likelihood_per_character": -1.5, "characters": 300}
            path.write_text(json.dumps(blimp if "blimp" in words else lines))


def test_runs_of_budgets_are_rows_that_are_fitted_and_drawn(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import compute_curve

    recipe = compute_curve.RECIPES[0.0]
    cost = compute_curve.Cost(1e8, 28.0, 100, 10**9, 5_000_000, recipe)
    replaced = {"Commands": Stopping, "cost_of": lambda *_: cost}
    monkeypatch.setattr(Stopping, "called", called := [])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / "results.md").write_text("before\n<!-- compute-curve -->\nold\n<!-- /compute-curve -->\nbehind\n")
    drawn = ["--json", str(tmp_path / "curve.json"), "--draw", str(tmp_path / "curve.svg"), "--page", str(tmp_path)]
    arguments = [*drawn, "--output", str(tmp_path), "--seeds", "1", "2"]
    for name in ("data", "lines", "blimp"):
        arguments += [f"--{name}", str(tmp_path / name)]
    Stopping.stops = 1
    with pytest.raises(SystemExit, match="75"):
        benchmark("compute_curve", *arguments, "--budgets", "1e14", **replaced)
    assert len(called) == 1, "what was stopped ends the command, and no other run begins"
    assert benchmark("compute_curve", *arguments, "--budgets", "1e14", "1e15", **replaced) == 0
    assert len(called) == 1 + 2 * 2 * 3 and "would give" not in capsys.readouterr().out, "two budgets have no fit"
    assert benchmark("compute_curve", *arguments, "--budgets", "1e15", "3e15", "--precision", "fp32", **replaced) == 0
    assert len(called) == 1 + 3 * 2 * 3, "what stands in the file is not run again"
    rows = json.loads((tmp_path / "curve.json").read_text())["rows"]
    assert [(row["budget"], row["seed"]) for row in rows] == [(b, s) for b in (1e14, 1e15, 3e15) for s in (1, 2)]
    assert rows[0]["steps"] == 10_000 and rows[0]["seconds"] == 20_000 and rows[0]["tokens"] == 1_000_000
    assert [row["processor_seconds"] for row in rows[:2]] == [3600, 1800], "with the part that was stopped"
    assert "--seed 2" in rows[1]["command"] and str(tmp_path) not in json.dumps(rows)
    assert ["--train.precision fp32" in row["command"] for row in rows] == [row["budget"] == 3e15 for row in rows]
    assert "100 − score falls as FLOPs^(-0.1000 ± 0.0000); 1e+16 FLOPs would give 68.5 ± 0.0" in capsys.readouterr().out
    with (tmp_path / "curve.json").open("r+") as file:  # a row of another recipe
        file.write(json.dumps({"rows": [*rows, rows[0] | {"recipe": {}}]}))
    picture = (tmp_path / "curve.svg").read_bytes()
    assert benchmark("compute_curve", *drawn) == 0 and (tmp_path / "curve.svg").stat().st_size == len(picture)
    assert "1 rows have other settings" in capsys.readouterr().out
    page = (tmp_path / "results.md").read_text()
    assert page.startswith(
        "before\n<!-- compute-curve -->\n![BLiMP over FLOPs, ours and published](curve.svg)"
    ) and page.endswith("-->\nbehind\n")
    assert "| 1.00e+14 | 5.0 M | 10,000 | 1.0 M | 0.00 | 0.75 ± 0.35 | 1, 2 | 1.5000 ± 0.0000 | 50.00 ± 0.00 |" in page
    assert "| island effects | 50.0 | 60.3 | 64.4 |\n| anaphor agreement | 54.0 | 64.3 | 68.4 |\n" in page


def test_run_mlm_has_as_many_minutes_as_ours(benchmark, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import against_run_mlm
    import compute_curve

    cost = compute_curve.Cost(1e8, 28.0, 100, 10**9, 5_000_000, compute_curve.RECIPES[0.0])
    replaced = {"Commands": Stopping, "cost_of": lambda *_: cost, "pack": lambda *_: None}
    replaced["read_metrics"] = lambda _: [{"speed/step_seconds": each} for each in (9, 1, 1, 1, 9, 3, 3, 3)]
    monkeypatch.setattr(Stopping, "called", called := [])
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "manifest.json").write_text("{}")
    (tmp_path / "results.md").write_text("<!-- against-run-mlm -->\nold\n<!-- /against-run-mlm -->\n")
    arguments = ["--json", str(tmp_path / "rows.json"), "--page", str(tmp_path), "--text", "x", "--minutes", "10"]
    arguments += ["--output", str(tmp_path / "mlm"), "--only", "cloze", "defaults-256", "paper-256"]
    for name in ("data", "lines", "blimp"):
        arguments += [f"--{name}", str(tmp_path / name)]
    for _ in range(2):  # the second finds all done
        assert benchmark("against_run_mlm", *arguments, **replaced) == 0
        assert len(called) == (2 + 2) + (2 + 2) + (3 + 2), "trials, the run and two suites of each"
    ours, defaults, paper = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert ours["steps"] == 10 * 60 / 2 and defaults["steps"] == 10 * 60 and paper["steps"] == 2 * 10 * 60
    assert defaults["settings"] == {} and paper["settings"] == against_run_mlm.PAPER | {"bf16": True}
    page = (tmp_path / "results.md").read_text()
    assert (
        "| run_mlm, RoBERTa 8 × 256, its fastest, constants of the paper, bf16 | 8.0 M | 1,200 | 4.9 M | 10.0 |" in page
    )
    assert (
        page.index("**`strict-small`** | 5.0 M | 300 ") < page.index("its defaults | 8.0 M | 600 ")
        and "old" not in page
    )


def test_a_roberta_of_run_mlm_is_trained_and_scored_as_by_transformers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import against_run_mlm
    import datasets

    from cloze.launch.evaluate.likelihood import pseudo_log_likelihoods
    from cloze.launch.predict.predictor import Predictor

    monkeypatch.setattr(against_run_mlm, "LENGTH", 32)
    tokenizer().save(tmp_path / "tokenizer")
    texts = [" ".join([*GOOD, *BAD])] * 20
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    against_run_mlm.pack(str(tmp_path / "text.jsonl"), tmp_path / "tokenizer", tmp_path / "packed")
    packed = datasets.load_from_disk(tmp_path / "packed")
    assert set(map(len, packed["input_ids"])) == {32} and "special_tokens_mask" in packed.column_names
    folders = {name: str(tmp_path / name) for name in ("packed", "tokenizer", "run")}
    ticks = itertools.count()  # a clock that a busy machine can't stop
    monkeypatch.setattr(against_run_mlm, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    against_run_mlm.train_theirs(against_run_mlm.QUICK_SHAPE, against_run_mlm.PAPER, 4, 1, folders)
    found = json.loads((tmp_path / "run" / "trained.json").read_text())
    assert (found["steps"], found["tokens"]) == (4, 4 * 8 * 32)
    assert (found["seconds"], found["step_seconds"]) == (4, 1)
    loaded = Predictor.from_folder(tmp_path / "run").loaded
    encodings = [loaded.encoder.encode(text, place="here") for text in GOOD + BAD]
    plain = plain_score(tmp_path / "run")
    assert pseudo_log_likelihoods(loaded, encodings) == pytest.approx([plain(text) for text in GOOD + BAD], abs=1e-4)
