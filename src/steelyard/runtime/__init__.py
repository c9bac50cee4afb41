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
| `optimizer`           | AdamW on each rank's part of the parameters, and its learning rate              |
| `progress`            | the line of progress, metrics as JSON lines, TensorBoard                        |
| `stage_clock`         | how long a rank works in a step, without waiting for other stages               |
| `train`               | the training loop of one rank, its memory limit, and the run record             |
| `persistence`         | how a run begins and what it leaves behind: resume, weights, checkpoints        |
| `state`               | parameters and optimizer states under names that no plan changes                |
| `checkpoint`          | writes checkpoints beside the training, reads anyone's under any plan           |
| `checkpoint_folder`   | which checkpoints are complete, and which may go                  (no torch)    |
| `own_loop`            | checkpoints in the user's own training loop                                     |
| `weights`             | Hugging Face folders, read straight into shards and written                     |
| `parity`              | compares training under a plan with one process                                 |
| `parity_run`          | starts that comparison on this host                               (no torch)    |
| `dry_run`             | the memory of one rank of a plan, on fake tensors                               |
| `peak_memory`         | the peak of what a process's tensors hold, by term                              |
| `outputs`             | what a run writes beside its checkpoints is tried before it begins (no torch)   |
| `options`             | options of a run and their command-line form                      (no torch)    |
| `launch`              | starts a training run on this host                                (no torch)    |
| `process`             | one process of a training run: arguments, checks, the run                       |
| `elastic`             | which plan the processes of an elastic run follow                               |
| `checks`              | what must hold before a plan is run, of options and host          (no torch)    |
"""
