"""Processor time of a step of each family of encoders: Cloze against the class of transformers, on the same batches.

    python benchmarks/families.py [--rounds 7] [--families bert distilbert] [--json FILE]

A step is forward, loss of the masked tokens and backward, fp32, dropout 0, one thread. Both take turns in one process,
so that a busy machine hurts both alike; medians of processor time are compared. transformers has the faster of eager
attention and SDPA, where it has both. Of the two figures of a family one is of sequences of which half are short, as
Cloze trains on them (one after another, without padding), and one of full ones, which need none, in the padded layout.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from synthetic_batches import concatenate, hardware, make_batch, own_command

VOCABULARY, LENGTH, SEQUENCES, FULL_SHARE = 8192, 128, 8, 0.5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
}
# model_type -> what it has beside sizes, in its own names.
OWN: dict[str, dict] = {
    "electra": {"embedding_size": 128},
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), {"max_position_embeddings": LENGTH + 1}),
    "albert": {"embedding_size": 128},
    "deberta-v2": {
        **{"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 64, "share_att_key": True},
        **{"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0},
    },
    "mpnet": {"pad_token_id": 1, "max_position_embeddings": LENGTH + 2},
    "eurobert": {"num_key_value_heads": 2},
}


def steps_of(kind: str, batch: dict) -> dict[str, Callable[[], None]]:
    """A step of each contender: ours without padding, ours padded, and theirs by attention."""
    import torch
    import transformers

    from cloze.model.families import BY_TYPE
    from cloze.model.huggingface import config_to_huggingface
    from cloze.model.initialization import init_weights
    from cloze.model.tasks import BertForMaskedLM

    family = BY_TYPE[kind]
    sizes = {theirs: SIZES[ours] for ours, theirs in family.fields.items() if ours in SIZES}
    shape = family.read({"model_type": kind, **sizes, **OWN.get(kind, {})})
    values = vars(shape) | {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "vocab_padding_multiple": 1,
    }
    ours = BertForMaskedLM(type(shape)(**values)).train()
    init_weights(ours, 0)
    described = config_to_huggingface(ours.config, "BertForMaskedLM", torch.float32)
    padded = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    flat = concatenate(batch)
    del flat["next_sentence_label"], flat["token_type_ids"]

    def step(model: torch.nn.Module, given: dict) -> Callable[[], None]:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            model(**given).loss.backward()

        return run

    found = {"ours": step(ours, flat), "ours, padded": step(ours, padded)}
    beginning = {"model_type", "architectures", "dtype"}
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in described.items() if k not in beginning})
    for attention in ("eager", "sdpa"):
        try:
            theirs = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=attention).train()
        except ValueError:  # which has no such attention
            continue
        found[f"transformers, {attention}"] = step(theirs, padded)
    return found


def seconds_of(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median processor seconds of a step of each, in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):  # two to warm up
        for name, step in steps.items():
            began = time.process_time()
            step()
            if number >= 2:
                seconds[name].append(time.process_time() - began)
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    import torch

    from cloze.model.families import BY_TYPE, FAMILIES

    each = [next(iter(family.class_prefixes)) for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="measured steps of each contender")
    parser.add_argument("--families", nargs="+", default=each, choices=list(BY_TYPE), help="default: one of each file")
    parser.add_argument("--json", metavar="FILE", help="write ratio_KIND and ratio_padded_KIND there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(own_command("transformers", "torch"))
    print(f"{hardware('cpu')}, 1 thread; processor time of a step relative to transformers\n")
    figures = {}
    print(f"{'':<14}{'no padding':>12}{'full, padded':>14}{'transformers':>16}")
    for kind in arguments.families:
        mixed, full = (make_batch(VOCABULARY, LENGTH, share, SEQUENCES, 0) for share in (FULL_SHARE, 1.0))
        free, filled = (seconds_of(steps_of(kind, batch), arguments.rounds) for batch in (mixed, full))
        best = [
            min(value for name, value in times.items() if name.startswith("transformers")) for times in (free, filled)
        ]
        ratios = free["ours"] / best[0], filled["ours, padded"] / best[1]
        figures |= {f"ratio_{kind}": ratios[0], f"ratio_padded_{kind}": ratios[1]}
        print(f"{kind:<14}{ratios[0]:12.2f}{ratios[1]:14.2f}{best[0]:14.3f} s", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
