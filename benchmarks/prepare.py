"""How fast is preparing, against the tokenizer that it uses?

    python benchmarks/prepare.py --quick
    python benchmarks/prepare.py --corpus 'books-00.jsonl.gz' --json figures.json

One core each, in the same run, each in a fresh process with its imports done: bare `tokenizers.encode_batch_fast` on
the sentences; Hugging Face `map` + `group_texts` + collator; all of ours (reading, sentences, pairs, ten mask sets,
checksums, zstd); then ours with one and two workers, and two jobs of one worker at once, the limit of two workers;
and a vocabulary learned by `tokenizers` alone, from texts in memory, and by `cloze vocab`, which reads them from the
files first. Rounds alternate, and the best of each counts, so that other load on the machine falls on all alike.

    python benchmarks/prepare.py --growth --corpus 'books-*.jsonl.gz' --json figures.json

How seconds a token grow, one worker: with the corpus (once, 4 and 16 times as large, each copy of a document made
distinct by its first words), with rounds of exchange (16 times, the limit of parts lowered so that it takes one and
two), and with the number of files (50,000 of 1 KB against one of the same text). By the clock, and by the CPU's time,
which other load on the machine changes less.
"""

import argparse
import ast
import glob
import gzip
import itertools
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from synthetic_batches import own_command

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BARE_BYTES = 6 << 20  # of text for the slow ones: a rate needs no more
VOCABULARY = 8192
ONE_CORE = {"TOKENIZERS_PARALLELISM": "false"}
FILES = 8
MADE_BYTES = 96 << 20  # of text, so that two workers have more to do than to start
GROWTH = (1, 4, 16)  # times the corpus
GROWTH_BYTES = 12 << 20  # of made text, once: so that ten times as much is a matter of seconds


def found_text() -> list[str]:
    """English that lies on any machine: the docstrings of the standard library."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                texts.append(text)
    return texts


def made_corpus(folder: Path, text_bytes: int = MADE_BYTES) -> list[str]:
    """Documents of the sentences of docstrings in new orders, eight files."""
    from cloze.pipeline.tokenization.sentences import split

    sentences = [sentence for text in found_text() for sentence in split(text)]
    rng = random.Random(0)
    for number in range(FILES):
        size = 0
        with gzip.open(folder / f"made-{number}.jsonl.gz", "wt", compresslevel=1) as file:
            while size < text_bytes // FILES:
                text = " ".join(rng.choices(sentences, k=120))
                file.write(json.dumps({"text": text}) + "\n")
                size += len(text)
    return sorted(map(str, folder.glob("made-*")))


def sentences_of(files: list[str], limit: int) -> list[str]:
    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.readers import plan, read
    from cloze.pipeline.tokenization.sentences import split

    found, size = [], 0
    _, tasks = plan(PrepareConfig(input=files))
    for task in tasks:
        for document in read(task):
            if size > limit:
                return found
            found += split(document.text.decode())
            size += len(document.text)
    return found


def bare(files: list[str], tokenizer: str, **_) -> tuple[int, float]:
    """(tokens, seconds) of the library alone."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    sentences = sentences_of(files, BARE_BYTES)
    began = time.perf_counter()
    encoded = backend.encode_batch_fast(sentences, add_special_tokens=False)
    seconds = time.perf_counter() - began
    return sum(len(item.ids) for item in encoded), seconds


def hugging_face(files: list[str], tokenizer: str, folder: str, **_) -> tuple[int, float]:
    """(tokens, seconds) of `map`, `group_texts` and the collator that masks."""
    import datasets
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    datasets.disable_progress_bars()
    fast = AutoTokenizer.from_pretrained(tokenizer)
    table = datasets.Dataset.from_dict({"text": sentences_of(files, BARE_BYTES // 3)})
    table.save_to_disk(f"{folder}/texts")
    table = datasets.load_from_disk(f"{folder}/texts")

    def group_texts(batch):
        flat = [token for ids in batch["input_ids"] for token in ids]
        count = len(flat) // 128 * 128
        return {"input_ids": [flat[start : start + 128] for start in range(0, count, 128)]}

    began = time.perf_counter()
    encoded = table.map(
        lambda batch: {"input_ids": fast(batch["text"], add_special_tokens=False)["input_ids"]},
        batched=True,
        remove_columns=["text"],
    )
    tokens = sum(map(len, encoded["input_ids"]))
    grouped = encoded.map(group_texts, batched=True)
    collator = DataCollatorForLanguageModeling(fast)
    for start in range(0, len(grouped), 64):
        collator([{"input_ids": ids} for ids in grouped[start : start + 64]["input_ids"]])
    return tokens, time.perf_counter() - began


def ours(
    files: list[str], tokenizer: str, folder: str, workers: int = 1, compression: str = "zstd"
) -> tuple[int, float]:
    """(tokens, seconds) of all that `cloze prepare` does."""
    from cloze.pipeline.config import PrepareConfig, ShardsConfig
    from cloze.pipeline.jobs.prepare import prepare

    output = f"{folder}/shards"
    shutil.rmtree(output, ignore_errors=True)
    config = PrepareConfig(
        input=files, output=output, tokenizer=tokenizer, workers=workers, shards=ShardsConfig(compression=compression)
    )
    began = time.perf_counter()
    manifest = prepare(config)
    seconds = time.perf_counter() - began
    shards = manifest.splits["train"].shards
    size = sum(shard.bytes for shard in shards) / sum(shard.tokens for shard in shards)
    print(f"    {compression}, {workers} worker(s): {seconds:.2f} s, {size:.2f} bytes a token with 10 mask sets")
    return manifest.counts["tokens"], seconds


def timed(
    files: list[str], tokenizer: str, folder: str, limit: int | None = None, form: str = "auto"
) -> tuple[int, tuple[float, float]]:
    """(tokens, (seconds, seconds of CPU)) of all that `cloze prepare` does. limit: parts that are read at once."""
    from cloze.pipeline.config import PrepareConfig, SourceConfig
    from cloze.pipeline.jobs import prepare as preparing

    preparing.FILES_AT_ONCE = limit or preparing.FILES_AT_ONCE
    output = f"{folder}/shards"
    config = PrepareConfig(input=files, output=output, tokenizer=tokenizer, source=SourceConfig(format=form))
    began, cpu = time.perf_counter(), time.process_time()
    manifest = preparing.prepare(config)
    seconds = time.perf_counter() - began, time.process_time() - cpu
    shutil.rmtree(output)
    return manifest.counts["tokens"], seconds


def grown_corpus(files: list[str], folder: Path) -> list[list[str]]:
    """The files' documents so many times as the largest corpus has them, no two alike: the files of each copy."""
    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.readers import plan, read

    _, tasks = plan(PrepareConfig(input=files))
    copies = [
        [str(folder / f"copy-{copy:02d}-{number:03d}.jsonl.gz") for number in range(len(tasks))]
        for copy in range(max(GROWTH))
    ]
    for number, task in enumerate(tasks):
        texts = [document.text.decode() for document in read(task)]
        for copy, names in enumerate(copies):
            with gzip.open(names[number], "wt", compresslevel=1, encoding="utf-8") as file:
                file.writelines(json.dumps({"text": f"Volume {copy}. {text}"}) + "\n" for text in texts)
    return copies


def many_files(files: list[str], folder: Path, count: int) -> tuple[str, str]:
    """`count` texts of about 1 KB each: a folder with a file for each, and one file of all."""
    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.readers import plan, read

    _, tasks = plan(PrepareConfig(input=files))
    words = (" ".join(document.text.decode().split()) for task in tasks for document in read(task))
    texts = (text[start : start + 1000].strip() for text in words for start in range(0, len(text), 1000))
    chosen = list(itertools.islice(texts, count))
    if len(chosen) < count:
        sys.exit(f"--corpus: found text for {len(chosen):,} files of 1 KB, expected {count:,}; give more of it")
    for number, text in enumerate(chosen):
        path = folder / f"many/{number // 1000:04d}/{number:08d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (folder / "whole.txt").write_text("\n\n".join(chosen), encoding="utf-8")
    return str(folder / "many"), str(folder / "whole.txt")


def grow(files: list[str], folder: Path, rounds: int, json_file: str | None, quick: bool) -> None:
    """Seconds a token against those of the corpus once, which is measured before, between and after."""
    begin(vocabulary_by_ours, files=files[:1], folder=str(folder))()
    common = {"tokenizer": str(folder / "vocab"), "folder": str(folder)}
    many, whole = many_files(files, folder, 5_000 if quick else 50_000)
    copies = grown_corpus(files, folder)
    corpora = {times: [name for names in copies[:times] for name in names] for times in GROWTH}
    several = len(corpora[GROWTH[1]])
    contenders = {
        "once": {"files": corpora[1]},
        **{f"{times} times": {"files": corpora[times]} for times in GROWTH[1:]},
        f"{GROWTH[1]} times, one round": {"files": corpora[GROWTH[1]], "limit": several // 2},
        f"{GROWTH[1]} times, two rounds": {"files": corpora[GROWTH[1]], "limit": max(2, int(several**0.5) - 1)},
        "one file": {"files": [whole]},
        "many files": {"files": [many], "form": "file"},
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in contenders:
            for each in ("once", name) if name.endswith("times") else (name,):
                tokens, seconds = begin(timed, **common, **contenders[each])()
                spent[each].append((seconds[0] / tokens, seconds[1] / tokens))
                print(f"    {each:24} {tokens / 1e6:7.1f} M tokens, {seconds[0]:6.2f} s, {seconds[1]:6.2f} of CPU")
    found = {name: [min(values) for values in zip(*each, strict=True)] for name, each in spent.items()}
    against = {
        name: "once" if name.endswith("times") else contender
        for name, contender in zip(
            found,
            ["once", *["once"] * len(GROWTH[1:]), *[f"{GROWTH[1]} times"] * 2, "one file", "one file"],
            strict=True,
        )
    }
    ratios = {name: [mine / its for mine, its in zip(found[name], found[against[name]], strict=True)] for name in found}
    figures = {
        "linear_ratio": ratios[f"{GROWTH[-1]} times"][0],
        "linear_ratio_cpu": ratios[f"{GROWTH[-1]} times"][1],
        "small_files_ratio": ratios["many files"][0],
        "small_files_ratio_cpu": ratios["many files"][1],
        "ratios": {name: {"to": against[name], "seconds": ratio[0], "cpu": ratio[1]} for name, ratio in ratios.items()},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    print(f"\n{figures['hardware']}; nanoseconds a token by the clock and of CPU, and ratios")
    for name, (seconds, cpu) in found.items():
        print(
            f"{name:24} {seconds * 1e9:6.0f} {cpu * 1e9:6.0f}   {ratios[name][0]:5.2f} {ratios[name][1]:5.2f} x "
            f"{against[name]}"
        )
    if json_file:
        Path(json_file).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def vocabulary_by_tokenizers(files: list[str], folder: str) -> tuple[int, float]:
    """(bytes, seconds) of the library's own training, texts in memory."""
    from tokenizers import BertWordPieceTokenizer

    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.readers import plan, read

    _, tasks = plan(PrepareConfig(input=files))
    texts = [document.text.decode() for task in tasks for document in read(task)]
    began = time.perf_counter()
    BertWordPieceTokenizer().train_from_iterator(texts, VOCABULARY, show_progress=False)
    return sum(map(len, texts)), time.perf_counter() - began


def vocabulary_by_ours(files: list[str], folder: str) -> tuple[int, float]:
    """(bytes, seconds) of all that `cloze vocab` does."""
    from cloze.pipeline.config import PrepareConfig
    from cloze.pipeline.jobs.vocabulary import train_vocabulary
    from cloze.pipeline.readers import plan, read

    _, tasks = plan(PrepareConfig(input=files))
    size = sum(len(document.text.decode()) for task in tasks for document in read(task))
    began = time.perf_counter()
    train_vocabulary(PrepareConfig(input=files, output=f"{folder}/vocab", vocab_size=VOCABULARY))
    return size, time.perf_counter() - began


def measure(function, rounds: list[float], **arguments) -> None:
    """Run in a fresh process, so that no table is filled and no memory warm; append what it counts a second."""
    count, seconds = begin(function, **arguments)()
    rounds.append(count / seconds)


def begin(function, **arguments) -> Callable[[], tuple[int, float]]:
    """Start it in a process of its own; what is returned waits for its answer."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(sender, function), kwargs=arguments)
    process.start()
    sender.close()

    def wait() -> tuple[int, float]:
        try:
            answered = receiver.recv()
        except EOFError:
            sys.exit(f"{function.__name__} failed")
        process.join()
        return answered

    return wait


def two_jobs(folder: str, **arguments) -> float:
    """Tokens a second of two independent jobs of one worker at once: what this machine's second core adds at most."""
    waits = [begin(ours, folder=f"{folder}/job-{number}", **arguments) for number in range(2)]
    answered = [wait() for wait in waits]
    return sum(count for count, _ in answered) / max(seconds for _, seconds in answered)


def answer(sender, function, **arguments) -> None:
    sender.send(function(**arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 seconds: one round")
    parser.add_argument("--growth", action="store_true", help="how time grows with the corpus and the number of files")
    parser.add_argument("--corpus", help="glob of text or .jsonl files; default: text made of what every Python has")
    parser.add_argument("--rounds", type=int, help="rounds; the best counts (default 3, quick and growth 1)")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    os.environ |= ONE_CORE
    print(own_command("tokenizers", "datasets", "transformers", **ONE_CORE))
    print("Each contender is a function of this file, in a process of its own.\n")
    rounds = options.rounds or (1 if options.quick or options.growth else 3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = GROWTH_BYTES if options.growth and options.quick else MADE_BYTES
        files = sorted(glob.glob(options.corpus)) if options.corpus else made_corpus(folder, made)
        if not files:
            parser.error(f"--corpus: found nothing at {options.corpus}")
        (grow if options.growth else run)(files, folder, rounds, options.json, options.quick)


def run(files: list[str], folder: Path, rounds: int, json_file: str | None, quick: bool) -> None:
    sample = files[:1] if quick else files[:2]  # enough to learn the words from
    learned: dict[str, list[float]] = {"tokenizers": [], "ours": []}
    measure(vocabulary_by_tokenizers, learned["tokenizers"], files=sample, folder=str(folder))
    measure(vocabulary_by_ours, learned["ours"], files=sample, folder=str(folder))
    common = {"files": files, "tokenizer": str(folder / "vocab"), "folder": str(folder)}
    rates: dict[str, list[float]] = {
        "tokenizers": [],
        "datasets_map": [],
        "ours": [],
        "ours_plain": [],
        "two": [],
        "two_jobs": [],
    }
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}")
        measure(bare, rates["tokenizers"], **common)
        measure(ours, rates["ours"], **common)
        if number == 0:
            measure(hugging_face, rates["datasets_map"], **common)
        if number == 0 and not quick:
            measure(ours, rates["ours_plain"], **common, compression="none")
        if (os.cpu_count() or 1) > 1:
            measure(ours, rates["two"], **common, workers=2)
            if not quick:
                rates["two_jobs"].append(two_jobs(**common))
    best = {name: max(values) for name, values in rates.items() if values}
    figures = {
        "ratio_to_tokenizers": best["ours"] / best["tokenizers"],
        "ratio_to_datasets_map": best["ours"] / best["datasets_map"],
        "two_worker_speedup": best.get("two", 0) / best["ours"],
        "two_jobs_speedup": best["two_jobs"] / best["ours"] if "two_jobs" in best else None,
        "vocabulary_ratio_to_tokenizers": learned["ours"][0] / learned["tokenizers"][0],
        "tokens_per_second": {name: round(rate) for name, rate in best.items()},
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }
    labels = {
        "tokenizers": "bare tokenizers.encode_batch_fast",
        "datasets_map": "datasets map + group_texts + collator",
        "ours": "cloze prepare, one worker, zstd",
        "ours_plain": "cloze prepare, one worker, uncompressed",
        "two": "cloze prepare, two workers, zstd",
        "two_jobs": "two jobs of one worker at once",
    }
    print(f"\n{figures['hardware']}")
    for name, rate in best.items():
        print(f"{labels[name]:42} {rate / 1e6:7.2f} M tokens/s  {rate / best['tokenizers']:5.2f} x")
    print(f"two workers against one: {figures['two_worker_speedup']:.2f} x", end="")
    print("" if quick else f" (two jobs at once, which share nothing: {figures['two_jobs_speedup'] or 0:.2f} x)")
    for name, label in (("tokenizers", "vocabulary, tokenizers alone"), ("ours", "vocabulary, cloze vocab")):
        rate = learned[name][0]
        print(f"{label:42} {rate / 1e6:7.2f} MB/s        {rate / learned['tokenizers'][0]:5.2f} x")
    if json_file:
        Path(json_file).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
