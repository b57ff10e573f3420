"""Constants of the estimate: one set for all devices, each with its source.

† recalled, not read again at the source. tests/launch/tools/planning/test_estimate.py holds them to rates that others
have published, tests/launch/tools/test_plan.py to a run on the CPU. Cloze itself has not been measured on a GPU.
"""

from cloze.launch.system.memory import GIB

# --- Products ---

# Share of the data sheet's rate that the best product of any shape reaches: "maximum achievable matmul FLOPS" of
# stas00/ml-engineering†: A100 87%, H100 80%, B200 78%. The others stand for their neighbours.
BEST_PRODUCT = {
    "volta": 0.80,
    "turing": 0.60,
    "ampere": 0.87,
    "ada": 0.85,
    "hopper": 0.80,
    "blackwell": 0.78,
    "rtx blackwell": 0.85,
}
# Of that, what is left in a step, where the device is warm and its power bounds the clock. The one constant that was
# fitted: to NVIDIA's three rates of BERT-large at 128 on an A100.
SUSTAINED = 0.94
# Share of the peak that products reach at most in the pessimistic column of a plan: what is left if the two constants
# above are too high.
PESSIMISTIC_PRODUCTS = 0.70
# What a tile of a product takes to begin and end (filling the pipeline, writing the tile), as a length of its inner
# loop: four iterations of 32 on Ampere, two of 64 on Hopper, the depth of CUTLASS's default pipelines†.
PRODUCT_OVERHEAD_LENGTH = 128
# Rows and columns of a tile of cuBLAS's and CUTLASS's fastest kernels†, and the least inner length of a part where
# tiles are too few for the processors and the inner loop is divided among them.
TILE = (128, 256)
SPLIT_LENGTH = 512

# Rate of a GPU's products in fp32, and rounded to TF32, to that in 16 bits (A100: 19.5, 156 and 312 TFLOP/s; H100: 67,
# 494 and 989).
FP32_PRODUCTS = 1 / 16
TF32_PRODUCTS = 1 / 2

# --- Attention ---

# Share of the peak that flash attention 2 reaches in whole tiles, heads of 64, forward and backward (arXiv 2307.08691,
# figures 4 to 6†; on Hopper arXiv 2407.08608, figure 5†). Kernels for Blackwell are not in torch 2.13: those of Ampere
# run there, on units of twice Hopper's rate. On other architectures as on Ampere.
FLASH = {"ampere": (0.50, 0.40), "hopper": (0.33, 0.26), "blackwell": (0.16, 0.13)}

# --- Memory and launches ---

# Share of the data sheet's bandwidth. Long copies reach 86 to 93% (BabelStream† on A100 and H100); kernels that
# compute a little on tensors of some 100 MB a few percent less.
BANDWIDTH = 0.82
# Filling and emptying the device at each kernel, while it has others queued: from a kernel's end to the next one's
# start 1 to 1.5 µs†, and a last wave of blocks that is not full.
KERNEL_SECONDS = 2.0e-6
# What the host needs for a launch in eager mode: Python, autocast, dispatch, autograd, launch. The model's operations
# took 5 to 9 µs of one core of an EPYC at a size at which nothing else costs.
HOST_SECONDS = 7.0e-6
# The same for what compiled code launches, guards and autograd of a layer spread over its kernels†.
COMPILED_HOST_SECONDS = 4.0e-6
# Kernels that one operation launches, where they are more (ATen/native/cuda: Embedding.cu, layer_norm_kernel.cu;
# flash_bwd_launch_template.h).
LAUNCHES = {"embedding_dense_backward": 6, "native_layer_norm_backward": 2, "attention_backward": 3}
# Launches of a step to those that a trace shows: an independent count of our step's on the fake GPU found 13 to 16%
# more. Which ones a trace lacks is not known.
LAUNCHES_TO_TRACED = 1.15
# What the host takes for the hook of a parameter's gradient, by which buckets are filled in the last backward†.
HOOK_SECONDS = 5e-6
# An inspected step (training/inspection.py): kernels of each parameter (copy, squares and sums in fp64 of weight,
# gradient, update), and bytes moved of each of its elements.
INSPECTION_LAUNCHES, INSPECTION_BYTES = 16, 80
# Tensors that one kernel of an operation on lists takes (MultiTensorApply.cuh, depth_to_max_tensors, of three lists).
LIST_TENSORS = 48

# --- CPU ---

# Dispatch and memory of an operation on the CPU, which does one after another.
CPU_HOST_SECONDS = 7.0e-6
# What oneDNN compiles and keeps, threads and the allocator hold beside tensors: 165 to 190 MB in the tests' runs.
CPU_CONTEXT_BYTES = 160 * 2**20

# --- Between processes ---

# Share of a link's rate that sums of large buffers reach (nccl-tests' bus bandwidth†: 80 to 85% of NVLink, 90% of
# InfiniBand), and what each of them takes, however small it is, for each doubling of the processes.
COLLECTIVE = 0.8
COLLECTIVE_SECONDS = 20e-6
# Share of a GPU's processors that a collective takes from what is computed beside it: 20 of an H800's 132 where all
# other computing was arranged around it (DeepSeek-V3, arXiv 2412.19437, section 3.2.2†); NCCL takes as many or fewer.
COLLECTIVE_PROCESSORS = 20 / 132
# Most tokens of a rank over the mean: 1.07 with 8 samples a rank on 1,024 ranks, 1.02 with 64 (docs/scaling.md,
# Measured). The deviation of a sum falls with the root of its samples; the largest of n grows with the root of log n.
STRAGGLERS, STRAGGLERS_SAMPLES, STRAGGLERS_RANKS = 0.07, 8, 1024
# The exchange of counts before a step: some ten numbers of 8 bytes (training/totals.py).
COUNTS_BYTES = 100
# Of each process's network card: 400 Gbit/s, one card a GPU, as machines of eight H100 have them.
NETWORK_GIGABYTES = 50.0

# Bytes/s in one direction between GPUs of a machine of which nothing is known: PCIe 4 with 16 lanes.
PCIE = 32e9

# --- Memory beside tensors ---

# CUDA's context with the kernels of torch, cuBLAS, cuDNN and NCCL, and cuBLAS's workspaces (32 MiB on Hopper); with
# several processes NCCL's buffers†.
CONTEXT_BYTES = int(0.7 * GIB)
COLLECTIVE_BUFFER_BYTES = int(0.5 * GIB)
# Elements of DeepSpeed's buckets (zero/config.py: reduce_bucket_size, stage3_max_live_parameters at most the model).
BUCKET_ELEMENTS = int(5e8)

# --- Data ---

# Bytes a token of a shard with ten mask sets, zstd, and tokens/s that one core reads and collates
# (docs/performance.md).
SHARD_BYTES_A_TOKEN = 4.1
TOKENS_A_SECOND_OF_A_READER = 74e6
# Without shards: share of sequences that are cut short, evenly between 1 token and the greatest length (the BERT
# release's short_seq_prob), and of tokens to predict.
SHORT_SHARE = 0.1
MASKED_SHARE = 0.15
# Without a vocabulary in the configuration.
VOCAB_SIZE = 30522
