"""Tools with which `make` and the maintainers generate files and build packages."""
