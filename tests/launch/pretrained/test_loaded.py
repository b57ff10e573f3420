"""Models that are loaded."""

from cloze.launch.predict.predictor import Predictor
from cloze.launch.pretrained.loaded import LoadedModel
from cloze.model.bert import BertForPreTraining
from cloze.model.config import BertConfig
from cloze.model.initialization import init_weights
from tests.launch.tiny_models import tokenizer


def test_a_head_that_is_its_embeddings_comes_back_from_our_own_format(tmp_path):
    ours, text = tokenizer(), "the [MASK] sat on the mat ."
    ours.save(tmp_path)
    config = BertConfig(
        vocab_size=ours.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        mlm_head="linear",
        decoder_bias=False,
        pooler=False,
        type_vocab_size=0,
    )
    model = BertForPreTraining(config).eval()
    init_weights(model, 0)
    model.save(tmp_path, tmp_path)
    assert Predictor.from_folder(tmp_path).fill_mask(text) == Predictor(LoadedModel(model, ours)).fill_mask(text)
