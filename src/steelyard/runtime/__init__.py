"""Run a plan: mesh, sharding, pipeline and data, on stock PyTorch.

| module                | purpose                                                                           |
|-----------------------|-----------------------------------------------------------------------------------|
| `parallel_model`      | a model under a plan in the user's own training loop: `parallelize`               |
| `mesh`                | device mesh of a plan                                                             |
| `stage`               | layers of a pipeline stage, each under its strategy, with resharding between them |
| `pipeline_part`       | tensors that parts of a pipeline exchange, freed as early as possible             |
| `tied`                | embedding and head that share a matrix, under any two strategies                  |
| `observed_strategies` | the strategy that each layer really runs under, read from its modules             |
| `data`                | text, token files and images as samples in an order independent of the plan       |
| `optimizer`           | optimizers of a plan, learning rate schedule and weight decay                     |
| `progress`            | progress line, metrics as JSON lines, TensorBoard, experiment trackers            |
| `stage_clock`         | time that a rank works in a step, without waiting for other stages                |
| `evaluation`          | loss on data that a run does not train on                                         |
| `train`               | training loop of one rank, its memory limit, and the run record                   |
| `divergence`          | detection of a diverged run, which it ends                                        |
| `persistence`         | start and results of a run: resume, weights, checkpoints                          |
| `state`               | parameters and optimizer states under names independent of the plan               |
| `checkpoint`          | asynchronous checkpoints, readable under any plan                                 |
| `checkpoint_folder`   | complete checkpoints of a folder, and which to delete (no torch)                  |
| `weights`             | Hugging Face folders, read directly into shards and written                       |
| `parity`              | comparison of training under a plan with one process                              |
| `parity_run`          | launch of that comparison on this host (no torch)                                 |
| `dry_run`             | memory of one rank of a plan, on fake tensors                                     |
| `peak_memory`         | peak of the live tensors of a process, by term                                    |
| `options`             | options of a run and their command-line form (no torch)                           |
| `launch`              | launch of a training run on this host (no torch)                                  |
| `process`             | one process of a training run: arguments, checks, its plan, the run               |
| `checks`              | checks of options, outputs and host before a run (no torch)                       |
"""
