"""Per-source statistics of a mixture: training losses, and the share of each source that was seen."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from cloze.launch.pretrain.data import TrainingData
from cloze.launch.training.objective import ModelOutput
from cloze.model.bert import PreTrainingOutput
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.loading.mixture import MixtureOrder
from cloze.pipeline.records import NO_LABEL

# Sums of each source in this order; name of each mean, and the sums that it is computed from.
_SUMS = ("mlm_loss", "masked", "mlm_correct", "next_sentence_loss", "pairs", "next_sentence_correct")
MEANS = {"mlm_loss": (0, 1), "mlm_accuracy": (2, 1), "next_sentence_loss": (3, 4), "next_sentence_accuracy": (5, 4)}


class Sources:
    """Losses, accuracies and passes of each source. Sums stay on the device, so that the host does not wait.

    Args:
        streams: number of data streams of the run.
        part_of: returns the PreTrainingOutput in the model's output (Objective.pretraining_output).
    """

    def __init__(
        self,
        data: TrainingData,
        streams: int,
        part_of: Callable[[ModelOutput], PreTrainingOutput] = lambda output: output,
    ) -> None:
        self.names, self._part_of = data.names, part_of
        self._order = MixtureOrder(data.phases, streams)
        self._epoch_sizes = [
            manifest.splits["train"].counts["samples"] / manifest.pair_sets for manifest in data.manifests
        ]

    @property
    def num_sums(self) -> int:
        """Length of the result of `sums`."""
        return len(self.names) * len(_SUMS)

    def sums(self, output: ModelOutput, micro_batch: MicroBatch, sources: Tensor) -> Tensor:
        """Sums over a micro-batch: float64 (num_sums,), source after source.

        Args:
            output: output of the model.
            micro_batch: its inputs.
            sources: index of each sample's source, int64 (B,).
        """
        if micro_batch.get("causal"):  # a source's losses are those of masked tokens, and pairs have none then
            return torch.zeros(self.num_sums, dtype=torch.float64, device=sources.device)
        part = self._part_of(output)
        assert part.mlm_losses is not None and part.mlm_correct is not None, "training has labels"
        sample = (
            torch.searchsorted(micro_batch["sequence_offsets"].long(), micro_batch["masked_positions"], right=True) - 1
        )
        of_masked = torch.stack([part.mlm_losses.detach(), micro_batch["labels"] != NO_LABEL, part.mlm_correct], 1)
        table = torch.zeros(len(self.names), len(_SUMS), dtype=torch.float64, device=sources.device)
        table[:, :3].index_add_(0, sources[sample], of_masked.double())
        if part.next_sentence_losses is not None:
            assert part.next_sentence_correct is not None, "they come with the losses"
            of_samples = torch.stack(
                [
                    part.next_sentence_losses.detach(),
                    micro_batch["next_sentence_label"] != NO_LABEL,
                    part.next_sentence_correct,
                ],
                1,
            )
            table[:, 3:].index_add_(0, sources, of_samples.double())
        return table.flatten()

    def scalars(self, sums: list[float]) -> dict[str, float]:
        """Means by `MEAN/SOURCE`; none for a source without samples."""
        rows = np.array(sums).reshape(len(self.names), len(_SUMS))
        return {
            f"{mean}/{name}": float(row[total] / row[count])
            for mean, (total, count) in MEANS.items()
            for name, row in zip(self.names, rows, strict=True)
            if row[count]
        }

    def progress(self, position: int) -> dict[str, float]:
        """Samples of each source before a position of the run, and the number of passes over the source that they
        make.
        """
        (seen,) = self._order.consumed(np.array([position])).tolist()
        scalars = {f"samples/{name}": count for name, count in zip(self.names, seen, strict=True)}
        return scalars | {
            f"epoch/{name}": count / size for name, count, size in zip(self.names, seen, self._epoch_sizes, strict=True)
        }
