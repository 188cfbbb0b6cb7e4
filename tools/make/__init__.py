"""What `make` and the maintainers generate or build."""
