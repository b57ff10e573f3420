"""`cloze inspect` and `cloze prepare` on a terminal."""

import re

from cloze.launch.tools import data as data_commands
from cloze.pipeline.config import InspectConfig, MaskingConfig, PrepareConfig, SourceConfig, VocabularyConfig
from cloze.pipeline.jobs.prepare import prepare
from cloze.pipeline.jobs.vocabulary import train_vocabulary
from tests.pipeline import corpus
from tests.pipeline.corpus import shown


def test_documents_with_encoding_errors_are_reported(tmp_path):
    made = [b"ka lo \xff mi ren %d." % n if n < 3 else b"tas u mi ren %d." % n for n in range(20)]
    (tmp_path / "a.txt").write_bytes(b"\n\n".join(made))
    config = corpus.config(tmp_path, [tmp_path / "a.txt"], source=SourceConfig(encoding_errors="replace"))
    for text in (shown(data_commands.prepare, config), shown(data_commands.inspect, InspectConfig(config.output))):
        assert re.search(r"documents with encoding errors +│ 3 \(", text)


def test_brackets_in_a_text_are_shown_as_they_are(tmp_path):
    """Whole words with brackets in them, and brackets that are tokens of their own: neither is markup."""
    texts = [f"see [see the note] end [/quote] {word}" for word in corpus.words()]
    path = corpus.write_jsonl(tmp_path / "a.jsonl", texts)
    words = VocabularyConfig(model="words", min_frequency=1)
    train_vocabulary(PrepareConfig(input=[str(path)], output=str(tmp_path / "words"), vocabulary=words))
    dynamic = MaskingConfig(rate=1e-9, mode="dynamic")
    for name, expected in (("words", "see [see the note] end [/quote]"), ("tokenizer", "##d [ / q ##u")):
        output = str(tmp_path / f"[/{name}]")
        prepare(corpus.config(tmp_path, [path], tokenizer=str(tmp_path / name), output=output, masking=dynamic))
        text = shown(data_commands.inspect, InspectConfig(output, samples=8))
        assert output in text.replace("\n", "") and "[/" in text
        assert expected in re.sub(r"\S+\{(.*?)\}", r"\1", text), text
