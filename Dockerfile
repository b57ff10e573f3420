# The image that launch/clusters/kubernetes-*.yaml start. docs/clusters.md says how to build it.
#
#   docker build -t registry.example.com/cloze:0.1 .
ARG BASE=python:3.12-slim
FROM ${BASE}

# Where pip looks for torch beside PyPI, whose build is for CUDA: https://download.pytorch.org/whl/cpu for CPUs.
ARG TORCH_INDEX=
# Of setup.cfg: what is installed beside the core.
ARG EXTRAS=hub,finetune,stores
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_EXTRA_INDEX_URL=${TORCH_INDEX}

# A C compiler, by which Triton makes what torch.compile needs on GPUs (150 MB); the headers of python:…-slim are there.
# A CUDA base such as nvidia/cuda brings no Python. (Its version is the base's, whichever that is.)
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && if ! python3 -m venv --help > /dev/null; then \
        apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/*
# One such as pytorch/pytorch brings torch, which is seen from the environment and kept.
RUN python3 -m venv --system-site-packages /opt/cloze
ENV PATH=/opt/cloze/bin:${PATH}

WORKDIR /cloze
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY .ci/install.py .ci/install.py
COPY cloze cloze
COPY configs configs
COPY launch launch
COPY model model
COPY pipeline pipeline
RUN if python -c "import torch" 2> /dev/null; then sed -i '/^torch==/d' constraints.txt; fi
# hadolint ignore=DL3059
RUN python .ci/install.py --constraint constraints.txt --editable ".[${EXTRAS}]"

# By number, so that Kubernetes knows that it is not root's.
# hadolint ignore=DL3059
RUN useradd --uid 10001 --create-home cloze
USER 10001
RUN cloze --version
CMD ["cloze", "--help"]
