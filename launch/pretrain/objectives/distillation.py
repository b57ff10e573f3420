"""Distillation: masked tokens, and a teacher's probabilities and hidden vectors, as DistilBERT (arXiv 1910.01108)."""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cloze.launch.config import PretrainConfig
from cloze.launch.pretrain.objectives.masked import MaskedTokens, is_real
from cloze.launch.pretrain.objectives.objective import Term, check_option
from cloze.launch.pretrained.loading import load_model
from cloze.launch.run import runs
from cloze.model.bert import BertForPreTraining, PreTrainingOutput
from cloze.model.config import BertConfig
from cloze.model.flops import TokenCounts, training_flops
from cloze.pipeline.errors import UserError
from cloze.pipeline.fields import MicroBatch
from cloze.pipeline.records import NO_LABEL
from cloze.pipeline.shards.manifest import Manifest
from cloze.pipeline.stores.places import Place, to_place
from cloze.pipeline.tokenization.tokenizer import Tokenizer

# With a lower temperature logits become infinite in fp32.
_LEAST_TEMPERATURE = 1e-3


class StudentOutput(NamedTuple):
    """Outputs of a student for a micro-batch with labels: M masked positions, T tokens."""

    student: PreTrainingOutput
    soft_losses: Tensor
    """(M,) fp32: temperature² times the divergence of the student's distribution from the teacher's; 0 without a
    label."""
    cosine_losses: Tensor
    """(T,) fp32: 1 - cosine of the last hidden states; 0 where all labels of the micro-batch are missing, a filler."""


class Student(BertForPreTraining):
    """BERT with a teacher, which also runs in each forward with labels. The teacher is not a submodule: it is neither
    trained nor saved in checkpoints.
    """

    def __init__(self, config: BertConfig, teacher: nn.Module, temperature: float, **options: Any) -> None:
        super().__init__(config, **options)
        # in a tuple, so that torch does not register it as a submodule
        self._teacher, self._temperature = (teacher,), temperature

    def forward(  # type: ignore[override]  # concatenated inputs alone
        self,
        *,
        masked_positions: Tensor | None = None,
        labels: Tensor | None = None,
        dropout_seed: int | None = None,
        **inputs: Any,
    ) -> PreTrainingOutput | StudentOutput:
        """Takes concatenated inputs like BertForPreTraining; without labels it returns the same outputs."""
        if labels is None:
            return super().forward(masked_positions=masked_positions, dropout_seed=dropout_seed, **inputs)
        (teacher,) = self._teacher
        self._match_student(teacher, labels.device)
        with torch.no_grad():
            teacher_output = teacher(
                masked_positions=masked_positions,
                output_hidden_states=True,
                **{name: value for name, value in inputs.items() if name != "next_sentence_label"},
            )
        output = super().forward(
            masked_positions=masked_positions, dropout_seed=dropout_seed, output_hidden_states=True, **inputs
        )
        counted = labels != NO_LABEL
        assert output.prediction_logits is not None and output.hidden_states is not None, "they were asked for"
        logits, teacher_logits = output.prediction_logits.float(), teacher_output.prediction_logits.float()
        log_probs, teacher_log_probs = ((each / self._temperature).log_softmax(-1) for each in (logits, teacher_logits))
        divergence = nn.functional.kl_div(log_probs, teacher_log_probs, log_target=True, reduction="none").sum(-1)
        vectors, teacher_vectors = output.hidden_states[-1].float(), teacher_output.hidden_states[-1].float()
        cosine_losses = (
            vectors.new_zeros(len(vectors))
            if vectors.shape != teacher_vectors.shape
            else (1 - nn.functional.cosine_similarity(vectors, teacher_vectors, dim=-1)) * is_real(labels)
        )
        student = output._replace(
            prediction_logits=None,
            hidden_states=None,
            num_masked=counted.sum(),
            mlm_losses=nn.functional.cross_entropy(logits, labels, ignore_index=NO_LABEL, reduction="none"),
            mlm_correct=(logits.argmax(-1) == labels) & counted,
        )
        return StudentOutput(student, divergence * self._temperature**2 * counted, cosine_losses)

    def _match_student(self, teacher: nn.Module, device: torch.device) -> None:
        """Move the teacher to the device and the dtype of the student's weights, once: with 16-bit weights there is no
        autocast, and a teacher in fp32 would run at a sixteenth of the GPU's rate.
        """
        dtype, own = self.bert.embeddings.word.weight.dtype, next(teacher.parameters())
        if (own.device, own.dtype) != (device, dtype):
            teacher.to(device, dtype)


class Distillation(MaskedTokens):
    """Loss of masked tokens, cross-entropy with the teacher's probabilities there, and cosine loss of the last hidden
    states at all tokens.

    Options: `teacher`: a Hugging Face folder or a run, of the shards' tokenizer. `temperature`: what both logits are
    divided by. `soft`, `masked`, `cosine`: weights in the loss; the defaults are DistilBERT's.
    """

    TERMS = ("mlm", "next_sentence", "soft", "cosine")

    def __init__(
        self,
        config: PretrainConfig,
        teacher: str,
        temperature: float = 2.0,
        soft: float = 5.0,
        masked: float = 2.0,
        cosine: float = 1.0,
    ) -> None:
        super().__init__(config)
        check_option("temperature", temperature, _LEAST_TEMPERATURE)
        for name, value in (("soft", soft), ("masked", masked), ("cosine", cosine)):
            check_option(name, value, 0)
        if not isinstance(teacher, str) or not teacher:  # empty, as an unset variable, it would be the current folder
            raise UserError(f"objective_options.teacher: found {teacher!r:.60}, expected the name of a folder or a run")
        loaded = load_model(teacher)
        self.teacher, self._temperature = loaded.model.eval().requires_grad_(False), temperature
        self.frozen = (self.teacher,)
        self.weights = {"mlm": masked, "soft": soft, "cosine": cosine}
        if not hasattr(self.teacher, "masked_lm"):
            raise UserError(
                f"objective_options.teacher: found a {type(self.teacher).__name__} in {teacher}, expected "
                "a model with a masked-LM head"
            )
        for source in config.sources:
            if source.path:  # `cloze plan` needs no data
                self._check_shards(to_place(source.path), teacher, loaded.tokenizer.fingerprint)
        widths = config.model.hidden_size, self.teacher.config.hidden_size
        if cosine and widths[0] != widths[1]:
            raise UserError(
                f"objective_options.cosine: found {cosine} with model.hidden_size {widths[0]} and a "
                f"teacher of {widths[1]}, expected 0: vectors of other widths have no angle"
            )

    def _check_shards(self, folder: Place, teacher: str, fingerprint: str) -> None:
        """Raise UserError if the teacher does not fit the shards: their length, or the fingerprint of its tokenizer."""
        longest, positions = Manifest.load(folder).max_length, self.teacher.config.max_position_embeddings
        if positions < longest:
            raise UserError(
                f"objective_options.teacher: found {positions} positions in {teacher}, expected at least "
                f"the {longest} tokens of the shards in {folder}"
            )
        shards = Tokenizer.from_folder(folder / runs.TOKENIZER).fingerprint
        if fingerprint != shards:
            raise UserError(
                f"objective_options.teacher: found a tokenizer with fingerprint {fingerprint[:12]} in "
                f"{teacher}, expected {shards[:12]}, that of the shards in {folder}; prepare them with "
                f"--tokenizer {teacher}"
            )

    def pretraining_output(self, output: StudentOutput) -> PreTrainingOutput:
        """The student's PreTrainingOutput."""
        return output.student

    def facts(self) -> dict[str, str]:
        """SHA-256 of the teacher's weights."""
        digest = hashlib.sha256()
        for _, tensor in sorted(self.teacher.state_dict().items()):
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
        return {"teacher_weights": digest.hexdigest()}

    def build_model(self) -> Student:
        """The student, whose weights are random or taken by `init_from` and `init_layers`."""
        return Student(self.config.model, self.teacher, self._temperature, **self.model_options)

    def flops(self, counts: TokenCounts) -> float:
        """FLOPs of the student's forward and backward and of the teacher's forward (a third of both)."""
        return super().flops(counts) + training_flops(self.teacher.config, counts) / 3

    def divisors(self, micro_batch: MicroBatch) -> dict[str, Tensor | float]:
        """Divisors: those of MaskedTokens; number of masked tokens; number of tokens (0 for a filler batch)."""
        counted = micro_batch["labels"] != NO_LABEL
        return {
            **super().divisors(micro_batch),
            "soft": counted.sum(),
            "cosine": is_real(micro_batch["labels"]) * len(micro_batch["input_ids"]),
        }

    def terms(self, output: StudentOutput, micro_batch: MicroBatch) -> dict[str, Term]:
        """The terms of MaskedTokens and two more, which count no hits."""
        return super().terms(output.student, micro_batch) | {
            "soft": Term(output.soft_losses),
            "cosine": Term(output.cosine_losses),
        }
