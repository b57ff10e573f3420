"""Runs on several prepared folders: exact losses of each, exact resumes, validation by set, refusals in one line."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from cloze.launch.cli import main
from cloze.launch.commands import parse
from cloze.launch.config import DataPhase, DataSource, MaskingPhase, MixtureConfig, PretrainMaskingConfig
from cloze.launch.pretrain.data import TrainingData, open_data
from cloze.launch.run.metrics_file import read_metrics
from cloze.launch.tools.plan import make_estimator
from cloze.model.bert import BertForPreTraining
from cloze.pipeline.config import MaskingConfig, SamplesConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.loading.batches import evaluation_batches
from cloze.pipeline.loading.mixture import Phase
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.shards.reader import ShardReader
from tests.forked import ForkedRun
from tests.launch.errors import error_of
from tests.launching import (
    NO_DROPOUT,
    ROOT,
    TINY,
    assert_killed_equals_whole,
    assert_same_weights,
    curve,
    finish,
    pretrain_arguments,
    train,
    weights,
)
from tests.pipeline import corpus
from tests.synthetic import make_shards

STEPS = 15
RUN = (
    "--train.max_steps",
    str(STEPS),
    "--train.log_every_steps",
    "3",
    "--evaluation.every_steps",
    "12",
    "--checkpoint.every_steps",
    "5",
    "--checkpoint.keep_last",
    "9",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs with stored masks; single sequences, shorter ones, whose masks are drawn; a further validation set; and the
    file that mixes the first two in three phases."""
    folder = tmp_path_factory.mktemp("mixtures")
    make_shards(folder / "wiki")
    make_shards(folder / "web", train=90, seed=1, mask_sets=0, pairs=False, max_length=16)
    make_shards(folder / "books", train=20, validation=9, seed=2)
    (folder / "mix.yaml").write_text(
        yaml.safe_dump(
            {
                "sources": [{"path": str(folder / "wiki")}, {"path": str(folder / "web"), "name": "crawl"}],
                "phases": [
                    {"weights": {"wiki": 1}, "until_tokens": 1000},
                    {"weights": {"wiki": 1, "crawl": 2}, "until_tokens": 2600},
                    {"weights": {"crawl": 1}},
                ],
            }
        )
    )
    return folder


def mixing(data, run, *overrides: str) -> list[str]:
    return pretrain_arguments(data / "mix.yaml", run, *RUN, "--evaluation.sets.books", str(data / "books"), *overrides)


@pytest.fixture(scope="module")
def two(data, tmp_path_factory):
    """Two processes, without dropout, all along."""
    run = tmp_path_factory.mktemp("two") / "run"
    output = finish(ForkedRun(mixing(data, run, *NO_DROPOUT), 2))
    return run, output


def test_a_pass_is_one_pair_set(tmp_path):
    """What the start says of an epoch is of one of four sets, samples and tokens, as the reader goes through them."""
    source = corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(60, seed=1))
    manifest = prepare(corpus.config(tmp_path, [source], samples=SamplesConfig(pair_sets=4), max_length=32))
    data = TrainingData((), (manifest,), (Phase(0, (1.0,)),))
    sizes = ShardReader(manifest.folder).epoch_sizes
    assert len(sizes) == 4 and data.num_samples == sum(sizes) // 4
    shards = manifest.splits["train"].shards
    assert data.num_tokens == sum(shards.tokens) // 4
    first = [tokens for tokens, pair_set in zip(shards.tokens, shards.pair_set, strict=True) if pair_set == 0]
    assert data.num_tokens == pytest.approx(sum(first), rel=0.1)


def test_a_killed_run_equals_the_uninterrupted_one(data, tmp_path):
    """Dropout is on, and a checkpoint falls inside a line's window: the sums of each source are kept in it."""
    finish(ForkedRun(mixing(data, tmp_path / "whole")))
    assert_killed_equals_whole(tmp_path / "whole", 9, mixing(data, tmp_path / "run"))


def test_sentences_and_documents_of_one_text_are_trained_in_one_run(tmp_path):
    """One folder of single sentences and one of whole documents, by `cloze prepare`: each has its share and its curve,
    and a killed run, with dropout, goes on with the same samples and ends with the same bits."""
    text = [corpus.write_jsonl(tmp_path / "in/a.jsonl", corpus.documents(60, seed=1))]
    found = {}
    for name, objective in (("sentences", "single_sentences"), ("documents", "full_sentences")):
        found[name] = prepare(
            replace(
                corpus.config(tmp_path, text, max_length=64),
                output=str(tmp_path / name),
                samples=SamplesConfig(objective=objective),
                masking=MaskingConfig(mode="dynamic"),
            )
        )
    separators = {
        name: [np.count_nonzero(row == manifest.special_tokens.separator) for row in _rows(manifest)]
        for name, manifest in found.items()
    }
    assert set(separators["sentences"]) == {1}, "a sample is one sentence"
    lengths = {name: ShardReader(manifest.folder).mean_length for name, manifest in found.items()}
    assert lengths["documents"] > 1.3 * lengths["sentences"], "a sample goes on over its document"
    mix = json.dumps(
        {"sources": [{"path": str(tmp_path / name), "weight": 1} for name in found], "proportions": "samples"}
    )
    run = (
        "--train.max_steps",
        "12",
        "--train.log_every_steps",
        "3",
        "--checkpoint.every_steps",
        "4",
        "--model.max_position_embeddings",
        "64",
    )
    train(mix, tmp_path / "whole", *run)
    cut = pretrain_arguments(mix, tmp_path / "cut", *run)
    assert "resumed from step 4" in assert_killed_equals_whole(tmp_path / "whole", 6, cut)
    *_, line = (line for line in read_metrics(tmp_path / "whole") if "train/loss" in line)
    assert {f"train/mlm_loss/{name}" for name in found} <= line.keys()
    assert [line[f"data/samples/{name}"] for name in found] == [12 * 8, 12 * 8]


def _rows(manifest: Manifest) -> list[np.ndarray]:
    """The ids of each training sample."""
    reader = ShardReader(manifest.folder)
    samples, _ = reader.take(np.arange(reader.num_samples), None)
    return np.split(samples.input_ids, samples.offsets[1:-1])


def test_two_processes_become_one(data, two, tmp_path):
    run = shutil.copytree(two[0], tmp_path / "run")
    for path in (run / "checkpoints").glob("step-*"):
        if int(path.name[5:]) > 10:
            shutil.rmtree(path)
    assert "resumed from step 10" in finish(ForkedRun(mixing(data, run, *NO_DROPOUT)))
    assert_same_weights(weights(run), weights(two[0]), 1e-5)
    for one, other in zip(curve(run), curve(two[0]), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() - {"data/padding_share"}:
            assert one[name] == pytest.approx(other[name], abs=1e-5), name


def test_losses_of_sources_make_the_loss_of_all(two):
    """Each masked token is of one source, over all ranks: means of the sources average to that of all."""
    lines = [line for line in read_metrics(two[0]) if "train/loss" in line]
    assert [line["data/epoch/wiki"] == line["data/samples/wiki"] / 200 for line in lines] == [True] * len(lines)
    both = 0
    for line in lines:
        for name in ("mlm_loss", "mlm_accuracy"):
            parts = [line.get(f"train/{name}/{source}") for source in ("wiki", "crawl")]
            low, high = (pick(part for part in parts if part is not None) for pick in (min, max))
            assert low - 1e-6 <= line[f"train/{name}"] <= high + 1e-6
        if None not in parts:
            both += 1
        if "train/next_sentence_loss" in line:  # the web has no pairs
            assert line["train/next_sentence_loss/wiki"] == pytest.approx(line["train/next_sentence_loss"], abs=1e-9)
        assert "train/next_sentence_loss/crawl" not in line
        assert line["data/samples/wiki"] + line["data/samples/crawl"] == line["data/samples"]
    assert both >= 2
    names = {name.replace("/wiki", "/NAME").replace("/crawl", "/NAME") for line in lines for name in line}
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert {name for name in names if name.endswith("/NAME")} <= set(re.findall(r"`([\w/]+/NAME)`", page))
    assert "train/mlm_loss/crawl" not in lines[0] and "train/mlm_loss/wiki" not in lines[-1]  # by the phases
    assert "mlm" in two[1] and "  wiki " in two[1] and "  crawl " in two[1]


@torch.no_grad()
def test_validation_is_measured_by_set_and_together(data, two):
    """By a plain loop over each set; together counts the tokens of the data that is trained on, not the further
    set's.
    """
    (*_, line) = (line for line in read_metrics(two[0]) if "validation/loss" in line)
    config = parse("pretrain", mixing(data, two[0])[1:])
    model = BertForPreTraining(open_data(config)[1])
    model.load_state_dict(weights(two[0]), strict=False)
    model.eval()
    sums = {}
    for name, folder in (("wiki", "wiki"), ("crawl", "web"), ("books", "books")):
        reader = ShardReader(data / folder, "validation")
        (batch,) = evaluation_batches(reader, micro_batch_size=reader.num_samples, rank=0, world_size=1)
        output = model(**batch)
        labelled = batch["next_sentence_label"] >= 0
        sums[name] = np.array(
            [
                float(output.mlm_losses.sum()),
                len(batch["labels"]),
                float(output.next_sentence_losses.sum()),
                int(labelled.sum()),
            ]
        )
        assert line[f"validation/mlm_loss/{name}"] == pytest.approx(sums[name][0] / sums[name][1], abs=1e-5)
    mlm, masked, pairs_loss, pairs = sums["wiki"] + sums["crawl"]
    assert line["validation/mlm_loss"] == pytest.approx(mlm / masked, abs=1e-5)
    assert line["validation/loss"] == pytest.approx(mlm / masked + pairs_loss / pairs, abs=1e-5)


def test_the_best_by_one_set(data, tmp_path):
    """Beside a set without held-out samples, of which a warning tells."""
    run, empty = tmp_path / "run", make_shards(tmp_path / "empty", validation=0)
    said = train(
        data / "mix.yaml",
        run,
        "--train.max_steps",
        "6",
        "--evaluation.every_steps",
        "2",
        "--evaluation.metric",
        "loss/crawl",
        "--evaluation.keep_best",
        "true",
        "--evaluation.sets.none",
        str(empty),
    )
    assert "warning: the validation split of none is empty; it has no curves of its own" in " ".join(said.split())
    measured = {line["step"]: line["validation/loss/crawl"] for line in read_metrics(run) if "validation/loss" in line}
    best = min(measured, key=measured.get)
    state = json.loads((run / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (state["best_step"], state["best_metric"]) == (best, "loss/crawl")
    assert state["best_value"] == pytest.approx(measured[best])


def test_what_is_mixed_may_not_change_unseen(data, two, tmp_path, capsys):
    run = shutil.copytree(two[0], tmp_path / "run")
    mix = yaml.safe_load((data / "mix.yaml").read_text())

    def refused(changed: dict, *overrides: str) -> str:
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
        return error_of(capsys, *pretrain_arguments(tmp_path / "changed.yaml", run, *RUN, *NO_DROPOUT, *overrides))

    weights_changed = {
        **mix,
        "phases": [mix["phases"][0], {**mix["phases"][1], "weights": {"wiki": 1, "crawl": 3}}, mix["phases"][2]],
    }
    assert "with another run, whose source_shares is 'from sample 0: 1, 0; from" in refused(weights_changed)
    assert "whose source_names is 'wiki, crawl', expected 'crawl, wiki'" in refused(
        {**mix, "sources": mix["sources"][::-1]}
    )
    other = make_shards(tmp_path / "other", train=90, seed=7, mask_sets=0, pairs=False, max_length=16)
    swapped = {**mix, "sources": [mix["sources"][0], {"path": str(other), "name": "crawl"}]}
    assert "with another run, whose manifest_hash.crawl is" in refused(swapped)
    shutil.copytree(data / "wiki", tmp_path / "moved")  # but folders may lie elsewhere
    moved = {**mix, "sources": [{"path": str(tmp_path / "moved"), "name": "wiki"}, mix["sources"][1]]}
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(moved))
    assert f"complete at step {STEPS}" in finish(
        ForkedRun(pretrain_arguments(tmp_path / "changed.yaml", run, *RUN, *NO_DROPOUT))
    )
    accepted = finish(
        ForkedRun(
            pretrain_arguments(
                data / "wiki",
                run,
                *RUN,
                *NO_DROPOUT,
                "--train.max_steps",
                str(STEPS + 2),
                "--checkpoint.accept_changes",
                "true",
            )
        )
    )
    assert f"complete at step {STEPS + 2}" in accepted  # from a mixture to one folder


def test_a_card_names_the_sources_and_not_where_they_lie(data, two, tmp_path):
    assert main(["export", str(two[0]), "--output", str(tmp_path / "model")]) == 0
    card = (tmp_path / "model" / "README.md").read_text()
    recipe = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert [source["name"] for source in recipe["data"]["sources"]] == ["wiki", "crawl"]
    assert list(recipe["evaluation"]["sets"]) == ["books"] and str(data) not in card


def refusal_of(capsys, *arguments: str) -> str:
    """The one line of a pretraining that is refused."""
    return error_of(capsys, "pretrain", *TINY, *arguments)


def test_folders_that_do_not_fit_together_are_refused_in_one_line(data, tmp_path, capsys):
    other = make_shards(tmp_path / "other", vocab_size=70)
    ordered = shutil.copytree(data / "wiki", tmp_path / "ordered")
    replace(Manifest.read(data / "wiki"), objective="sentence_order").save(ordered)
    run = ("--output", str(tmp_path / "run"))

    def mixed(*paths, **more) -> str:
        return json.dumps({"sources": [{"path": str(path)} for path in paths], **more})

    error = refusal_of(capsys, "--data", mixed(data / "wiki", other), *run)
    assert "data.sources: found a tokenizer with fingerprint" in error and f"in {other}, expected" in error
    error = refusal_of(capsys, "--data", mixed(data / "wiki", ordered), *run)
    assert "data.sources: found objective sentence_order" in error and "next_sentence_label has another" in error
    assert "found no manifest.json" in refusal_of(capsys, "--data", mixed(data / "wiki", tmp_path / "none"), *run)
    for given, expected in (
        (mixed(data / "wiki", data / "wiki"), "found two that are called wiki, expected a name for each"),
        ("{sources: []}", "data.sources: found none, expected a list of prepared folders"),
        ("{sources: [{path: a, weight: 1}, {path: b}]}", "found 1 weights for 2 sources, expected one for each"),
        ("{sources: [{path: a, weight: -1}]}", "found weight -1.0 of a, expected a number above 0"),
        ("{sources: [{path: a, weight: 1}], temperature: 2}", "weights of data.sources and data.temperature, expected"),
        ("{sources: [{path: 'a b'}]}", "found the name 'a b', expected letters"),
        ("{sources: [{path: a}], phases: [{weights: {b: 1}}]}", "data.phases: found the source 'b', expected one of a"),
        ("{sources: [{path: a}], phases: [{weights: {a: 1}}, {weights: {a: 1}}]}", "found a phase without an end"),
        ("{sources: [{path: a}], phases: [{weights: {a: 0}}]}", "a phase without a weight above 0"),
        ("{sources: [{path: a, wight: 2}]}", "expected a folder, or a section (or a YAML file of one) with sources"),
        ("{sources: a}", "expected a folder, or a section (or a YAML file of one) with sources"),
    ):
        assert expected in refusal_of(capsys, "--data", given, *run)
    far = [{"path": str(data / "wiki"), "weight": 1e-300}, {"path": str(data / "web"), "weight": 1e300}]
    for given in ({"sources": far}, {"sources": [{"path": each["path"]} for each in far], "temperature": 1e-3}):
        assert "data: found a share of w" in refusal_of(capsys, "--data", json.dumps(given), *run)
    for name in ("2024", "true", "1.5"):
        said = refusal_of(
            capsys, "--data", str(data / "wiki"), *run, "--evaluation.sets", f"{{{name}: {data / 'web'}}}"
        )
        assert "expected a text of letters" in said
    (tmp_path / "run.yaml").write_text("data: {sources: [{path: a, wight: 1}]}")
    error = refusal_of(capsys, "--config", str(tmp_path / "run.yaml"), *run)
    assert "--data: found wight in it, which is no field there; it takes " in error
    assert "found --data.temper, which is no option; --data takes" in refusal_of(capsys, "--data.temper", "3", *run)
    for arguments, expected in (
        (
            ("--masking.phases", "[{rate: 0.3, until_share: 0.5}, {rate: 0.2, until_tokens: 9}, {rate: 0.1}]"),
            "masking.phases: found until_tokens and until_share, expected one of them",
        ),
        (("--masking.phases", "[{rate: 0.3}, {rate: 0.1}]"), "masking.phases: found a phase without an end"),
        (("--masking.phases", "[{rate: 0.3}]", "--masking.rate", "0.2"), "expected one of the two"),
        (("--masking.strategy", "span"), f"masking.strategy: found span with shards in {data / 'wiki'} that hold"),
        (("--evaluation.masking_rate", "1.5"), "evaluation.masking_rate: found 1.5, expected above 0, up to 1"),
        (
            ("--masking.phases", "[{rate: 0.3, until_share: 0.5}, {rate: 0.1}]", "--train.time_budget_hours", "1"),
            "masking.phases: found until_share 0.5 in a run with a time budget",
        ),
    ):
        assert expected in refusal_of(capsys, "--data", str(data / "wiki"), *run, *arguments)
    assert "evaluation.sets: found crawl, expected a name that no source" in refusal_of(
        capsys, "--data", str(data / "mix.yaml"), *run, "--evaluation.sets.crawl", str(data / "books")
    )


def opened(data, mixture, **sections):
    config = parse("pretrain", pretrain_arguments(data / "wiki", data / "run")[1:])
    config = replace(config, data=mixture, **sections)
    return config, open_data(config)[0]


def test_shares_by_tokens_samples_and_temperature(data):
    sources = [DataSource(str(data / "wiki"), weight=3), DataSource(str(data / "web"), weight=1)]
    by_samples = opened(data, MixtureConfig(sources, proportions="samples"))[1]
    assert by_samples.phases[0].shares == pytest.approx((0.75, 0.25))
    by_tokens = opened(data, MixtureConfig(sources))[1]
    lengths = [ShardReader(data / name).mean_length for name in ("wiki", "web")]
    tokens = np.array(by_tokens.phases[0].shares) * lengths
    assert tokens / tokens.sum() == pytest.approx([0.75, 0.25])
    for weight in (1e308, 5e-324):
        alike = MixtureConfig([replace(each, weight=weight) for each in sources], proportions="samples")
        assert opened(data, alike)[1].phases[0].shares == (0.5, 0.5)
    bare = [DataSource(str(data / "wiki")), DataSource(str(data / "web"))]
    as_large = opened(data, MixtureConfig(bare))[1]
    assert as_large.phases[0].shares == pytest.approx((200 / 290, 90 / 290))
    flat = opened(data, MixtureConfig(bare, temperature=1e9))[1]
    tokens = np.array(flat.phases[0].shares) * lengths
    assert tokens / tokens.sum() == pytest.approx([0.5, 0.5], abs=1e-6)


def test_a_plan_counts_a_mixture(data):
    """The lengths of the phase whose samples are longest, and the most that any source masks."""
    config = parse("plan", ["--data", str(data / "mix.yaml"), "--device", "h100", *TINY])
    lengths = make_estimator(config).lengths
    wiki = ShardReader(data / "wiki")
    assert lengths.mean == pytest.approx(wiki.mean_length) and lengths.masked_share == wiki.manifest.masked_share


def test_tokens_become_positions_by_the_phases_means(data):
    bare = [DataSource(str(data / "wiki")), DataSource(str(data / "web"))]
    made = opened(data, MixtureConfig(bare, phases=[DataPhase({"wiki": 1}, 1000), DataPhase({"web": 1})]))[1]
    long, short = (ShardReader(data / name).mean_length for name in ("wiki", "web"))
    begin = made.phases[1].begin
    assert begin == int(np.ceil(1000 / long))
    assert made.position(900) == int(np.ceil(900 / long))
    assert made.position(3000) == begin + int(np.ceil((3000 - begin * long) / short))
    assert made.max_length == 32 and len(made.length_histogram) == 33


def test_validation_has_a_rate_of_its_own(data, tmp_path, capsys):
    """The run masks 5%, then 60%; validation is masked at the manifest's rate, or at the one that is given."""
    phases = ("--masking.phases", "[{rate: 0.05, until_share: 0.5}, {rate: 0.6}]", "--masking.strategy", "whole_word")
    found = {}
    for name, more in (("manifest", ()), ("given", ("--evaluation.masking_rate", "0.5")), ("plain", ())):
        train(data / "web", tmp_path / name, "--train.max_steps", "2", *more, *(phases if name != "plain" else ()))
        found[name] = [line["validation/loss"] for line in read_metrics(tmp_path / name) if "validation/loss" in line]
    assert found["manifest"][0] == found["plain"][0] != found["given"][0]
    assert found["manifest"][1] != found["plain"][1]  # another training
    output = error_of(
        capsys, *pretrain_arguments(data / "wiki", tmp_path / "stored", "--evaluation.masking_rate", "0.5")
    )
    assert "evaluation.masking_rate: found 0.5 with shards" in output and "hold their masks" in output
    with pytest.raises(UserError, match="expected above 0, up to 1"):
        PretrainMaskingConfig(phases=[MaskingPhase(1.5)])
