"""The runs of a task of benchmarks/evidence.py by transformers: its model classes, its tokenizer, its Trainer.

    python benchmarks/evidence_transformers.py SST-2 --model FOLDER --data DIR --seeds 1 2 --output DIR

Files are read here by the standard library, batches made by transformers' collators, and metrics computed by
scikit-learn, scipy and seqeval; of ours are only the settings and SQuAD's normalisation of answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path

import numpy as np
import torch
import transformers
from evidence import BATCH, DROPOUT, SETTINGS, Setting
from scipy.stats import pearsonr
from seqeval.metrics import f1_score
from seqeval.scheme import IOB2
from sklearn.metrics import accuracy_score, matthews_corrcoef

Rows = list[dict]
IGNORED = -100
OVERLAP = 32  # tokens that two windows over a text share
BEST = 20  # starts and ends combined, as in transformers' examples/pytorch/question-answering/utils_qa.py
LONGEST_ANSWER = 30

# Task of cloze finetune -> columns of its texts, column of what is predicted, and its type
COLUMNS = {
    "sst2": (("sentence",), "label", int),
    "cola": ((3,), 1, int),
    "rte": (("sentence1", "sentence2"), "label", {"entailment": 0, "not_entailment": 1}.get),
    "sick-entailment": (
        ("sentence_A", "sentence_B"),
        "entailment_judgment",
        {"CONTRADICTION": 0, "ENTAILMENT": 1, "NEUTRAL": 2}.get,
    ),
    "sick-relatedness": (("sentence_A", "sentence_B"), "relatedness_score", float),
}


def read_texts(task: str, path: Path, tokenizer, max_length: int) -> tuple[Rows, np.ndarray]:
    """Encoded rows with labels, and the labels."""
    texts, label, convert = COLUMNS[task]
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines() if line]
    if task != "cola":  # which has no header
        header = rows.pop(0)
        texts, label = tuple(header.index(name) for name in texts), header.index(label)
    encoded = tokenizer(*[[row[column] for row in rows] for column in texts], truncation=True, max_length=max_length)
    labels = [convert(row[label]) for row in rows]
    return [
        {name: values[n] for name, values in encoded.items()} | {"labels": labels[n]} for n in range(len(rows))
    ], np.array(labels)


def options(model: Path) -> dict:
    """What the configuration of this model's class has beside the number of labels: dropout, and for ModernBERT,
    which has no pooler, the mean of the tokens, as evidence.py tells `cloze finetune`.
    """
    if transformers.AutoConfig.from_pretrained(model).model_type == "bert":
        return {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
    parts = ("embedding_dropout", "attention_dropout", "mlp_dropout", "classifier_dropout")
    return dict.fromkeys(parts, DROPOUT) | {"classifier_pooling": "mean"}


def texts(setting: Setting, data: Path, model: Path, tokenizer) -> tuple:
    """Model, training rows, rows to measure, collator, and the measure of their logits."""
    train, labels = read_texts(setting.task, data / setting.files[0], tokenizer, setting.max_length)
    rows, true = read_texts(setting.task, data / setting.measured, tokenizer, setting.max_length)
    regression = setting.metric == "pearson"
    made = transformers.AutoModelForSequenceClassification.from_pretrained(
        model,
        num_labels=1 if regression else len(set(labels.tolist())),
        problem_type="regression" if regression else "single_label_classification",
        **options(model),
    )

    def measure(logits: np.ndarray) -> float:
        if regression:
            return float(pearsonr(true, logits[:, 0]).statistic)
        score = matthews_corrcoef if setting.metric == "matthews_correlation" else accuracy_score
        return float(score(true, logits.argmax(1)))

    return made, train, rows, transformers.DataCollatorWithPadding(tokenizer), measure


def read_words(path: Path) -> list[tuple[list[str], list[str]]]:
    """(words, tags) of the sentences of a CoNLL file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    sentences = [list(group) for filled, group in itertools.groupby(lines, lambda line: bool(line.strip())) if filled]
    rows = [[line.split("\t") for line in sentence] for sentence in sentences]
    return [([fields[0] for fields in sentence], [fields[-1] for fields in sentence]) for sentence in rows]


def tags(setting: Setting, data: Path, model: Path, tokenizer) -> tuple:
    """As `texts`: a word's tag is learned and read at its first token."""
    files = [read_words(data / name) for name in (setting.files[0], setting.measured)]
    names = sorted({tag for _, found in files[0] for tag in found}, key=lambda tag: (tag != "O", tag))

    def encode(sentences) -> tuple[Rows, list[list[int | None]]]:
        encoded = tokenizer(
            [words for words, _ in sentences], is_split_into_words=True, truncation=True, max_length=setting.max_length
        )
        rows, words_of = [], []
        for number, (_, found) in enumerate(sentences):
            words = encoded.word_ids(number)
            first = [
                word if word is not None and word not in words[:place] else None for place, word in enumerate(words)
            ]
            words_of.append(first)
            rows.append(
                {name: values[number] for name, values in encoded.items()}
                | {"labels": [IGNORED if word is None else names.index(found[word]) for word in first]}
            )
        return rows, words_of

    train, _ = encode(files[0])
    rows, words_of = encode(files[1])
    made = transformers.AutoModelForTokenClassification.from_pretrained(model, num_labels=len(names), **options(model))

    def measure(logits: np.ndarray) -> float:
        guessed = []
        for (words, _), places, scores in zip(files[1], words_of, logits, strict=True):
            found = ["O"] * len(words)  # also of words that were cut, or that the tokenizer makes nothing of
            for place, word in enumerate(places):
                if word is not None:
                    found[word] = names[scores[place].argmax()]
            guessed.append(found)
        return float(f1_score([true for _, true in files[1]], guessed, mode="strict", scheme=IOB2, zero_division=0))

    return made, train, rows, transformers.DataCollatorForTokenClassification(tokenizer), measure


def read_questions(path: Path) -> list[tuple[str, str, list[dict]]]:
    """(question, context, answers)."""
    articles = json.loads(path.read_text(encoding="utf-8"))["data"]
    return [
        (each["question"], paragraph["context"], each["answers"])
        for article in articles
        for paragraph in article["paragraphs"]
        for each in paragraph["qas"]
    ]


def answers(setting: Setting, data: Path, model: Path, tokenizer) -> tuple:
    """As `texts`: windows over the contexts, the best span over all of them."""
    files = [read_questions(data / name) for name in (setting.files[0], setting.measured)]

    def encode(questions):
        return tokenizer(
            [each[0] for each in questions],
            [each[1] for each in questions],
            truncation="only_second",
            max_length=setting.max_length,
            stride=OVERLAP,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )

    encoded = [encode(questions) for questions in files]
    names = [name for name in tokenizer.model_input_names if name in encoded[0]]
    train = []
    for number, question in enumerate(encoded[0]["overflow_to_sample_mapping"]):
        answer = files[0][question][2][0]
        low, high = answer["answer_start"], answer["answer_start"] + len(answer["text"])
        places = [
            place
            for place, (start, end) in enumerate(encoded[0]["offset_mapping"][number])
            if encoded[0].sequence_ids(number)[place] == 1 and start < high and end > low
        ]
        covered = (
            places
            and encoded[0]["offset_mapping"][number][places[0]][0] <= low
            and (encoded[0]["offset_mapping"][number][places[-1]][1] >= high)
        )
        train.append(
            {name: encoded[0][name][number] for name in names}
            | {"start_positions": places[0] if covered else 0, "end_positions": places[-1] if covered else 0}
        )
    rows = [{name: encoded[1][name][number] for name in names} for number in range(len(encoded[1]["input_ids"]))]
    made = transformers.AutoModelForQuestionAnswering.from_pretrained(model, **options(model))

    def measure(logits: list[tuple[np.ndarray, np.ndarray]]) -> float:
        best = [(-np.inf, "")] * len(files[1])
        for number, question in enumerate(encoded[1]["overflow_to_sample_mapping"]):
            best[question] = max(
                best[question],
                best_span(
                    *logits[number],
                    encoded[1]["offset_mapping"][number],
                    encoded[1].sequence_ids(number),
                    files[1][question][1],
                ),
            )
        return 100 * float(np.mean([f1(text, question[2]) for (_, text), question in zip(best, files[1], strict=True)]))

    return made, train, rows, transformers.DataCollatorWithPadding(tokenizer), measure


def best_span(starts: np.ndarray, ends: np.ndarray, offsets: list, sides: list, context: str) -> tuple[float, str]:
    """Score and text of the best span of one window."""
    best = (-np.inf, "")
    inside = [place for place, side in enumerate(sides) if side == 1]
    for start in sorted(inside, key=lambda place: -starts[place])[:BEST]:
        for end in sorted(inside, key=lambda place: -ends[place])[:BEST]:
            if start <= end < start + LONGEST_ANSWER:
                best = max(best, (float(starts[start] + ends[end]), context[offsets[start][0] : offsets[end][1]]))
    return best


def f1(answer: str, right: list[dict]) -> float:
    """SQuAD's F1 against the best of the right answers."""
    from cloze.launch.finetune import squad

    return max(squad.f1(answer, each["text"], squad.normalized_words, version_2=False) for each in right)


def predict(model, rows: Rows, tokenizer) -> list:
    """Logits of each row, without its padding: (outputs,), (tokens, outputs), or a pair of (tokens,)."""
    model.eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            inputs = [{name: value for name, value in row.items() if name != "labels"} for row in part]
            output = model(**transformers.DataCollatorWithPadding(tokenizer)(inputs).to(model.device))
            if hasattr(output, "start_logits"):
                found += zip(
                    output.start_logits.float().cpu().numpy(), output.end_logits.float().cpu().numpy(), strict=True
                )
            else:
                found += list(output.logits.float().cpu().numpy())
    return found


def finetune(setting: Setting, seed: int, data: Path, model_folder: Path, output: Path) -> None:
    """One run; writes results.json in the form of `cloze finetune`."""
    transformers.set_seed(seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    build = {"f1": tags if setting.task == "ner" else answers}.get(setting.metric, texts)
    model, train, rows, collate, measure = build(setting, data, model_folder, tokenizer)
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(output),
            per_device_train_batch_size=BATCH,
            num_train_epochs=setting.epochs,
            learning_rate=setting.rate,
            warmup_steps=0.1,
            weight_decay=0.01,
            adam_epsilon=1e-6,
            max_grad_norm=1.0,
            bf16=True,
            seed=seed,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=train,
        data_collator=collate,
        processing_class=tokenizer,
    )
    trainer.train()
    logits = predict(trainer.model, rows, tokenizer)
    value = measure(np.stack(logits) if build is texts else logits)
    output.mkdir(parents=True, exist_ok=True)
    aside = output / "results.json.tmp"
    aside.write_text(json.dumps({setting.split: {setting.metric: None if value != value else value}}) + "\n")
    os.replace(aside, output / "results.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SETTINGS)
    for name in ("model", "data", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for seed in arguments.seeds:
        finetune(SETTINGS[arguments.name], seed, arguments.data, arguments.model, arguments.output / f"seed-{seed}")


if __name__ == "__main__":
    main()
