"""A checkpoint's life, from the save to the export. Imported by training, plan, checks and cli.

1. Begin: `checkpoint.start_save` copies the state of every rank (DeepSpeed's engine files, the
   loss's state per sample, the cursors of the data order, random generators) into pinned host
   memory. Training then continues.
2. Write: a thread of each rank (`background_save`, `writer`) writes and hashes that copy into
   `step-N.partial`.
3. Complete: once all ranks have written, rank 0 seals the folder with the hash of every file and
   renames it to `step-N`. A folder without a seal is not a checkpoint, so a killed run leaves
   nothing that looks like one.
4. Keep: `retention` removes old checkpoints; `upload` runs the user's command on each new one.
5. Resume: `resume` chooses a checkpoint and verifies its hashes; a damaged one gives way to the one
   before it. `changes` compares its settings with the run's. At another world size, ZeRO stage or
   precision, `reshard` loads the states by parameter name.
6. Use: `weights` reads the weights alone, for evaluation; `export` writes them for other libraries.
"""
