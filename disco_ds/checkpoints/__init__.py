"""The life cycle of a checkpoint: save, keep, resume, export.

Imported by training, cli, run.py and the package's __init__.py.

1. **Save.** `save` copies the state of every rank into host memory, and training continues: the content of DeepSpeed's
   engine files, the loss's state, the position in the data order, and the states of the random generators. Threads
   write and hash the copy in `.step-N.partial`. When all ranks have written their files, a thread of rank 0 writes
   `checkpoint.json`, flushes the folders and renames `.step-N.partial` to `step-N`. A folder called `step-N` is
   therefore complete, and a killed run leaves nothing that could be mistaken for a checkpoint.
2. **Keep.** `keep` runs the user's `checkpoint.copy_command` on each new checkpoint and removes old checkpoints.
   Damaged ones do not count toward the number to keep, so the last intact checkpoint is never removed.
3. **Resume.** `resume` finds a checkpoint and compares its settings with those of the run. `checkpoint` verifies the
   checksum of every file before any file is parsed. If a file is damaged, an unattended run falls back to the previous
   checkpoint. Checkpoints newer than the one that is resumed are set aside. `state` reads the weights and the
   optimizer's states by parameter name, so the number of ranks, the ZeRO stage, the precision and the image size may
   have changed. If they have not, the resumed run is bit-identical to an uninterrupted one.
4. **Export.** `weights` reads only the trained weights, or their average, and builds the model. `export` writes them
   for open_clip and other libraries.
"""
