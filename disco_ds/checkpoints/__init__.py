"""The life cycle of a checkpoint: write, complete, upload, retain, resume, reshard, export.

Imported by training, cli, run.py and the package's __init__.py.

1. **Write.** When a save is due, `saver` copies the state of every rank into host memory
   (`checkpoint`, `background_save`): the content of DeepSpeed's engine files, the loss's state, the
   position in the data order, and the states of the random generators. Training then continues. On
   each rank, a thread writes the copy into `.step-N.partial` and hashes it. If training must wait for
   the threads, the ranks call a short collective every two seconds, so that no collective times out.
2. **Complete.** When all ranks have written their files, they exchange sizes and checksums. A thread
   of rank 0 then writes `checkpoint.json`, flushes the folders and renames `.step-N.partial` to
   `step-N`. A folder called `step-N` is therefore complete, and a killed run leaves nothing that
   could be mistaken for a checkpoint.
3. **Upload.** `upload` runs the user's `checkpoint.copy_command` on each new checkpoint, one at a
   time. Uploads that a killed run left unfinished are repeated when the run is resumed.
4. **Retain.** `retention` removes old checkpoints. Damaged checkpoints do not count
   toward the number to keep, so the last intact checkpoint is never removed.
5. **Resume.** `resume` chooses a checkpoint, compares its settings with those of the run
   (`changes`), and verifies the checksum of every file before any file is parsed. If a file is
   damaged, an unattended run falls back to the previous checkpoint. Checkpoints newer than the
   chosen one are set aside.
6. **Reshard.** If the number of ranks, the ZeRO stage, the precision or the image size has changed,
   `reshard` loads the weights and the optimizer's state by parameter name, from the `fragments` that
   the ranks of the old run wrote. Otherwise the resumed run is bit-identical to an uninterrupted one.
7. **Export.** `weights` reads only the trained weights, or their average, for evaluation. `export` writes them for
   open_clip and other libraries.
"""
