"""Carries a plan out: mesh, sharding, pipeline and data, on stock PyTorch.

| module                | what it does                                                                    |
|-----------------------|---------------------------------------------------------------------------------|
| `parallel_model`      | a model under a plan in the user's own training loop: `parallelize`             |
| `mesh`                | the device mesh of a plan                                                       |
| `stage`               | the layers of a pipeline stage, each under its strategy, redistributing between |
| `pipeline_part`       | what parts of a pipeline exchange, held while it is used                        |
| `tied`                | embedding and head that share a matrix, under any two strategies                |
| `observed_strategies` | reads back what was really done to each layer                                   |
| `data`                | text, token files and images as samples in an order that no plan changes        |
| `optimizer`           | the optimizers of a plan, their learning rate and what decays                   |
| `progress`            | the line of progress, metrics as JSON lines, TensorBoard                        |
| `stage_clock`         | how long a rank works in a step, without waiting for other stages               |
| `evaluation`          | the loss of data that a run does not train on                                   |
| `train`               | the training loop of one rank, its memory limit, and the run record             |
| `divergence`          | says when a run goes wrong, and ends it                                         |
| `persistence`         | how a run begins and what it leaves behind: resume, weights, checkpoints        |
| `state`               | parameters and optimizer states under names that no plan changes                |
| `checkpoint`          | checkpoints beside the training or in the user's own loop, read under any plan  |
| `checkpoint_folder`   | which checkpoints are complete, and which may go                  (no torch)    |
| `weights`             | Hugging Face folders, read straight into shards and written                     |
| `parity`              | compares training under a plan with one process                                 |
| `parity_run`          | starts that comparison on this host                               (no torch)    |
| `dry_run`             | the memory of one rank of a plan, on fake tensors                               |
| `peak_memory`         | the peak of what a process's tensors hold, by term                              |
| `options`             | options of a run and their command-line form                      (no torch)    |
| `launch`              | starts a training run on this host                                (no torch)    |
| `process`             | one process of a training run: arguments, checks, the plan it follows, the run  |
| `checks`              | what must hold before a run, of options, outputs and host         (no torch)    |
"""
