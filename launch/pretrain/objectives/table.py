"""The table of objectives by name. It imports none of them: `--help` lists them without torch."""

from cloze.pipeline.references import Entry

OBJECTIVES = {
    "masked": Entry(
        "cloze.launch.pretrain.objectives.masked:MaskedTokens",
        "masked tokens, and next sentences if the data has pairs",
    ),
    "span_boundary": Entry(
        "cloze.launch.pretrain.objectives.span_boundary:SpanBoundary",
        "as masked, and each masked token is also predicted from the tokens around its span",
    ),
    "distillation": Entry(
        "cloze.launch.pretrain.objectives.distillation:Distillation",
        "masked tokens, and a teacher's outputs for them (objective_options.teacher)",
    ),
    "replaced_tokens": Entry(
        "cloze.launch.pretrain.objectives.replaced_tokens:ReplacedTokens",
        "ELECTRA's generator and discriminator",
    ),
}
