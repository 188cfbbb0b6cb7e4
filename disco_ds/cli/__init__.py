"""The command line `disco-ds`. Most modules implement one command each."""
