"""The data order: which sample comes when, as a pure function of the seed and the sources' sizes.

It does not depend on the number of ranks or workers.
"""
