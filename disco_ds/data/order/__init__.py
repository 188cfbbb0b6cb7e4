"""The data order: the sequence in which samples are read, a pure function of the seed, the sources and the settings.

It does not depend on the number of ranks or workers.
"""
