"""Carries a plan out: mesh, sharding, pipeline and data, on stock PyTorch.

| module                | what it does                                                                    |
|-----------------------|---------------------------------------------------------------------------------|
| `parallel_model`      | a model under a plan in the user's own training loop: `parallelize`             |
| `mesh`                | the device mesh of a plan                                                       |
| `sharding`            | applies a strategy to one layer                                                 |
| `stage`               | the layers of a pipeline stage, with redistributions between unlike neighbours  |
| `pipeline_part`       | what parts of a pipeline exchange, held while it is used                        |
| `tied`                | embedding and head that share a matrix, under any two strategies                |
| `observed_strategies` | reads back what was really done to each layer                                   |
| `data`                | text, token files and images as samples in an order that no plan changes        |
| `optimizer`           | AdamW on each rank's part of the parameters, and its learning rate              |
| `progress`            | the line of progress, metrics as JSON lines, TensorBoard                        |
| `stage_clock`         | how long a rank works in a step, without waiting for other stages               |
| `own_loop`            | checkpoints in the user's own training loop                                     |
| `train`               | the training loop of one rank, and the run record                               |
| `persistence`         | how a run begins and what it leaves behind: resume, weights, checkpoints        |
| `state`               | parameters and optimizer states under names that no plan changes                |
| `checkpoint`          | writes checkpoints beside the training, reads them under any plan               |
| `checkpoint_reader`   | reads checkpoints that anyone may have written: no code of theirs runs          |
| `checkpoint_folder`   | which checkpoints are complete, and which may go                  (no torch)    |
| `weights`             | Hugging Face folders, read straight into shards and written                     |
| `stored_weights`      | where parameters lie in files whose tensors have other names or are in pieces   |
| `memory_limit`        | how a run ends when memory runs out                                             |
| `peak_memory`         | the peak of what a process's tensors hold                                       |
| `outputs`             | what a run writes beside its checkpoints is tried before it begins (no torch)  |
| `options`             | options of a run and their command-line form                         (no torch) |
| `launch`              | starts a training run on this host                                   (no torch) |
| `process`             | one process of a training run: arguments, checks, the run                       |
| `checks`              | what must hold before a plan is run                                  (no torch) |
"""
