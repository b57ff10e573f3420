"""What a run masks and how large its batches are, by the samples it has seen."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from cloze.launch.commands import parse
from cloze.launch.config import DataSource, MaskingPhase, MixtureConfig, PretrainMaskingConfig
from cloze.launch.config.training import BatchPhase
from cloze.launch.pretrain.data import open_data
from cloze.launch.pretrain.micro_batch_size import probe_batches
from cloze.launch.pretrain.schedules import batch_warmup, run_masking, samples_of_run
from cloze.pipeline.samples.masking import RatePhases
from tests.launching import pretrain_arguments
from tests.synthetic import make_shards


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Pairs with stored masks, and single sequences whose masks are drawn."""
    folder = tmp_path_factory.mktemp("schedules")
    make_shards(folder / "wiki")
    make_shards(folder / "web", train=90, seed=1, mask_sets=0, pairs=False, max_length=16)
    return folder


def opened(folder, data, **sections):
    config = parse("pretrain", pretrain_arguments(folder / "web", folder / "run")[1:])
    config = replace(config, data=data, **sections)
    return config, open_data(config)[0]


def test_masking_by_phase_and_what_the_probe_counts(data):
    """`micro_batch_size: auto` tried with the manifest's rate, whatever the run's was."""
    phases = PretrainMaskingConfig(phases=[MaskingPhase(0.4, until_tokens=500), MaskingPhase(0.1)])
    config, made = opened(data, str(data / "web"), masking=phases)
    masking = run_masking(config, made)
    assert masking.rate == RatePhases((0.4, 0.1), (made.position(500),))
    assert made.most_masked(masking) == 0.4
    shares = PretrainMaskingConfig(phases=[MaskingPhase(0.2, until_share=0.25), MaskingPhase(0.3)])
    config, made = opened(data, str(data / "web"), masking=shares)
    end = config.train.max_steps * config.train.global_batch_size
    assert run_masking(config, made).rate.ends == (end // 4,)
    assert batch_warmup(config, made) is None and samples_of_run(config, made) == end
    both = MixtureConfig([DataSource(str(data / "wiki")), DataSource(str(data / "web"))])
    mixed = opened(data, both)[1]
    assert mixed.most_masked(run_masking(config, made)) == max(0.3, mixed.manifests[0].masked_share)
    (longest, *_) = probe_batches(made, run_masking(config, made), torch.device("cpu")).of(8)
    assert len(longest["labels"]) == 8 * np.ceil(1.25 * 0.3 * 16)


def test_the_samples_of_a_run_whose_batches_grow(data):
    """Against a count of every step: 4 samples a step, 8 as soon as 100 tokens were seen, 16 after 300."""
    config, made = opened(data, str(data / "web"))
    phases = [BatchPhase(4, until_tokens=100), BatchPhase(8, until_tokens=300)]
    config = replace(config, train=replace(config.train, max_steps=20, global_batch_size=16, batch_phases=phases))
    samples = 0
    for _ in range(20):
        samples += 4 if samples < made.position(100) else 8 if samples < made.position(300) else 16
    assert samples_of_run(config, made) == samples > 20 * 8
