"""Which sample comes when: a pure function of the seed and the sources' sizes, for any number of ranks and workers."""
