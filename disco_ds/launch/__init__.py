"""`disco-ds launch` starts the ranks on all hosts and restarts them after a failure."""
