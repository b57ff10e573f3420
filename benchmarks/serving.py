"""Requests a second of `cloze serve` with batches across requests, over those with one text at a time.

    python benchmarks/serving.py [--clients 32] [--seconds 10] [--json FILE]

The same server, model (configs/model/small.yaml, random weights) and clients, once with --max_batch_tokens 1. Each
client sends one sentence with a blank, waits, checks that the answer is about its own sentence, and sends the next.
"""

from __future__ import annotations

import argparse
import http.client
import json
import platform
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cloze.launch.system.environment.launchers import child_variables
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from cloze.pipeline.records import ROLES
from cloze.pipeline.tokenization.backends import wordpiece_backend
from cloze.pipeline.tokenization.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = 8192  # as in the README's commands


def make_model(folder: Path) -> list[str]:
    """The small model with random weights in a folder; returns the words of its vocabulary."""
    names = dict(zip(ROLES, ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"), strict=True))
    words = [f"w{number}" for number in range(VOCABULARY - len(names))]
    tokens = {token: number for number, token in enumerate([*names.values(), *words])}
    Tokenizer(wordpiece_backend(tokens, names, True, None), names).save(folder)
    values = yaml.safe_load((ROOT / "configs" / "model" / "small.yaml").read_text())
    model = BertForPreTraining(BertConfig(**(values | {"vocab_size": VOCABULARY})))
    init_weights(model, 0)
    model.save(folder)
    return words


def measure(folder: Path, words: list[str], max_batch_tokens: int, clients: int, seconds: float) -> float:
    """Answered requests a second."""
    command = [
        sys.executable,
        "-m",
        "cloze",
        "serve",
        str(folder),
        "--port",
        "0",
        "--max_batch_tokens",
        str(max_batch_tokens),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=child_variables()) as process:
        port = int(re.search(r":(\d+) ", process.stdout.readline())[1])
        counts, problems, begin, stop = [0] * clients, [], threading.Event(), threading.Event()

        def client(number: int) -> None:
            rng, connection = random.Random(number), http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            begin.wait()
            while not stop.is_set():
                sentence = rng.choices(words, k=rng.randint(4, 14))
                sentence[rng.randrange(len(sentence))] = "[MASK]"
                text = " ".join(sentence)
                connection.request(
                    "POST", "/fill-mask", json.dumps({"inputs": [text]}), {"content-type": "application/json"}
                )
                answer = connection.getresponse()
                content = json.loads(answer.read())
                if answer.status != 200 or content["results"][0]["text"] != text:
                    problems.append(content)
                    return
                counts[number] += 1

        threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        begin.set()
        time.sleep(1)  # the first batches allocate
        before, began = sum(counts), time.perf_counter()
        time.sleep(seconds)
        rate = (sum(counts) - before) / (time.perf_counter() - began)
        stop.set()
        for thread in threads:
            thread.join()
        process.terminate()
        process.communicate()
    if problems:
        raise RuntimeError(f"a request was lost or mixed up: {problems[0]}")
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        words = make_model(Path(folder))
        rates = {1: [], 8192: []}
        for _ in range(arguments.rounds):  # in turn, so that a busy moment of the machine meets both
            for size, found in rates.items():
                found.append(measure(Path(folder), words, size, arguments.clients, arguments.seconds))
    single, batched = (sorted(found)[len(found) // 2] for found in rates.values())
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    result = {
        "hardware": f"{device}, {platform.machine()}",
        "clients": arguments.clients,
        "requests_per_second": batched,
        "one_by_one": single,
        "ratio": batched / single,
    }
    print(
        "\n".join(
            f"{name:20} {value:.2f}" if isinstance(value, float) else f"{name:20} {value}"
            for name, value in result.items()
        )
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
