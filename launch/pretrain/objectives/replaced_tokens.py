"""Replaced-token detection, as ELECTRA (arXiv 2003.10555): a generator fills masks, a discriminator detects them."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives.masked import MaskedTokens, is_real
from cloze.launch.pretrain.objectives.objective import Term, check_option, check_standard
from cloze.model.bert import BertPreTrained, PreTrainingOutput, encode_masked
from cloze.model.config import BertConfig
from cloze.model.dropout import DropoutKey
from cloze.model.embeddings import Embeddings
from cloze.model.families import family_of
from cloze.model.flops import TokenCounts, training_flops
from cloze.model.heads import DetectionHead
from cloze.model.sampling import draw_tokens, token_bits
from cloze.model.tasks import BertForMaskedLM, detection_losses
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.records import NO_LABEL

GENERATOR = "generator."  # prefix of the names of its parameters


class ElectraOutput(NamedTuple):
    """Outputs of both models for a micro-batch with labels."""

    generator: PreTrainingOutput
    detection_losses: Tensor
    """(T,) fp32, 0 in a filler of an evaluation."""
    detection_correct: Tensor
    """(T,) bool."""


def generator_config(
    model: BertConfig, generator_size: float = 0.25, generator_layers: int | None = None
) -> BertConfig:
    """The generator's configuration: a share of the discriminator's heads (at least one, of the same size) and of its
    feed-forward size; embeddings are shared. Grouped queries remain, as far as that number of heads allows.
    """
    heads = max(1, round(model.num_attention_heads * generator_size))
    shared = model.num_key_value_heads
    layers = model.num_hidden_layers if generator_layers is None else generator_layers
    return replace(
        model,
        embedding_size=model.embedding_width,
        num_attention_heads=heads,
        num_key_value_heads=shared and math.gcd(heads, shared),
        hidden_size=heads * model.head_size,
        intermediate_size=max(1, model.intermediate_size * heads // model.num_attention_heads),
        num_hidden_layers=layers,
        num_layer_groups=model.num_layer_groups and min(model.num_layer_groups, layers),
    )


class GeneratorAndDiscriminator(BertPreTrained):
    """The discriminator, with the parameters of BertForReplacedTokenDetection, and the generator as its submodule."""

    uses_pooler = False

    def __init__(self, config: BertConfig, generator: BertConfig, temperature: float, **options: Any) -> None:
        super().__init__(config, **options)
        self.detection = DetectionHead(config)
        self.generator = BertForMaskedLM(generator, **options)
        _share(self.bert.embeddings, self.generator)
        self._temperature = temperature

    def forward(
        self,
        input_ids: Tensor,
        *,  # concatenated inputs alone
        sequence_offsets: Tensor,
        masked_positions: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        dropout_seed: int | None = None,
        step_seed: int = 0,
        **inputs: Any,
    ) -> PreTrainingOutput | ElectraOutput:
        """Takes concatenated inputs like BertForPreTraining; next-sentence labels are ignored. Without labels it
        returns the generator's output. `step_seed` and the ids of a sample are the key of the sampling in it.
        """
        inputs["sequence_offsets"] = sequence_offsets
        key = None if dropout_seed is None else DropoutKey(dropout_seed, self.config.num_hidden_layers + 2).at(0)
        if labels is None or masked_positions is None:
            return self.generator(input_ids, masked_positions=masked_positions, dropout_seed=key, **inputs)
        head = self.generator.masked_lm
        _, hidden = encode_masked(
            self.generator.bert, masked_positions, input_ids=input_ids, dropout_seed=key, **inputs
        )
        losses, correct = head(hidden, labels)
        with torch.no_grad():
            scores = head(hidden)
        said = PreTrainingOutput(mlm_losses=losses, mlm_correct=correct, num_masked=(labels != NO_LABEL).sum())
        original = input_ids.index_put((masked_positions,), labels.where(labels != NO_LABEL, 0))
        bits = token_bits(step_seed, original, sequence_offsets, masked_positions)
        shown = original.index_put((masked_positions,), draw_tokens(scores, bits, self._temperature))
        logits = self.detection(self.bert(shown, dropout_seed=dropout_seed, **inputs).last_hidden_state)
        detection, correct = detection_losses(logits, shown != original)
        real = is_real(labels)
        return ElectraOutput(said, detection * real, correct & real)


def _share(embeddings: Embeddings, generator: BertForMaskedLM) -> None:
    """Share the embeddings with the generator, except its projection to its own hidden size and a norm after that.
    Parameters are shared, modules are not, since ZeRO-3 would fetch and release a shared module twice.
    """
    own, last = generator.bert.embeddings, generator.config.embedding_projection == "last"
    for name, parameter in embeddings.named_parameters():
        if not name.startswith("projection." if last else ("projection.", "norm.")):
            module, _, leaf = name.rpartition(".")
            setattr(own.get_submodule(module), leaf, parameter)
    if generator.config.tie_word_embeddings:
        shared = embeddings.word.weight
        assert isinstance(shared, nn.Parameter)  # torch does not declare it
        generator.masked_lm.decoder.weight = shared


_LARGEST = 16  # times the discriminator's heads and layers; ELECTRA's heads are a quarter to a half


class ReplacedTokens(MaskedTokens):
    """The generator's loss over masked tokens plus the discriminator's loss over all tokens.

    Options: `generator_size`: share of the discriminator's heads (and so of its width) that the generator has.
    `generator_layers`: its layers; null: the discriminator's. `temperature`: what its scores are divided by when tokens
    are drawn. `detection`: weight of the discriminator's loss. The defaults are ELECTRA-Small's.
    """

    TERMS = ("mlm", "detection")
    STEP_SEED = True

    def __init__(
        self,
        config: PretrainConfig,
        generator_size: float = 0.25,
        generator_layers: int | None = None,
        temperature: float = 1.0,
        detection: float = 50.0,
    ) -> None:
        super().__init__(config)
        check_option("generator_size", generator_size, 0, _LARGEST)
        if generator_layers is not None:
            check_option("generator_layers", generator_layers, 1, _LARGEST * config.model.num_hidden_layers, whole=True)
        check_option("temperature", temperature, 1e-3)
        check_option("detection", detection, 0)
        check_standard(config, "the generator shares embeddings of a width that is not its own")
        if config.model.mlm_head == "linear":
            raise UserError(
                "model.mlm_head: found linear with objective replaced_tokens, expected bert or deberta: the generator "
                "is narrower than the embeddings that it shares, and that head has no map to their width"
            )
        alone = family_of(config.model) in (None, "bert")  # which is an ELECTRA, or not in transformers
        if alone and (config.model.embedding_size is None or config.model.pooler):
            raise UserError(
                f"model.embedding_size, model.pooler: found {config.model.embedding_size or 'null'} and "
                f"{str(config.model.pooler).lower()} with objective replaced_tokens, expected a width that "
                "both models share and false: add --model.embedding_size "
                f"{config.model.hidden_size} --model.pooler false, as ELECTRA-Base has them"
            )
        self.generator = generator_config(config.model, generator_size, generator_layers)
        self._temperature, self.weights = temperature, {"detection": detection}

    def build_model(self) -> GeneratorAndDiscriminator:
        """Both models. An export has the discriminator, or on request the generator."""
        return GeneratorAndDiscriminator(self.config.model, self.generator, self._temperature, **self.model_options)

    def pretraining_output(self, output: ElectraOutput) -> PreTrainingOutput:
        """The generator's."""
        return output.generator

    def flops(self, counts: TokenCounts) -> float:
        """FLOPs of the generator, and of the discriminator with its head over all tokens."""
        model = self.config.model
        return (
            training_flops(self.generator, counts)
            + training_flops(model, replace(counts, masked=0))
            + 6.0 * counts.tokens * model.hidden_size * (model.hidden_size + 1)
        )

    def divisors(self, micro_batch: MicroBatch) -> dict[str, Tensor | float]:
        """Divisors: number of masked tokens; number of tokens (0 for a filler batch)."""
        return {
            "mlm": super().divisors(micro_batch)["mlm"],
            "detection": is_real(micro_batch["labels"]) * len(micro_batch["input_ids"]),
        }

    def terms(self, output: ElectraOutput, micro_batch: MicroBatch) -> dict[str, Term]:
        """One term for each model."""
        return {
            "mlm": super().terms(output.generator, micro_batch)["mlm"],
            "detection": Term(output.detection_losses, output.detection_correct),
        }
