"""`LoadedModel`: a model that is ready for use, with its tokenizer and settings.

Imports no torch, since the operations that refer to it are parsed without torch.
"""

from typing import Any

from cloze.launch.system.console import Console
from cloze.launch.system.environment.gpus import device_type
from cloze.launch.texts.encoding import TextEncoder
from cloze.launch.texts.labels import looking_alike
from cloze.launch.texts.settings import Answering, Truncation, Vectors
from cloze.launch.texts.tables import Columns
from cloze.model.config import BertConfig
from cloze.pipeline.errors import UserError
from cloze.pipeline.tokenization.backends import stand_around_texts
from cloze.pipeline.tokenization.tokenizer import Tokenizer

_PADDED_TO = 128  # rows are rounded up to multiples of it at most: NVIDIA's tile of a matrix product
_RESERVED = 0.1  # of the rows, for tokens to come: published encoders have 0.4% (mDeBERTa-v3) or fewer


class LoadedModel:
    """A model in evaluation mode on its device, and its tokenizer.

    The model's configuration is the attribute `config`; `encoder` encodes texts.

    Args:
        model: any model of `cloze.model`.
        source: its folder, for messages.
        truncation: maximum length of the training texts, and how longer ones were truncated; None: as many tokens as
            the model has positions.
        answering: how answers were found in training; None: defaults.
        columns: columns of the training table; None: unknown.
        vectors: how vectors were pooled in training; None: it was not trained for vectors.
        trained_here: whether it was trained on texts as Cloze joins them, whatever its tokenizer's files say.
        revision: which of its versions it is, as text: the step of a run, the commit of a hub model; None: unknown.

    Raises:
        UserError: the tokenizer has more tokens than the model's vocabulary.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Tokenizer,
        source: str = "model",
        truncation: Truncation | None = None,
        answering: Answering | None = None,
        columns: Columns | None = None,
        vectors: Vectors | None = None,
        revision: str | None = None,
        trained_here: bool = False,
    ) -> None:
        self.device = device_type()
        self.model = model.to(self.device).eval()
        self.tokenizer, self.source, self.columns = tokenizer, source, columns
        self.vectors = vectors or Vectors()
        self.revision, self._trained_here = revision, trained_here
        self.config: BertConfig = model.config
        check_vocabulary(tokenizer, self.config, source)
        head = getattr(model, "head", None)
        if head and (alike := looking_alike(head.labels)):
            Console().warn(f"{source}: its labels {alike} look alike; they are two classes")
        pieces = (head.piece_length, head.piece_step) if head and head.pieces != "none" else None
        positions = self.config.max_position_embeddings
        names = tokenizer.names
        self._around = f"{names['classification']} TEXT {names['separator']}"
        self.encoder = TextEncoder(tokenizer, positions, pieces, truncation, answering, self._other_pairs())
        typed = self.config.type_vocab_size > 1 and tokenizer.gives_token_types(as_saved=True)
        if self._is_joined and not stand_around_texts(tokenizer.backend, names, pairs=False, segments=typed):
            Console().warn(
                f"{source}: its tokenizer puts other special tokens around a text than {self._around}, which Cloze "
                "puts, or gives it another segment than 0: answers differ from those of other libraries"
            )

    @property
    def _is_joined(self) -> bool:
        """Whether the tokenizer itself says how the model's texts were joined; a bare vocabulary does not."""
        backend, folder = self.tokenizer.backend, self.tokenizer.folder
        if self._trained_here:
            return False
        return backend.post_processor is not None or (folder is not None and (folder / "tokenizer.json").is_file())

    def _other_pairs(self) -> str | None:
        """Why pairs are refused: the model's own tokenizer joins them in another way; None: in ours."""
        backend, names = self.tokenizer.backend, self.tokenizer.names
        typed = self.config.type_vocab_size > 1
        numbered = not typed or self.tokenizer.gives_token_types(as_saved=True)
        alike = stand_around_texts(backend, names, segments=typed)
        if numbered and alike or not self._is_joined:
            return None
        if alike:
            return (
                f"{self.source}: found a pair of texts for a model with token types whose tokenizer gives none, "
                "expected single texts; if it was trained with them, add token_type_ids to model_input_names in its "
                "tokenizer_config.json, else fine-tune it first, with cloze finetune"
            )
        return (
            f"{self.source}: found a pair of texts for a model whose tokenizer joins them in another way than "
            f"{self._around} PAIR {names['separator']}, expected single texts: with Cloze's special tokens and types "
            "its answers would be others; fine-tune it first, with cloze finetune"
        )


def check_vocabulary(tokenizer: Tokenizer, config: BertConfig, source: object) -> None:
    """Raise UserError for a tokenizer that can't be the model's: of more tokens than its matrix has rows, or with
    another padding token where that is where positions begin, so that what is padding for one is a word for the other.
    Warn of one that has far fewer tokens.
    """
    tokens, rows = tokenizer.vocab_size, config.vocab_size
    if tokens > rows:
        raise UserError(
            f"{source}: found a tokenizer of {tokens:,} tokens in {tokenizer.folder}, expected at most {rows:,}, the "
            "model's vocab_size; take the tokenizer it was trained with"
        )
    if rows - tokens > max(_PADDED_TO, rows * _RESERVED):
        Console().warn(
            f"{source}: its tokenizer, {tokenizer.folder}, has {tokens:,} tokens for {rows:,} rows of word embeddings: "
            "is it the model's own?"
        )
    found = tokenizer.special_tokens.pad
    if config.first_position and found != config.pad_token_id:
        raise UserError(
            f"{source}: found {tokenizer.names['pad']!r}, id {found}, as the tokenizer's padding token, expected id "
            f"{config.pad_token_id}, the model's pad_token_id, after which its positions begin; name that one in "
            "tokenizer_config.json (pad_token), or fix config.json"
        )
