"""Tokenizers of the kinds that released encoders have, trained on the spot on lines in seven scripts."""

from functools import lru_cache

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from cloze.pipeline.tokenization.backends import add_special_tokens, wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer
from tests.pipeline import corpus

LINES = [
    "The cat sat on the mat, reading a book about naïve cafés 🙂.",
    "Another cat has read the same books, and sat down with the others 👩‍👩‍👧.",
    "Кошка сидела на коврике и читала книгу о кошках.",
    "القطة تجلس على السجادة وتقرأ كتابا عن القِطَط.",
    "แมวนั่งบนเสื่อและอ่านหนังสือเกี่ยวกับแมวตัวอื่น",
    "猫坐在垫子上读一本关于猫的书，然后又读了一本书。",
    "猫はマットの上に座って、猫についての本を読みました。か\u3099",
    "고양이가 매트 위에 앉아 고양이에 대한 책을 읽었다.",
]
KINDS = [
    "Unigram",
    "Unigram, no spaces cut",
    "BPE with ▁",
    "BPE with ▁, bytes",
    "byte-level BPE",
    "byte-level BPE, Llama 3's cuts",
    "Chinese WordPiece",
]
# Of the tokenizer.json of Llama 3 and EuroBERT.
LLAMA_3 = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


def family(kind: str) -> Tokenizer:
    """The tokenizer of a kind, whose rules a test may change; its special tokens are `corpus.NAMES`."""
    return Tokenizer(tokenizers.Tokenizer.from_str(_trained(kind)), corpus.NAMES)


@lru_cache(maxsize=len(KINDS))
def _trained(kind: str) -> str:
    """The content of its tokenizer.json."""
    names = list(corpus.NAMES.values())
    options = {"vocab_size": 420, "special_tokens": names, "show_progress": False}
    if kind == "Chinese WordPiece":
        characters = sorted({character for line in LINES for character in line if not character.isspace()})
        listed = [*names, *characters, *(f"##{character}" for character in characters), "cat", "книг", "##у"]
        return wordpiece_backend({token: n for n, token in enumerate(listed)}, corpus.NAMES, True, None).to_str()
    if kind.startswith("Unigram"):
        backend = tokenizers.Tokenizer(models.Unigram())
        backend.normalizer = normalizers.NFKC()
        space = pre_tokenizers.Metaspace()
        backend.pre_tokenizer = (  # XLM-R's, and T5's
            pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space]) if kind == "Unigram" else space
        )
        backend.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token=corpus.NAMES["unknown"], **options)
    elif kind.startswith("byte-level BPE"):
        backend = tokenizers.Tokenizer(models.BPE(ignore_merges=kind.endswith("cuts")))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if kind.endswith("cuts"):
            cuts = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3), "isolated")
            of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([cuts, of_bytes])
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **options)
    else:
        fallback = kind.endswith("bytes")  # Llama 2's and Gemma's; the marks of spaces are the normaliser's
        backend = tokenizers.Tokenizer(models.BPE(unk_token=corpus.NAMES["unknown"], byte_fallback=fallback))
        # cut at spaces while it is trained: SentencePiece's pieces have no space inside
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        bytes_of = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
        options |= {"vocab_size": 420 + len(bytes_of), "special_tokens": names + bytes_of}
        trainer = trainers.BpeTrainer(limit_alphabet=120 if fallback else 1000, **options)
    backend.train_from_iterator(LINES * 3, trainer)
    if kind.startswith("BPE"):
        backend = _without_specials_of_bytes(backend)
        marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.pre_tokenizer, backend.normalizer = None, normalizers.Sequence(marks)
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_special_tokens(backend, corpus.NAMES)
    return backend.to_str()


def _without_specials_of_bytes(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same model, whose bytes are ordinary tokens."""
    again = tokenizers.Tokenizer(backend.model)
    again.add_special_tokens(list(corpus.NAMES.values()))
    return again
