"""What a run shows beside its numbers, and what it marks."""

import gzip
import json
import re
import resource
import threading
import time
from pathlib import Path

import pytest
import torch
from google.protobuf import text_format
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins.projector import ProjectorConfig
from tensorboard.summary.writer import event_file_writer

from cloze.launch import cli
from cloze.launch.finetune.scoring import METRICS
from cloze.launch.pretrain.source_statistics import MEANS
from cloze.launch.run.metrics import MetricsWriter, tensorboard_command
from cloze.launch.run.metrics_file import read_metrics
from cloze.pipeline.errors import UserError
from tests.forked import ForkedRun
from tests.launching import ROOT, curve, finish, pretrain_command, start, train
from tests.synthetic import make_shards

STEPS = 12


def test_a_curve_that_was_cut_while_it_was_written_is_missed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n')
    writer = MetricsWriter(tmp_path, 1, trackers=[])
    writer.write(2, {"train/loss": 2.0})
    writer.check_there()
    (tmp_path / "metrics.jsonl").write_text("")
    writer.write(3, {"train/loss": 1.0})
    with pytest.raises(
        UserError, match="metrics.jsonl: found another file, expected the one that this run has written"
    ):
        writer.check_there()
    writer.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("monitoring"))


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A run of two processes with everything that can be switched on; ZeRO-3, where nothing is at hand whole."""
    run = tmp_path_factory.mktemp("watched") / "run"
    train(
        data,
        run,
        "--train.max_steps",
        str(STEPS),
        "--evaluation.every_steps",
        "6",
        "--zero.stage",
        "3",
        "--monitor.examples",
        "2",
        "--monitor.embeddings",
        "true",
        "--monitor.inspect_every_steps",
        "4",
        "--monitor.profile_steps",
        "[4, 5]",
        processes=2,
    )
    return run


def test_tensorboard_has_what_metrics_jsonl_has(run):
    board = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    lines = read_metrics(run)
    for name in sorted({name for line in lines for name in line} - {"step"}):
        expected = [(line["step"], line[name]) for line in lines if name in line]
        found = [(event.step, event.value) for event in board.Scalars(name)]
        assert [step for step, _ in found] == [step for step, _ in expected], name
        assert [value for _, value in found] == pytest.approx([value for _, value in expected], rel=1e-6), name


def test_the_first_page_begins_with_loss_accuracy_rate_and_speed_of_a_run_by_its_name(run):
    """By what TensorBoard's server reads folders with, for the folder that the run names at its start."""
    assert tensorboard_command(run) == f"tensorboard --logdir {run.parent}"
    board = EventMultiplexer().AddRunsFromDirectory(str(run.parent)).Reload()
    assert list(board.Runs()) == ["run"], "its name, not a dot"
    tags = board.GetAccumulator("run").Tags()["tensors"]
    first = sorted(tag for tag in tags if tag.startswith(min(tags)[:1]))  # the page sorts groups and curves by name
    assert first == [
        "0_overview/1_train_loss",
        "0_overview/2_validation_loss",
        "0_overview/3_train_mlm_accuracy",
        "0_overview/4_validation_mlm_accuracy",
        "0_overview/5_train_learning_rate",
        "0_overview/6_speed_tokens_per_second",
    ]
    values = [
        [event.tensor_proto.float_val[0] for event in board.Tensors("run", tag)] for tag in (first[0], "train/loss")
    ]
    assert values[0] == values[1] and len(values[0]) == STEPS


def test_what_json_has_no_word_for_is_null(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.write(1, {"validation/loss": float("inf"), "validation/mlm_loss": float("nan"), "train/loss": 2.0})
    writer.close()
    (line,) = read_metrics(tmp_path)
    assert line == {"step": 1, "validation/loss": None, "validation/mlm_loss": None, "train/loss": 2.0}


def test_the_page_explains_every_curve_and_no_other(run):
    """Those of a run and those that the source names besides (fp16's loss scale, a spike, a task's metrics)."""
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    group = "(?:train|validation|data|speed|memory|gradient_norm|weight_norm|update_ratio)"
    explained = set(re.findall(rf"`({group}/[\w/]+)`", page))
    board = EventAccumulator(str(run), size_guidance={"tensors": 1}).Reload()
    pages = {name.removesuffix("/text_summary") for name in board.Tags()["tensors"]} - {"config"}
    scalars = {name for line in read_metrics(run) for name in line} - {"step"}
    assert scalars == {tag for tag in board.Tags()["scalars"] if not tag.startswith("0_overview/")}
    written = {re.sub(r"layer_\d\d", "layer_NN", name) for name in scalars | pages}
    sources = ("training/curves", "training/throughput", "training/inspection", "run/metrics", "run/progress_line")
    texts = [(ROOT / "launch" / f"{source}.py").read_text(encoding="utf-8") for source in sources]
    named = set().union(*(re.findall(rf'"({group}/[\w/]+)"', text) for text in texts))
    tasks = {f"validation/{name}" for name in (*METRICS, "accuracy_mean", "precision", "recall")}
    mixed = {
        "train/next_token_loss",
        "train/next_token_accuracy",
        "validation/loss/NAME",
        "data/samples/NAME",
        "data/epoch/NAME",
        *(f"train/{mean}/NAME" for mean in MEANS),
        "speed/checkpoints_left_out",  # of runs whose disk is slow
    }
    assert explained == written | {name for name in named if not name.endswith("/")} | tasks | mixed


def test_each_evaluation_shows_blanks_and_guesses(run):
    board = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
    pages = {
        event.step: event.tensor_proto.string_val[0].decode()
        for event in board.Tensors("validation/blanks/text_summary")
    }
    assert sorted(pages) == [0, 6, 12]
    for page in pages.values():
        samples = page.split("\n\n---\n\n")
        assert len(samples) == 2
        for sample in samples:
            blanks = [row for row in sample.splitlines() if row.startswith("| ") and "was" not in row]
            assert blanks and all(f"**({number})**" in sample for number in range(1, len(blanks) + 1))
            assert all(row.count("%") == 3 for row in blanks), "three guesses with their chances"
    assert len(set(pages.values())) == 3, "the guesses change as the model learns"


def test_the_configuration_and_the_hyper_parameters_are_there(run):
    board = EventAccumulator(str(run), size_guidance={"tensors": 0}).Reload()
    (config,) = board.Tensors("config/text_summary")
    assert (run / "config.yaml").read_text() in config.tensor_proto.string_val[0].decode()
    assert "_hparams_/session_start_info" in board.summary_metadata
    assert b"train.learning_rate" in board.summary_metadata["_hparams_/session_start_info"].plugin_data.content


def test_a_resume_adds_its_configuration_and_no_second_session(tmp_path, monkeypatch):
    # Files of one second are read in the order of their names, which end in a counter of the process: 10 before 9. A
    # run that resumes begins later, in a process of its own.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    for step, rate in ((0, 1e-3), (3, 5e-4)):
        writer = MetricsWriter(tmp_path, step)
        writer.describe(step, f"rate: {rate}", {"train.learning_rate": rate})
        for after in range(step + 1, step + 5):
            writer.write(after, {"train/loss": 1.0})
        writer.close()
    board = EventAccumulator(str(tmp_path), size_guidance={"tensors": 0}).Reload()
    texts = [(event.step, event.tensor_proto.string_val[0].decode()) for event in board.Tensors("config/text_summary")]
    assert texts == [(0, "```yaml\nrate: 0.001```"), (3, "```yaml\nrate: 0.0005```")]
    hparams = [name for name in board.summary_metadata if name.startswith("_hparams_")]
    assert sorted(hparams) == ["_hparams_/experiment", "_hparams_/session_start_info"], "no word of how it has ended"
    content = b"".join(path.read_bytes() for path in tmp_path.glob("events.*"))
    assert content.count(b"_hparams_/session_start_info") == 1


def test_snapshots_of_the_embeddings(run):
    folders = sorted(path.parent.name for path in run.glob("*/word_embeddings/tensors.tsv") for path in [path.parent])
    assert folders == ["00000", "00006", "00012"]
    table = (run / "00012" / "word_embeddings" / "tensors.tsv").read_text().splitlines()
    assert len(table) == 64 and len(table[0].split("\t")) == 32, "vocabulary x hidden, whole though ZeRO-3 divides it"
    names = (run / "00012" / "word_embeddings" / "metadata.tsv").read_text().splitlines()
    assert len(names) == 64 and len(set(names)) == 64


def test_a_resume_keeps_the_snapshots_of_before(tmp_path):
    for step in (0, 5):
        writer = MetricsWriter(tmp_path, step)
        writer.embeddings(step, torch.ones(2, 3), ["a", "b"])
        writer.close()
    config = text_format.Parse((tmp_path / "projector_config.pbtxt").read_text(), ProjectorConfig())
    assert [each.tensor_name for each in config.embeddings] == ["word_embeddings:00000", "word_embeddings:00005"]
    for each in config.embeddings:
        assert (tmp_path / each.tensor_path).read_text().startswith("1.0\t1.0\t1.0\n")
        assert (tmp_path / each.metadata_path).read_text().split() == ["a", "b"]


def test_a_trace_of_each_process(run):
    traces = sorted((run / "profile").glob("rank-0000[01].*.pt.trace.json.gz"))
    assert len(traces) == 2
    with gzip.open(traces[0], "rt") as file:
        names = {event.get("name", "") for event in json.load(file)["traceEvents"]}
    assert any("AdamW.step" in name for name in names)


def test_speed_and_memory_of_all_processes(run):
    line = next(line for line in read_metrics(run) if "train/loss" in line)
    for name in ("speed/step_seconds", "speed/data_wait_seconds"):
        assert 0 <= line[f"{name}/min"] <= line[name] <= line[f"{name}/max"]
    assert line["memory/peak_gib"] > 0.1
    shares = [line["speed/communication_share"] for line in read_metrics(run) if "speed/communication_share" in line]
    assert [line["step"] for line in read_metrics(run) if "gradient_norm/layer_01" in line] == [4, 8, 12]
    assert len(shares) == 3 and all(0 < share < 1 for share in shares)


def test_a_loss_far_above_its_running_median_is_marked(tmp_path):
    writer = MetricsWriter(tmp_path)
    falling = [10 * 0.97**step + 0.05 * (-1) ** step for step in range(60)]
    for step, loss in enumerate(falling, 1):
        assert "train/loss_spike" not in writer.write(step, {"train/loss": loss}), "a loss that falls is no spike"
    assert writer.write(61, {"train/loss": 9.0})["train/loss_spike"] > 2
    writer.close()
    # A resume goes on with the same median.
    writer = MetricsWriter(tmp_path, 60)
    assert "train/loss_spike" in writer.write(61, {"train/loss": 9.0})
    writer.close()
    # Of a median of 0, which an objective of one's own can have, nothing is a multiple.
    writer = MetricsWriter(tmp_path / "zeros")
    for step in range(60):
        writer.write(step, {"train/loss": 0.0})
    assert "train/loss_spike" not in writer.write(60, {"train/loss": 0.1})
    writer.close()


def test_masked_tokens_after_next_tokens_are_no_spike(tmp_path):
    """Also if the run is resumed between them; a line may have both. Later spikes are found."""
    for resumed in (False, True):
        folder = tmp_path / str(resumed)
        writer = MetricsWriter(folder, trackers=())
        for step in range(1, 13):
            writer.write(step, {"train/loss": 4.0, "train/next_token_loss": 4.0})
        if resumed:
            writer.close()
            writer = MetricsWriter(folder, step=12, trackers=())
        assert "train/loss_spike" in writer.write(13, {"train/loss": 6.0, "train/next_token_loss": 6.0})
        both = {"train/loss": 5.0, "train/next_token_loss": 4.0, "train/mlm_loss": 6.0}
        assert "train/loss_spike" not in writer.write(14, both)
        for step in range(15, 27):
            assert "train/loss_spike" not in writer.write(step, {"train/loss": 6.0, "train/mlm_loss": 6.0})
        assert "train/loss_spike" in writer.write(27, {"train/loss": 9.0, "train/mlm_loss": 9.0})
        writer.close()


def on_a_full_disk(words: list[str]) -> int:
    """A command that writes events until no more fit, and in which another thread fails."""

    def write(*_) -> None:
        writer = MetricsWriter(Path(words[0]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        another = threading.Thread(target=lambda: 1 / 0, name="another")
        another.start()
        another.join()
        for step in range(9):
            writer.text("sentences", step, 1000 * "word ")

    cli.called = write
    return cli.main([])


def test_events_that_no_longer_fit_on_the_disk_are_one_line(tmp_path):
    """TensorBoard writes them in a thread of its own, whose traceback says nothing that the line does not."""
    said = finish(ForkedRun([str(tmp_path)], main=on_a_full_disk), status=2)
    assert re.findall("Exception in thread .*:", said) == ["Exception in thread another:"]
    assert re.search(r"ZeroDivisionError: .*\nerror: .*File too large; .*\n$", said), said


@pytest.mark.slow
def test_a_job_that_is_about_to_end_stops_with_a_checkpoint(data, tmp_path):
    """The scheduler's limit is near: one process of two would do, all of them stop at the same step."""
    command = pretrain_command(
        data, tmp_path / "run", "--train.max_steps", "100000", "--train.stop_before_seconds", "3600", processes=1
    )
    finish(start(command, SLURM_JOB_END_TIME=str(int(time.time()) + 3600 + 25)), status=75)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "requeue"
    steps = [line["step"] for line in curve(tmp_path / "run")]
    assert 0 < steps[-1] < 100000
    output = finish(start(command), status=2)
    assert "SLURM_JOB_END_TIME='' in the environment" in output
