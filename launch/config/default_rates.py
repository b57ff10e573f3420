"""Peak learning rates where none is given: by the size of the model."""

import math

Rates = tuple[tuple[float, float], ...]
"""Parameters of the encoder's layers, ascending, and the rate of models of fewer."""

# With BERT's own 1e-4 (Devlin et al. 2019, A.2) small models learn little more than the frequencies of words in the
# number of steps that they usually get. 5e-4: ELECTRA-Small's (Clark et al. 2020, arXiv 2003.10555, appendix A); 1e-3
# and 2e-3: those of configs/pretrain/small.yaml and tiny.yaml; 2e-4: ELECTRA-Base's, for the sizes between them.
PRETRAINING: Rates = ((1_000_000, 2e-3), (5_000_000, 1e-3), (20_000_000, 5e-4), (60_000_000, 2e-4), (math.inf, 1e-4))
# With BERT's own 2e-5 to 5e-5 (Devlin et al. 2019, A.3) small models hardly change. 3e-4: ELECTRA-Small's (Clark et
# al. 2020, arXiv 2003.10555, appendix B) and the largest that Turc et al. 2019 (arXiv 1908.08962) tried for theirs;
# 1e-4: the next of these.
FINETUNING: Rates = ((20_000_000, 3e-4), (60_000_000, 1e-4), (math.inf, 3e-5))


def peak_rate(rates: Rates, parameters: int) -> float:
    """The rate of a model with so many parameters in its encoder's layers."""
    return next(rate for limit, rate in rates if parameters < limit)
