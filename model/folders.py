"""Models as objects: from a folder and to one."""

from __future__ import annotations

import dataclasses
import os

from model.config import BertConfig, HeadConfig, ModelError
from model.hub import load_head, load_note, load_pretrained, save_pretrained
from model.initialization import init_weights
from model.names import StateDict


class InFolders:
    """What makes a model class loadable from a folder, and its objects savable to one."""

    takes_head = False
    """Whether the constructor takes a `head`."""
    new_parameters: tuple[str, ...] = ()
    """After from_folder: the parameters of a head that the folder did not hold and that were drawn."""

    @classmethod
    def from_folder(
        cls, folder: str | os.PathLike, *, head: HeadConfig | None = None, new_head_seed: int | None = None, **options
    ):
        """The model in `folder`, in evaluation mode; heads of the folder that this class lacks are left out.

        `head`: labels of a new classifier; None takes the folder's. `new_head_seed`: draws a head that the
        folder lacks (or that has other labels); without a seed that raises ModelError, but a BertModel that was saved
        without its pooler has none. `options`: of the constructor.
        """
        config, weights = load_pretrained(folder)
        pooled = any(name.startswith("bert.pooler.") for name in weights)
        if new_head_seed is None and not pooled and load_note(folder, "architectures") == ["BertModel"]:
            config = dataclasses.replace(config, pooler=False)  # which config.json of transformers does not say
        if cls.takes_head:
            options["head"] = head or load_head(folder)
        return cls.from_weights(config, weights, str(folder), new_head_seed=new_head_seed, **options)

    @classmethod
    def from_weights(
        cls, config: BertConfig, weights: StateDict, source: str, *, new_head_seed: int | None = None, **options
    ):
        """The same from weights under our names; `source` names them in errors."""
        if config.classifier_transform and config.mlm_head == "bert":
            # One head of these names in ModernBERT: a classifier goes on with that of masked language modelling.
            learned = {name.replace("masked_lm.", "transform."): tensor for name, tensor in weights.items()
                       if name.startswith(("masked_lm.dense.", "masked_lm.norm."))}
            weights = learned | weights
        model = cls(config, **options)
        prefix = "" if hasattr(model, "bert") else "bert."
        wanted = {prefix + name: tensor.shape for name, tensor in model.state_dict().items()}
        fitting = {name: weights[name] for name in wanted if name in weights and weights[name].shape == wanted[name]}
        lacking = tuple(name for name in wanted if name not in fitting)
        broken = [name for name in lacking if name.startswith("bert.") and ".pooler." not in name]
        if broken:
            raise ModelError(f"{source}: {broken[0]} is missing or misshapen, expected the whole encoder")
        if lacking and new_head_seed is None:
            raise ModelError(
                f"{source}: found no {lacking[0]}, expected a {cls.__name__}; give new_head_seed to draw it"
            )
        if lacking:
            init_weights(model, new_head_seed)
        found = {name.removeprefix(prefix): tensor for name, tensor in fitting.items()}
        model.load_state_dict(found, strict=False)  # every name was accounted for above
        model.new_parameters = tuple(name.removeprefix(prefix) for name in lacking)
        return model.eval()

    def save(self, folder: str | os.PathLike, tokenizer_folder: str | os.PathLike | None = None) -> None:
        """Write the model as `save_pretrained` does."""
        head, name = getattr(self, "head", None), type(self).__name__
        save_pretrained(folder, self.config, self.state_dict(), tokenizer_folder, architecture=name, head=head)
