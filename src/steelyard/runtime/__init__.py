"""Carries a plan out: mesh, sharding, pipeline and data, on stock PyTorch.

| module           | what it does                                                                       |
|------------------|------------------------------------------------------------------------------------|
| `parallel_model` | a model under a plan in the user's own training loop: `parallelize`                |
| `mesh`           | the device mesh of a plan                                                          |
| `sharding`       | applies a strategy to one layer                                                    |
| `stage`          | the layers of a pipeline stage, with redistributions between unlike neighbours     |
| `tied`           | embedding and head that share a matrix, under any two strategies                   |
| `applied`        | reads back what was really done to each layer                                      |
| `data`           | text and token files as samples in an order that no plan changes                   |
| `train`          | the training loop of one rank, and the run record                                  |
| `memory`         | the peak of what a process's tensors hold                                          |
| `options`        | options of a run and their command-line form                         (no torch)    |
| `launch`         | starts a training run on this host                                   (no torch)    |
| `process`        | one process of a training run: arguments, checks, the run                          |
| `checks`         | what must hold before a plan is run                                  (no torch)    |
"""
