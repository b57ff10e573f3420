"""The one server from which tests fork processes that need not import for seconds, and the one list of its imports."""

import multiprocessing

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.forked", "launch.finetune", "launch.finetuning.kinds",
                                   "launch.finetuning.scoring", "launch.finetuning.models",
                                   "launch.finetuning.reporting"])
